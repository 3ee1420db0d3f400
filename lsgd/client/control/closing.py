"""What is undone if what it was done for fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block fails, in whatever way; one that comes to its end keeps what it has made."""
    try:
        yield
    except BaseException:
        undo()
        raise
