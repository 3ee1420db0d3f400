"""Exchanges in stages, several under way at a time."""

from collections.abc import Iterator

UNDER_WAY = 3
"""Exchanges under way at a time, one in each stage."""

_DONE = object()


class Pipeline:
    """Exchanges whose stages overlap: the link carries one while another waits for the latency of its messages.

    An exchange is an iterator that yields where nothing is left to do but to wait for what travels. Each one that
    begins takes those before it one stage further, so that members which begin the same ones in the same order do the
    same in the same order, whatever each of them is busy with: all of them yield equally often on all members.
    """

    def __init__(self) -> None:
        self._under_way: list[Iterator[None]] = []

    def begin(self, stages: Iterator[None]) -> None:
        """Begin an exchange, and go on with those before it.

        Raises:
            ExchangeError: one of them failed on the network; none of those under way is of use any more.
        """
        self._under_way.append(stages)
        self._go_on()

    def complete(self) -> None:
        """See all through that are under way.

        Raises:
            ExchangeError: one failed on the network.
        """
        while self._under_way:
            self._go_on()

    def _go_on(self) -> None:
        """Take all one stage further, the one that was begun last before the others."""
        under_way, self._under_way = self._under_way, []
        left = [stages for stages in reversed(under_way) if next(stages, _DONE) is not _DONE]
        self._under_way = left[::-1]
