"""The algorithms, one file each: settings, description, bytes sent, schedule and class.

Other distributions register theirs by an entry point in the group ``lsgd.algorithms``: the class of the settings.
Servers read these files too, without torch: see :mod:`lsgd.lazy`.
"""

from lsgd.algorithms.base import Algorithm, Flat
from lsgd.registry import Registry
from lsgd.settings import AlgorithmSettings

__all__ = ["ALGORITHMS", "Algorithm", "Flat"]

ALGORITHMS: Registry[AlgorithmSettings] = Registry("lsgd.algorithms", AlgorithmSettings, "algorithm")
"""The settings class of each algorithm, by its name."""
