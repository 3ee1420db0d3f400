"""Exchanges in stages, several in flight at a time."""

from collections.abc import Iterator

UNDER_WAY = 3
"""Exchanges in flight at a time, one in each stage."""

_DONE = object()


class Pipeline:
    """Exchanges whose stages overlap: the link carries one while another waits for the latency of its messages.

    An exchange is an iterator that yields whenever it can only wait for a transfer, equally often on all members.
    Starting an exchange advances all earlier ones by one stage. So members that start the same exchanges in the same
    order issue their collectives in the same order, whatever their speed. If one raises, all in flight are lost.
    """

    def __init__(self) -> None:
        self._in_flight: list[Iterator[None]] = []

    def start(self, stages: Iterator[None]) -> None:
        """Start an exchange, and advance all earlier ones."""
        self._in_flight.append(stages)
        self._advance()

    def complete(self) -> None:
        """Complete all exchanges in flight."""
        while self._in_flight:
            self._advance()

    def _advance(self) -> None:
        """Advance all by one stage, the newest first; drop all of them if one fails."""
        in_flight, self._in_flight = self._in_flight, []
        left = [stages for stages in reversed(in_flight) if next(stages, _DONE) is not _DONE]
        self._in_flight = left[::-1]
