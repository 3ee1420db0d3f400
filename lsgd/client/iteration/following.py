"""How newcomers get the shared state while all others train.

A newcomer takes part in every round from its first one on, without a change of its own, and makes no iterations. The
shared state changes in rounds only, each number by what all members have received for it. So a chunk that arrives
between two rounds, and has then taken part in each, is the same on all members, whatever else the newcomer lacks.

After each round the source sends as many chunks as it expects to arrive before the next one. When all have arrived, a
hand-over (:mod:`lsgd.client.iteration.handover`) compares digests, moves what changes in every step, and the newcomer
begins to train.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from lsgd.client.groups.mesh import TELL_EVERY_S
from lsgd.client.groups.stream import StreamProgress
from lsgd.client.iteration.chunks import CHUNK_NBYTES
from lsgd.client.iteration.handover import Handover, Inventory
from lsgd.collectives.background import Background

logger = logging.getLogger("lsgd")

GROWTH = 4
"""So many times more chunks travel after a round than after the one before, at most."""

_TIMES = struct.Struct("<dd")  # seconds since the last round's end, and those that chunks took to arrive


class Following:
    """The chunks that newcomers still lack, and their way to them; all members take part in :meth:`meet`.

    Args:
        handover: that has left chunks behind.
        own: what this member has; its shared state changes in rounds.
        left: numbers of the chunks that each newcomer lacks, by rank.
        pause_s: longest that a round may wait for chunks.
    """

    def __init__(self, handover: Handover, own: Inventory, left: Mapping[int, Sequence[int]], pause_s: float) -> None:
        self._post, self._source, self._own, self._pause_s = handover.post, handover.source, own, pause_s
        self._me = handover.post.group.rank
        self._left = {rank: list(numbers) for rank, numbers in left.items()}
        self._nbytes_per_s = handover.nbytes_per_s
        self._background = Background()
        self._coming_nbytes, self._came_in_s = 0, 0.0  # between two rounds, to all newcomers
        self._arrived: dict[int, Tensor] = {}
        self._count = self._chunks_in(pause_s / 2)  # for each newcomer, until the next round
        self._moved_nbytes, self._all_nbytes = 0, sum(own.nbytes(numbers) for numbers in left.values())
        self._began_at = time.monotonic()
        self._proceeded_at = self._told_at = self._began_at
        logger.info("%s", self._words())

    def progress(self) -> str:
        """Return how far the slowest newcomer is; safe from any thread."""
        return str(self._progress())

    def proceed(self) -> None:
        """After a round, begin to send what is to arrive before the next one."""
        self._proceeded_at = time.monotonic()
        turns = {rank: numbers[: self._count] for rank, numbers in self._left.items()}
        self._coming_nbytes = sum(self._own.nbytes(numbers) for numbers in turns.values())
        self._left = {rank: numbers[self._count :] for rank, numbers in self._left.items()}
        if self._me == self._source or self._me in turns:
            self._background.start(lambda: self._transfer(turns), self._post.group.device)
        else:
            self._moved_nbytes += self._coming_nbytes

    def meet(self) -> bool:
        """At the start of a round, wait for what was to arrive before it; return whether newcomers have all chunks.

        Raises:
            ExchangeError: it failed.
        """
        gap_s = time.monotonic() - self._proceeded_at
        self._background.finish()
        self._own.change(self._arrived)
        self._arrived = {}
        times = [_TIMES.unpack(each) for each in self._post.gather(_TIMES.pack(gap_s, self._came_in_s))]
        if self._coming_nbytes:
            slowest_s = max(times[rank][1] for rank in self._left)
            self._nbytes_per_s = self._coming_nbytes / max(slowest_s, 1e-6)
        count = self._chunks_in(times[self._source][0] + self._pause_s / 2)
        self._count = min(count, GROWTH * self._count)
        if time.monotonic() - self._told_at > TELL_EVERY_S:
            self._told_at = time.monotonic()
            logger.info("the model for newcomers, beside the training: %s", self._progress())
        return not any(self._left.values())

    def _chunks_in(self, seconds: float) -> int:
        """Return how many chunks arrive at each newcomer within a time, at the rate until now; at least one."""
        return max(1, int(seconds * self._nbytes_per_s / CHUNK_NBYTES / max(1, len(self._left))))

    def _transfer(self, turns: Mapping[int, Sequence[int]]) -> None:
        """Send, or receive, one chunk after the other for each newcomer."""
        began_at = time.monotonic()
        for place in range(max(map(len, turns.values()))):
            now = {rank: numbers[place] for rank, numbers in turns.items() if place < len(numbers)}
            if self._me == self._source:
                chunks = {rank: self._own.chunks[number] for rank, number in now.items()}
                self._post.exchange({rank: [(c.data, c.dtype.itemsize)] for rank, c in chunks.items()}, {})
            elif self._me in now:
                received = self._post.exchange({}, {self._source: [self._own.chunks[now[self._me]]]})
                self._arrived[now[self._me]] = received[self._source][0]
            self._moved_nbytes += self._own.nbytes(now.values())
        self._came_in_s = time.monotonic() - began_at

    def _words(self) -> str:
        """Return who takes how much, and how long that takes at least."""
        names, left_s = self._post.names, self._all_nbytes / self._nbytes_per_s if self._nbytes_per_s else 0.0
        return (
            f"{', '.join(names[rank] for rank in self._left)} takes {self._all_nbytes / 1e6:.1f} MB of the model from "
            f"{names[self._source]} while the others train, in about {left_s:.0f} s or more"
        )

    def _progress(self) -> StreamProgress:
        peer, moved_nbytes = self._source if self._me != self._source else next(iter(self._left)), self._moved_nbytes
        seconds = time.monotonic() - self._began_at
        return StreamProgress(self._post.names[peer], seconds, moved_nbytes, self._all_nbytes - moved_nbytes)
