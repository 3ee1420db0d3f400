"""How newcomers get the shared state while all others train.

A newcomer takes part in every round from its first one on, without a change of its own, and makes no iterations. The
shared state changes in rounds only, each number by what all members have received for it. So a chunk that arrives
between two rounds, and has then taken part in each, is the same on all members, whatever else the newcomer lacks.

After each round the source sends as many chunks as it expects to arrive before the next one, and ends early if they do
not. When all have arrived, a hand-over (:mod:`lsgd.client.iteration.handover`) compares digests, moves what changes in
every step, and the newcomer begins to train.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lsgd.client.groups.mesh import TELL_EVERY_S
from lsgd.client.groups.stream import StreamProgress
from lsgd.client.iteration.handover import Handover, Inventory
from lsgd.collectives.background import Background
from lsgd.digests import CHUNK_NBYTES

logger = logging.getLogger("lsgd")

GROWTH = 4
"""So many times more chunks travel after a round than after the one before, at most."""

AHEAD = 2
"""So many chunks are under way to a newcomer at most; more would hold up a round that is due."""

GO, STOP = b"\1", b"\0"

_TIMES = struct.Struct("<ddq")  # seconds since the last round's end, those that chunks took to arrive, and how many


@dataclass(eq=False)
class Turn:
    """The chunks that travel to each newcomer between two rounds.

    Attributes:
        began_at: when the round before it had ended.
        stop_at: when the source ends it; unlimited until a round is due.
        came: how many have come to each newcomer that lacks so many.
        heard: how many of them newcomers have said to have.
        seconds: that they took.
    """

    began_at: float
    stop_at: float = math.inf
    came: int = 0
    heard: int = 0
    seconds: float = 0.0


class ChunkRate:
    """How fast chunks travel to newcomers, and so how many are to come before the next round."""

    def __init__(self, nbytes_per_s: float, begin_s: float, takers: int) -> None:
        self.nbytes_per_s = nbytes_per_s
        self.expected_nbytes_per_s = nbytes_per_s  # with the rounds, beside the training
        self.count = self._chunks_in(begin_s, takers)  # for each newcomer, until the next round
        self._met_at = time.monotonic()

    def plan(self, seconds: float, takers: int) -> None:
        """Choose how many chunks are to come in so many seconds, until the next round; a round is due now."""
        now = time.monotonic()
        self.expected_nbytes_per_s = self.nbytes_per_s * seconds / (now - self._met_at)
        self.count, self._met_at = min(self._chunks_in(seconds, takers), GROWTH * self.count), now

    def _chunks_in(self, seconds: float, takers: int) -> int:
        """Return how many chunks arrive at each newcomer within a time, at the rate until now; at least one."""
        return max(1, int(seconds * self.nbytes_per_s / CHUNK_NBYTES / max(1, takers)))


class Following:
    """The chunks that newcomers still lack, and their way to them; all members take part in :meth:`meet`.

    A round that is due waits for half of ``pause_s``, and for what is under way then.

    Args:
        handover: that has left chunks behind.
        own: what this member has; its shared state changes in rounds.
        left: numbers of the chunks that each newcomer lacks, by rank.
        pause_s: longest that a round may wait for chunks.

    Attributes:
        beside: whether chunks may travel now, beside the training: not in a round.
    """

    def __init__(self, handover: Handover, own: Inventory, left: Mapping[int, Sequence[int]], pause_s: float) -> None:
        self._post, self._source, self._own, self._pause_s = handover.post, handover.source, own, pause_s
        self._me = handover.post.group.rank
        self._left = {rank: list(numbers) for rank, numbers in left.items()}
        self._rate = ChunkRate(handover.nbytes_per_s, pause_s / 2, len(left))
        self._background = Background()
        self.beside = False
        self._arrived: dict[int, Tensor] = {}
        self._moved_nbytes, self._all_nbytes = 0, sum(own.nbytes(numbers) for numbers in left.values())
        self._told_at = time.monotonic()
        self._turn = Turn(self._told_at)
        logger.info("%s", self._words())

    def progress(self) -> str:
        """Return how far the slowest newcomer is; safe from any thread."""
        return str(self._progress())

    def proceed(self) -> None:
        """After a round, begin to send what is to arrive before the next one."""
        self._turn, self.beside = Turn(time.monotonic()), True
        planned = {rank: numbers[: self._rate.count] for rank, numbers in self._left.items()}
        if self._me == self._source or self._me in planned:
            self._background.start(lambda: self._transfer(planned), self._post.group.device)

    def meet(self) -> bool:
        """At the start of a round, wait for what was to arrive before it; return whether newcomers have all chunks.

        Raises:
            ExchangeError: it failed.
        """
        began_at = time.monotonic()
        self._turn.stop_at = began_at + self._pause_s / 2
        self._background.finish()
        self.beside = False
        self._own.change(self._arrived)
        self._arrived = {}
        own = _TIMES.pack(began_at - self._turn.began_at, self._turn.seconds, self._turn.came)
        said = [_TIMES.unpack(each) for each in self._post.gather(own)]
        self._turn = Turn(self._turn.began_at)  # nothing more has come, if another round is due at once
        gap_s, _, came = said[self._source]
        self._note(came, max(said[rank][1] for rank in self._left))
        self._plan(gap_s)
        return not any(self._left.values())

    def _note(self, came: int, seconds: float) -> None:
        """Note that so many chunks have come to each newcomer."""
        nbytes = sum(self._own.nbytes(numbers[:came]) for numbers in self._left.values())
        self._left = {rank: numbers[came:] for rank, numbers in self._left.items()}
        self._moved_nbytes = self._all_nbytes - sum(self._own.nbytes(numbers) for numbers in self._left.values())
        if nbytes:
            self._rate.nbytes_per_s = nbytes / max(1e-6, seconds)

    def _plan(self, gap_s: float) -> None:
        """Plan the next turn, for a round that is due as long after this one as this was; say how far it is."""
        self._rate.plan(max(gap_s, self._pause_s / 2), len(self._left))
        if (now := time.monotonic()) - self._told_at > TELL_EVERY_S:
            self._told_at = now
            logger.info("the model for newcomers, beside the training: %s", self._progress())

    def _transfer(self, planned: Mapping[int, Sequence[int]]) -> None:
        """Send, or receive, one chunk after the other for each newcomer."""
        began_at, count, turn = time.monotonic(), max(map(len, planned.values())), self._turn
        while turn.came < count and self._goes_on(planned):
            now = {rank: numbers[turn.came] for rank, numbers in planned.items() if turn.came < len(numbers)}
            if self._me == self._source:
                chunks = {rank: self._own.chunks[number] for rank, number in now.items()}
                self._post.exchange({rank: [(c.data, c.dtype.itemsize)] for rank, c in chunks.items()}, {})
            else:
                self._receive(now)
            turn.came, self._moved_nbytes = turn.came + 1, self._moved_nbytes + self._own.nbytes(now.values())
        if self._me == self._source:
            self._hear(planned, 0)
        turn.seconds = time.monotonic() - began_at

    def _goes_on(self, planned: Mapping[int, Sequence[int]]) -> bool:
        """Return whether another chunk travels before the next round; the source decides."""
        if self._me != self._source:
            return self._post.hear([self._source]) == GO
        self._hear(planned, AHEAD - 1)
        own = self._post.tensor(GO if not self._turn.came or time.monotonic() < self._turn.stop_at else STOP)
        self._post.group.take_heads([own], "the source's word")  # of replicas, the head decides: clocks differ
        word = own.cpu().numpy().tobytes()
        self._post.tell(planned, word)
        return word == GO

    def _hear(self, planned: Mapping[int, Sequence[int]], under_way: int) -> None:
        """Wait until no more than so many chunks are under way."""
        while self._turn.came - self._turn.heard > under_way:
            self._post.hear(planned)
            self._turn.heard += 1

    def _receive(self, now: Mapping[int, int]) -> None:
        """Receive this member's chunk, if it still lacks any, and say so."""
        if (number := now.get(self._me)) is not None:
            received = self._post.exchange({}, {self._source: [self._own.chunks[number]]})
            self._arrived[number] = received[self._source][0]
        self._post.tell([self._source], GO)

    def _words(self) -> str:
        """Return who takes how much, and how long that takes at least."""
        names, left_s = self._post.names, self._all_nbytes / self._rate.nbytes_per_s
        takers = [names[rank] for rank in self._left]
        return (
            f"{', '.join(takers)} take{'s' if len(takers) == 1 else ''} {self._all_nbytes / 1e6:.1f} MB of the model "
            f"from {names[self._source]} while the others train, in about {left_s:.0f} s or more"
        )

    def _progress(self) -> StreamProgress:
        peer, moved_nbytes = self._source if self._me != self._source else next(iter(self._left)), self._moved_nbytes
        seconds = max(moved_nbytes, 1) / self._rate.expected_nbytes_per_s
        return StreamProgress(self._post.names[peer], seconds, moved_nbytes, self._all_nbytes - moved_nbytes)
