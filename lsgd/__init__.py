"""lsgd: local SGD over ordinary networks.

Workers train with local SGD; two levels of small servers count their iterations and say when to talk.
:func:`lsgd.wrap` makes a training script a worker of a run, and :class:`lsgd.client.Worker` a loop that is written for
it. Start ``lsgd launch``, or ``lsgd-server --global`` and ``lsgd-server --local``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsgd.client.wrap import wrap

__version__ = "0.1.0"

__all__ = ["wrap"]


def __getattr__(name: str) -> Any:
    """Import :func:`wrap`, and torch with it, only when it is asked for: servers need neither."""
    if name == "wrap":
        from lsgd.client.wrap import wrap

        return wrap
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
