"""The client library: :class:`Worker` joins a training loop to a run.

:func:`device` says where its model belongs, and :func:`muon` makes an optimizer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsgd.client.control.identity import device
    from lsgd.client.optimizer import muon
    from lsgd.client.worker import Worker

__all__ = ["Worker", "device", "muon"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and torch with it, only then: the launcher needs neither."""
    if name == "Worker":
        from lsgd.client.worker import Worker

        return Worker
    if name == "device":
        from lsgd.client.control.identity import device

        return device
    if name == "muon":
        from lsgd.client.optimizer import muon

        return muon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
