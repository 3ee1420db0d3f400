"""A bounded history: when it is full, it drops every second point, and from then on keeps every second new one."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Series(Generic[T]):
    """Keeps at most ``most`` points of all that were added, evenly spaced, and the last one.

    Attributes:
        step: every ``step``-th point is kept.
    """

    def __init__(self, most: int) -> None:
        self.step = 1
        self._added = 0
        self._most = most
        self._points: list[T] = []
        self._last: T | None = None

    def add(self, point: T) -> None:
        """Add a point, later than all others."""
        self._last = point
        if self._added % self.step == 0:
            self._points.append(point)
            self._last = None
        self._added += 1
        if len(self._points) >= self._most:
            self.step *= 2
            if len(self._points) % 2 == 0:  # the last point is among those dropped
                self._last = self._points[-1]
            del self._points[1::2]

    @property
    def last(self) -> T | None:
        """The newest point."""
        return self._last if self._last is not None else self._points[-1] if self._points else None

    def __iter__(self) -> Iterator[T]:
        yield from self._points
        if self._last is not None:
            yield self._last

    def __len__(self) -> int:
        return len(self._points) + (self._last is not None)
