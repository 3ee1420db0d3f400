"""The algorithms, one file each: settings, description, bytes sent, schedule and class.

Another distribution registers its own by an entry point ``lsgd.algorithms``, the class of its settings. Servers read
these files too, and load no torch: see :mod:`lsgd.lazy`.
"""

from lsgd.algorithms.base import Algorithm, Flat
from lsgd.registry import Registry
from lsgd.settings import AlgorithmSettings

__all__ = ["ALGORITHMS", "Algorithm", "Flat"]

ALGORITHMS: Registry[AlgorithmSettings] = Registry("lsgd.algorithms", AlgorithmSettings, "algorithm")
"""Settings of each algorithm by its name."""
