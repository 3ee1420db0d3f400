"""Undo something when a later step fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block raises anything."""
    try:
        yield
    except BaseException:
        undo()
        raise
