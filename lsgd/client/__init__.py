"""The client library: :class:`Worker` joins a training loop to a run.

:func:`device` says where its model belongs, and :func:`muon` makes an optimizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsgd.client.control.identity import device
    from lsgd.client.optimizer import muon
    from lsgd.client.worker import Worker

__all__ = ["Worker", "device", "muon"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and torch with it, only then: the launcher needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = {"Worker": "worker", "device": "control.identity", "muon": "optimizer"}[name]
    return getattr(import_module(f"lsgd.client.{where}"), name)
