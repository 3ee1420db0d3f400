"""What the global server sends to its standbys: nodes that could serve the run from their copies of its journal."""

import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from lsgd.protocol.messages import MAX_NBYTES, Copy, Endpoint, NodeHello
from lsgd.server.journal import KEEP_EVERY_S
from lsgd.server.state import RunState

STANDBYS = 2
"""How many nodes have a copy of the journal."""

MAX_STATE_NBYTES = MAX_NBYTES * 3 // 4
"""Longest state, compressed, that is sent."""

MAX_ROUNDS = 256
"""Most rounds in a copy; more follow in the next one."""

MAX_BEHIND_NBYTES = 4 << 20
"""How much may be on its way to a standby; beyond that, it gets nothing until it says what has arrived."""

LOST_AFTER_S = 5.0
"""If nothing of what is on its way has arrived for this long, it is lost, and all is sent again."""

CHOOSE_EVERY_S = 0.5
"""How often the standbys are chosen anew."""

HEARD_S = 3.0
"""A node that has been silent for longer is no standby."""

TOO_LONG = (
    f"the run has no standbys: its state has more than {MAX_STATE_NBYTES >> 10} KiB, compressed. If this machine is "
    f"gone for good, it ends"
)


@dataclass
class _Standby:
    """A node that offers to serve, and what it has been sent.

    Args:
        number: of the last copy that was sent; round: id of the last round in it.
        under_way: number and size of copies that it has not said to have.
        moved_at: when it last said to have another one, or had all.
        stalled: whether its connection accepted nothing: it has to greet first.
    """

    peer: bytes
    place: Endpoint
    incarnation: int
    heard_at: float
    number: int = 0
    round: int = 0
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    moved_at: float = 0.0
    stalled: bool = False

    def begin_anew(self, now: float) -> None:
        self.number = self.round = 0
        self.under_way.clear()
        self.moved_at = now

    def has(self, number: int, now: float) -> None:
        """Note the copy that it says to have; a negative number: it lacks rounds from before."""
        self.stalled = False
        lacks_rounds, number = number < 0, abs(number)
        if not self.under_way or number >= self.under_way[0][0]:
            self.moved_at = now
        while self.under_way and self.under_way[0][0] <= number:
            self.under_way.popleft()
        lost = now - self.moved_at > LOST_AFTER_S
        if lacks_rounds or lost or (number == 0 and not self.under_way):
            self.begin_anew(now)

    @property
    def is_behind(self) -> bool:
        return sum(nbytes for _, nbytes in self.under_way) > MAX_BEHIND_NBYTES


class Standbys:
    """Chooses the standbys, and says what to send them before the answers of a turn.

    Args:
        place: of the server itself.
        allowed: returns names and public keys that may connect; None: no keys are needed.

    Attributes:
        trouble: reason why there are no standbys; empty if there may be.
    """

    def __init__(self, place: Endpoint, allowed: Callable[[], Mapping[str, bytes]] | None = None) -> None:
        self.place = place
        self.trouble = ""
        self._allowed = allowed
        self._listed: dict[str, bytes] = {}
        self._offers: dict[int, _Standby] = {}
        self._chosen: list[_Standby] = []
        self._chosen_at = -math.inf
        self._version = (-1, -1)  # changes and count of the state that was last captured
        self._made_at = 0.0
        self._number = 0
        self._state = b""

    def greet(self, peer: bytes, hello: NodeHello, now: float) -> None:
        """Note what a node offers, and which copy it has."""
        known = self._offers.get(hello.node)
        listed = self._allowed() if self._allowed else {}
        key = listed.get(f"node{hello.node}", b"")
        if not hello.place or (self._allowed and not key) or hello.node == self.place.node:
            self._offers.pop(hello.node, None)
            return
        if listed != self._listed:
            self._listed = dict(listed)
            for offer in self._offers.values():
                offer.begin_anew(now)
        if known is None or known.incarnation != hello.incarnation:
            place = Endpoint(hello.node, hello.place, key)
            known = self._offers[hello.node] = _Standby(peer, place, hello.incarnation, -math.inf, moved_at=now)
        if now - known.heard_at > HEARD_S:  # it may be a standby from now on
            self._chosen_at = -math.inf
        known.peer, known.heard_at = peer, now
        known.has(hello.copied, now)

    def places(self, state: RunState, now: float) -> tuple[Endpoint, ...]:
        """Return the places of this server and of its standbys."""
        return (self.place, *(standby.place for standby in self._choose(state, now)))

    def copies(
        self, state: RunState, now: float, captured: Callable[[], dict[str, Any]]
    ) -> Iterator[tuple[bytes, Copy]]:
        """Yield what to send now, each with the peer that gets it; ``captured`` returns the state for JSON."""
        chosen = self._choose(state, now)
        if chosen and self._is_due(state, now):
            self._capture(state, now, captured)
        if self.trouble:
            return
        newest = state.book.elections[-1].round if state.book.elections else 0
        for standby in chosen:
            if standby.stalled or standby.is_behind or (standby.number, standby.round) == (self._number, newest):
                continue
            copy = self._copy(state, standby)
            standby.number = self._number
            standby.under_way.append((copy.number, len(copy.state) + len(copy.rounds)))
            yield standby.peer, copy

    def whole(self, state: RunState, now: float, captured: Callable[[], dict[str, Any]]) -> Copy:
        """Return a copy for who has none, at the end."""
        self._capture(state, now, captured)
        return self._copy(state, _Standby(b"", self.place, 0, now))

    def failed(self, peer: bytes) -> None:
        """Note that a peer's connection did not accept what was sent: it gets all, once it has greeted again."""
        for standby in self._offers.values():
            if standby.peer == peer:
                standby.begin_anew(standby.heard_at)
                standby.stalled = True

    def _choose(self, state: RunState, now: float) -> list[_Standby]:
        """Return the standbys, the first one first: nodes that all others can dial come before others."""
        if now - self._chosen_at < CHOOSE_EVERY_S:
            return self._chosen
        here = [offer for offer in self._offers.values() if now - offer.heard_at <= HEARD_S]
        missed = set(state.links.ways.missed({self.place.node, *(offer.place.node for offer in here)})[1::2])
        here.sort(key=lambda offer: (offer.place.node in missed, offer.place.node))
        self._chosen, self._chosen_at = here[:STANDBYS], now
        return self._chosen

    def _is_due(self, state: RunState, now: float) -> bool:
        version = (state.changes, state.ledger.count)
        return version[0] != self._version[0] or (version != self._version and now - self._made_at > KEEP_EVERY_S)

    def _capture(self, state: RunState, now: float, captured: Callable[[], dict[str, Any]]) -> None:
        """Make a new copy of the state; it is trouble if that is too long."""
        text = json.dumps(captured()).encode()
        self._version, self._made_at = (state.changes, state.ledger.count), now
        self._state = zlib.compress(text, 1)
        self._number += 1
        self.trouble = TOO_LONG if len(self._state) > MAX_STATE_NBYTES else ""

    def _copy(self, state: RunState, standby: _Standby) -> Copy:
        """Return the next copy for a standby, with the first rounds that it lacks."""
        lacks = list(takewhile(lambda election: election.round > standby.round, reversed(state.book.elections)))
        rounds = lacks[::-1][:MAX_ROUNDS]
        after = standby.round
        standby.round = rounds[-1].round if rounds else after
        packed = zlib.compress("\n".join(json.dumps(asdict(one)) for one in rounds).encode(), 1) if rounds else b""
        more = {} if after else {"certificate": state.tenure.access.certificate, "allowed": self._listed}
        return Copy(state.run, self._number, self._state, after, packed, **more)  # type: ignore[arg-type]
