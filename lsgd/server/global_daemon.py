"""The global server: a poll loop around the coordinator."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

from lsgd import __version__
from lsgd.errors import ConfigError, ProtocolError
from lsgd.plan.forecast import forecast
from lsgd.protocol.messages import (
    PROTOCOL,
    ChangeSettings,
    Copy,
    Downward,
    EventsQuery,
    Get,
    Go,
    Join,
    Leave,
    Left,
    Meet,
    Message,
    Moved,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Published,
    Put,
    Refused,
    RunOver,
    Status,
    StatusQuery,
    Stop,
    StopRun,
    Upward,
    VersionError,
    decode,
    encode,
)
from lsgd.protocol.sockets import Listener, wait_for
from lsgd.run_folder import stage_of
from lsgd.server import daemon, endings
from lsgd.server.coordinator import Coordinator
from lsgd.server.copies import HeldCopy
from lsgd.server.daemon import EXIT_AT_ONCE, GUARD_EVERY_S, LAST_WORDS_S, MOVED, TICK_S, Ending, complain, say, tell
from lsgd.server.feed import Feed
from lsgd.server.inputs import Inputs, Kind
from lsgd.server.journal import Journal, capture, restore, taken_over
from lsgd.server.reasons import ROUTINE, Why
from lsgd.server.report import Record, report
from lsgd.server.rounds import abridged
from lsgd.server.standbys import Standbys
from lsgd.server.state import Decision, RunState

GIVE_WAY_S = 3.0
"""How long a server that has given up tells its nodes where the run continues."""

DISMISS_WITHIN_S = 2.0
"""How long a local server may be silent until it counts as gone, when the run is over."""

DISMISS_ALL_WITHIN_S = 15.0
"""How long they are told that the run is over, at most."""

RETURN_WITHIN_S = 3.0
"""How long they have to find this server again if it was restarted and the run is over."""

NODE_LEASE_S = 3.0
"""A local server that has been silent for this long may be replaced by another of the same node."""

SETTLES_S = 30.0
"""For how long from its start refused connections are a detail; who has a wrong key says so itself, and goes on."""


@dataclass
class _Node:
    peer: bytes
    hello: NodeHello
    heard_at: float
    closed: bool = False


@dataclass
class _GivingWay:
    """This server has given up, and tells its nodes where the run continues."""

    began_at: float


@dataclass
class _Farewell:
    """How this server tells the local servers that the run is over, and those who follow it how it ended.

    Args:
        began_at: when it began.
        awaited_at: when there last was somebody who had not heard of it.
        nodes: as in :class:`RunOver`.
    """

    began_at: float
    awaited_at: float
    nodes: int


@dataclass
class _Door:
    """Who may be welcome later.

    Args:
        is_open: whether nodes may follow this server: one that takes over first waits for its own.
        early: peers that have looked before that.
        challengers: other servers of a node, and when they first greeted.
        refused: incarnation of the last one of a node that was refused.
    """

    is_open: bool
    early: set[bytes] = field(default_factory=set)
    challengers: dict[int, tuple[int, float]] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)

    def challenged_at(self, hello: NodeHello, now: float) -> float:
        """Return since when a server greets in the name of a node that is known."""
        challenger = self.challengers.get(hello.node)
        if challenger is None or challenger[0] != hello.incarnation:
            challenger = self.challengers[hello.node] = (hello.incarnation, now)
        return challenger[1]

    def refuses(self, hello: NodeHello) -> bool:
        """Note that a server is refused, which greets until it has heard that; return whether it was not before."""
        is_new = self.refused.get(hello.node) != hello.incarnation
        self.refused[hello.node] = hello.incarnation
        return is_new


class _Guard:
    """Watches what peers do to this server: memory that fills, refused connections, wrong messages."""

    def __init__(self, *, watches_memory: bool) -> None:
        self._memory = daemon.Memory() if watches_memory else None
        self._refusals = daemon.Refusals()
        self._bad_peers: set[bytes] = set()
        self._began_at = self._looked_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether to look, and take it that this is done."""
        if now - self._looked_at < GUARD_EVERY_S:
            return False
        self._looked_at, self._began_at = now, self._began_at or now
        return True

    def look(self, listener: Listener, now: float) -> None:
        """Report who was refused; drop all connections if memory fills."""
        for refusal in self._refusals.report(listener, now):  # nodes that look for their server try several keys
            (say if now - self._began_at < SETTLES_S else complain)(refusal)
        if self._memory is None or not self._memory.overgrown():
            return
        complain(
            f"memory has grown by {daemon.MAX_GROWTH_NBYTES >> 20} MiB: a peer is sending an endless message. All "
            f"connections are dropped; those of the run reconnect by themselves"
        )
        listener.reopen()
        self._memory.begin_anew()

    def complain_of(self, peer: bytes, why: str) -> None:
        """Say that a peer's message was dropped, once for each: it may never stop."""
        if peer not in self._bad_peers and len(self._bad_peers) < 1000:
            self._bad_peers.add(peer)
            complain(f"dropped a message from {peer!r}: {why}")


class _Mail:
    """The server's socket, the ways to workers, and what has yet to leave: nothing does before the journal has it."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._routes: dict[tuple[str, int], bytes] = {}
        self._outbox: dict[bytes, list[bytes]] = defaultdict(list)

    def route(self, message: Upward, peer: bytes) -> None:
        """Note through which local server a worker is reached."""
        self._routes[message.worker, message.incarnation] = peer

    def route_to(self, worker: str, incarnation: int) -> bytes | None:
        """Return that local server."""
        return self._routes.get((worker, incarnation))

    def unroute(self, message: Upward) -> None:
        """Forget that: the worker has left."""
        self._routes.pop((message.worker, message.incarnation), None)

    def forget(self, *, unless: Callable[[str, int], object]) -> None:
        """Forget the ways to workers, unless they are still somebody's."""
        self._routes = {who: peer for who, peer in self._routes.items() if unless(*who)}

    def add(self, peer: bytes, worker: bytes, message: Message) -> None:
        """Send a message later; ``worker``: the name of a worker's socket, empty for the local server itself.

        Raises:
            OverflowError, ValueError: it cannot be encoded.
        """
        self._outbox[peer] += (worker, encode(message))

    def add_first(self, peer: bytes, message: Message) -> None:
        """Send a message to a local server in one with the answers, and before them."""
        self._outbox[peer][:0] = (b"", encode(message))

    def clear(self) -> None:
        """Drop what has not left."""
        self._outbox.clear()

    def flush(self) -> list[bytes]:
        """Send all; return the peers that are not there."""
        failed = [peer for peer, frames in self._outbox.items() if not self.listener.send(peer, frames)]
        self._outbox.clear()
        return failed


@dataclass
class Rendezvous:
    """Addresses from which the members of a generation build process groups, by key; and who waits for which."""

    generation: int = 0
    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def reset(self, generation: int) -> None:
        """Forget everything, unless the generation is the same."""
        if generation != self.generation:
            self.generation, self.values, self.waiting = generation, {}, {}

    def put(self, message: Put) -> list[tuple[str, int, Published]]:
        """Store a value and return what to send to members that wait for it, as (worker, incarnation, value)."""
        if message.generation != self.generation:
            return []
        self.values[message.key] = message.value
        value = Published(message.generation, message.key, message.value)
        return [(*who, value) for who in self.waiting.pop(message.key, [])]

    def get(self, message: Get) -> Published | None:
        """Return the value, or None: then :meth:`put` returns it later."""
        if message.generation != self.generation:
            return None
        if message.key in self.values:
            return Published(message.generation, message.key, self.values[message.key])
        who = (message.worker, message.incarnation)
        if who not in self.waiting.setdefault(message.key, []):
            self.waiting[message.key].append(who)
        return None


class GlobalDaemon:
    """Carries messages between local servers and the coordinator.

    A frame from a local server is a worker's message. Pairs of frames go back: the name of the worker's socket at the
    local server, empty for the local server itself, and the answer.

    ``standbys`` get copies of what the journal gets; None: nobody does. ``inputs``: keeps what it decides on.
    ``watches_memory``: it drops all connections if
    the process grows too much; not in a script's own process.

    Attributes:
        exit_code: of the process, once it has nothing left to do; None until then.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listener: Listener,
        journal: Journal | None = None,
        record: Record | None = None,
        *,
        standbys: Standbys | None = None,
        inputs: Inputs | None = None,
        watches_memory: bool = True,
    ) -> None:
        self.coordinator = coordinator
        self._mail = _Mail(listener)
        self._journal = journal
        self._record = record
        self._standbys = standbys
        self._inputs = inputs or Inputs(None)
        self._set: dict[str, str] = {}  # settings that operators have changed
        self._rendezvous = Rendezvous()
        self._door = _Door(not (self._state.tenure.took_over and standbys))
        self._nodes: dict[int, _Node] = {}
        self._feed = Feed(self._state.book.elections)
        self._ticked_at = 0.0
        self._state.tenure.began_from = (self._state.changes, self._state.ledger.count)
        self._guard = _Guard(watches_memory=watches_memory)
        self._ending: _Farewell | _GivingWay | None = None
        self.exit_code: int | None = None

    @property
    def _state(self) -> RunState:
        return self.coordinator.state

    def run(self, signals: Ending) -> int:
        """Serve until the run is over and return the exit code."""
        while self.exit_code is None:
            if signals.at_once and not isinstance(self._ending, _Farewell):
                say("second signal: ending at once, without a consensus model")
                self._write_down(time.monotonic(), last=True)
                return EXIT_AT_ONCE
            self.turn(time.monotonic(), signals.first)
            if self.exit_code is None:
                wait_for(TICK_S, self._mail.listener, signals.wakeup)
                signals.wakeup.clear()
        return self.exit_code

    def turn(self, now: float, got: str = "") -> None:
        """Take what has arrived, decide what is due, and send the answers once the journal has them.

        Args:
            now: time on a clock that never goes back, in seconds.
            got: name of the signal that asks for the end of the run, if any.
        """
        if isinstance(self._ending, _Farewell):
            self._dismiss(self._ending, now)
            return
        if self._state.tenure.gives_way is not None:
            self._tell_where(self._state.tenure.gives_way, now)
            return
        self._receive(now)
        if got and not self._state.stopping:
            self._handle(StopRun(f"the global server got {got}"), now)
        if now - self._ticked_at >= TICK_S:
            self._tick(now)
            self._inputs.flush()
            self._ticked_at = now
        if self._guard.is_due(now):
            self._mail.forget(unless=self._state.roster.find)
            self._feed.forget_readers(now)
            self._guard.look(self._mail.listener, now)
        self._keep(now)
        self._flush()
        self._feed.publish(self._state, now, last=self._state.over)
        self._write_down(now, last=self._state.over)
        if self._state.over:
            self._ending = _Farewell(now, now, self._next_nodes(now))
            self._dismiss(self._ending, now)

    def _tell_where(self, moved: Moved, now: float) -> None:
        """Tell all nodes where the run continues; nothing that arrives counts any more.

        This server's own node gets a copy: it serves again if the other part is gone by then.
        """
        peers = {node.peer for node in self._nodes.values()}
        for peer, _ in self._mail.listener.receive():
            peers.add(peer)
        self._mail.clear()
        own = self._nodes.get(self._state.tenure.term.node)
        if not isinstance(self._ending, _GivingWay):
            self._ending = _GivingWay(now)
            if self._standbys and own is not None:
                self._send(own.peer, b"", self._standbys.whole(self._state, now, partial(capture, self._state, now)))
        for peer in peers:
            self._send(peer, b"", moved)
        self._flush()
        if now - self._ending.began_at > GIVE_WAY_S:
            if self._journal:
                self._journal.finish()  # leaves nothing to continue from
            self.exit_code = MOVED

    def _dismiss(self, farewell: _Farewell, now: float) -> None:
        """Tell the local servers that the run is over, and those who follow it how it ended, until they all know."""
        reason = self._state.stopping
        self._receive(now)
        heard_at = max([farewell.began_at, *(node.heard_at for node in self._nodes.values())])  # who knows leaves
        lasts_s = now - farewell.began_at
        silent = now - heard_at >= DISMISS_WITHIN_S or lasts_s >= DISMISS_ALL_WITHIN_S
        if not silent and (self._nodes or self._feed.is_read(now)):
            farewell.awaited_at = now
        for node in self._nodes.values():
            self._send(node.peer, b"", RunOver(reason, farewell.nodes))
        self._flush()
        least_s = RETURN_WITHIN_S if self._journal and self._journal.resumed else LAST_WORDS_S
        if lasts_s < least_s or now - farewell.awaited_at < LAST_WORDS_S:
            return
        if self._journal:
            self._journal.finish()
        end = ", without a consensus" if self._state.in_vain else ""
        say(f"the run is over{end}: {reason}; {self._state.ledger.count} iterations")
        self.exit_code = 1 if self._state.failed else 0

    def _next_nodes(self, now: float) -> int:
        """Return how many nodes may begin a next stage."""
        state = self._state
        if state.failed or state.in_vain or state.stopping.code == Why.ORDERED.code:
            return 0
        return sum(now - node.heard_at < NODE_LEASE_S for node in self._nodes.values())

    def _receive(self, now: float) -> None:
        for peer, frames in self._mail.listener.receive():
            for frame in frames:
                self._take(peer, frame, now)
        for peer in self._mail.listener.closed():
            for index, node in self._nodes.items():
                if node.peer == peer:
                    node.closed = True
                    self._inputs.add(self._state, Kind.CLOSED, now, index)
                    self._act(self.coordinator.closed(index, now))

    def _take(self, peer: bytes, frame: bytes, now: float) -> None:
        try:
            message = decode(frame)
            self._dispatch(peer, message, now, frame)
        except VersionError as error:
            node = peer.decode(errors="replace").partition("#")[0]
            reason = (
                f"{node} speaks version {error.version} of the protocol, and the global server on "
                f"{socket.gethostname()} speaks {PROTOCOL} (lsgd {__version__}); install the same release of lsgd on "
                f"both"
            )
            self._say(f"refused {reason}")
            self._send(peer, b"", Refused(reason))
        except ProtocolError as error:
            self._guard.complain_of(peer, str(error))

    def _dispatch(self, peer: bytes, message: Message, now: float, frame: bytes = b"") -> None:
        if (
            self._mail.listener.secured
            and (claimed := node_of(message))
            and claimed != peer.partition(b"#")[0].decode()
        ):
            self._guard.complain_of(peer, f"it speaks for {claimed}")
            return
        match message:
            case NodeHello():
                self._hello(peer, message, now)
            case StatusQuery(incarnation):
                worker = _worker_socket(incarnation) if incarnation else b""
                self._send(peer, worker, self._status(now))
            case StopRun():
                self._handle(message, now, frame)
                self._send(peer, b"", self._status(now))
            case EventsQuery(_, after):
                self._send(peer, b"", self._feed.answer(peer, after, now))
            case ChangeSettings(changes):
                self._change(peer, changes, now)
            case NodeLeave(node, incarnation):
                known = self._nodes.get(node)
                if known is None or known.hello.incarnation == incarnation:  # none: this server was restarted
                    self._handle(message, now, frame)
                    self._nodes.pop(node, None)
                    self._send(peer, b"", Left())
            case Meet():
                self._inputs.add(self._state, Kind.MEET, now, frame or encode(message))
                self._act(self.coordinator.meet(message, now))
                self._send(peer, b"", self._welcome(now))
            case Copy():
                self._adopt(message, now)
            case Put() | Get():
                self._rendezvous_for(message, peer)
            case _ if isinstance(message, Upward):
                self._mail.route(message, peer)
                if isinstance(message, Join) and self._nodes.get(message.node) is None:
                    return  # its local server will say hello first; the worker asks again
                self._handle(message, now, frame)
                if isinstance(message, Leave):
                    self._send_worker(message.worker, message.incarnation, Left())
                    self._mail.unroute(message)

    def _adopt(self, copy: Copy, now: float) -> None:
        """Continue from a node's copy if it is newer than the one that this server has taken over from."""
        before = self._state
        if not before.tenure.took_over:
            return
        held = HeldCopy()
        held.store(copy)
        saved, rounds = held.load()
        try:
            state = restore(taken_over(saved, before.tenure.terms), now)
            term = saved["terms"][-1]
        except (ConfigError, LookupError, TypeError) as error:
            raise ProtocolError(f"a copy of the journal that cannot be used: {error}") from None
        version = (state.changes, state.ledger.count)
        known = [[term.number, term.node] for term in before.tenure.terms]
        if state.run != before.run or term not in known or version <= before.tenure.began_from:
            return
        last = before.book.elections[-1].round if before.book.elections else 0
        state.book.elections.extend([*before.book.elections, *(one for one in rounds if one.round > last)])
        state.tenure.access, state.gathering.announced = before.tenure.access, before.gathering.announced
        state.roster.changes.count = max(state.changes, before.changes) + 1
        if before.stopping:  # who ordered that has heard that it is done
            endings.stop(state, before.stopping)
        state.tenure.began_from = version
        self.coordinator = Coordinator(state)
        if self._set:
            self.coordinator.change(self._set)
        self._inputs.begins_anew()
        self._say(f"continues from a newer copy: {state.ledger.count} iterations")

    def _change(self, peer: bytes, changes: Mapping[str, str], now: float) -> None:
        """Change settings, and answer the operator who asked for it."""
        if self._state.stopping:
            self._send(peer, b"", Refused(f"the run is ending, so its settings stay: {self._state.stopping}"))
            return
        self._inputs.add(self._state, Kind.CHANGE, self._state.now, dict(changes))
        try:
            self.coordinator.change(changes)
        except ConfigError as error:
            self._send(peer, b"", Refused(str(error)))
            return
        self._set |= changes
        self._tick(now)
        self._send(peer, b"", self._status(now))

    def _status(self, now: float) -> Status:
        self._feed.publish(self._state, now)
        stream = self._feed.stream
        return Status(report(self._state, now, {"epoch": stream.epoch, "last": stream.last}))

    def _say(self, words: str) -> None:
        """Print a line that does not come from the coordinator."""
        tell(words)
        self._feed.note(words)

    def _note(self, words: str) -> None:
        """Print a detail that does not come from the coordinator."""
        say(words)
        self._feed.note(words)

    def _hello(self, peer: bytes, hello: NodeHello, now: float) -> None:
        if hello.stage and hello.stage != (own := stage_of(self._state.run)):
            if hello.stage < own:  # it has not heard how that one ended
                self._send(peer, b"", RunOver(f"stage {hello.stage} of the run is over", len(self._nodes) or 1))
            elif hello.node in self._nodes and not hello.looks:  # it has gone on, so it has left this one
                self._nodes.pop(hello.node)
                self._handle(NodeLeave(hello.node, hello.incarnation, "the next stage"), now)
            return
        if not self._door.is_open and hello.node != self._state.tenure.term.node:
            self._door.early.add(peer)
            return
        if hello.looks:
            self._send(peer, b"", self._welcome(now))
            return
        self._door.is_open = True
        for early in self._door.early:
            self._send(early, b"", self._welcome(now))
        self._door.early.clear()
        known = self._nodes.get(hello.node)
        same = known is not None and known.hello.incarnation == hello.incarnation
        if known is None or same or known.closed or now - known.heard_at > NODE_LEASE_S:
            if not same:
                self._note(f"node{hello.node} ({hello.host}) connects, lsgd {hello.version}")
            self._nodes[hello.node] = _Node(peer, hello, now)
            self._handle(hello, now)
            if self._standbys is not None:
                self._standbys.greet(peer, hello, now)
            self._send(peer, b"", self._welcome(now))
            return
        if known.heard_at <= self._door.challenged_at(hello, now):
            return  # the known one may have died: this one greets until that is certain
        reason = (
            f"node {hello.node} is in the run already, on {known.hello.host}; give {hello.host} another index (--node, "
            f"or the argument of train.sh)"
        )
        if self._door.refuses(hello):
            self._say(f"refused a second node {hello.node}: {reason}")
        self._send(peer, b"", Refused(reason))

    def _welcome(self, now: float) -> NodeWelcome:
        state = self._state
        places = self._standbys.places(state, now) if self._standbys else ()
        tenure, nodes = state.tenure, tuple(sorted(self._nodes))
        relay = tenure.access.relay, tenure.access.secret
        return NodeWelcome(state.run, tenure.terms, state.learned(), places, tenure.beaten, *relay, nodes)

    def _rendezvous_for(self, message: Put | Get, peer: bytes) -> None:
        self._mail.route(message, peer)
        generation = self._state.roster.generation
        if generation is None or not self._state.roster.find(message.worker, message.incarnation):
            return
        self._rendezvous.reset(generation.number)
        if isinstance(message, Put):
            for worker, incarnation, awaited in self._rendezvous.put(message):
                self._send_worker(worker, incarnation, awaited)
        elif value := self._rendezvous.get(message):
            self._send_worker(message.worker, message.incarnation, value)

    def _handle(self, message: Upward | NodeHello | NodeLeave | StopRun, now: float, frame: bytes = b"") -> None:
        """Let the coordinator decide on a message; ``frame``: as it came, if it did."""
        self._inputs.add(self._state, Kind.HANDLE, now, frame or encode(message))
        self._act(self.coordinator.handle(message, now))

    def _tick(self, now: float) -> None:
        self._inputs.add(self._state, Kind.TICK, now)
        self._act(self.coordinator.tick(now))

    def _act(self, decision: Decision) -> None:
        generation = self._state.roster.generation
        self._feed.add(decision.happened)
        for note in decision.notes:
            begins = note.code == Why.GENERATION.code and not self._state.ledger.count  # not where it has resumed
            is_routine = not ROUTINE.isdisjoint((note.code, note.code.partition(".")[0])) and not begins
            is_routine |= note.code == "leaves.left" and bool(self._state.stopping)
            (say if is_routine else tell)(note)
            if begins and generation is not None and generation.number == 1:
                lines = forecast(self._state.plan, len(generation.indices))
                show = self._say if any("type " in line for line in lines) else self._note
                for line in lines:
                    show(line)
        for worker, incarnation, message in decision.answers:
            self._send_worker(worker, incarnation, message)

    def _keep(self, now: float) -> None:
        """Write decisions to the journal, and send them to the standbys, before any of them is sent to others."""
        captured = cache(partial(capture, self._state, now))
        if self._journal and (trouble := self._journal.keep(self._state, now, captured)):
            complain(trouble)
        if self._standbys is None:
            return
        self._state.tenure.guarded = len(self._standbys.places(self._state, now)) > 1
        before = self._standbys.trouble
        for peer, copy in self._standbys.copies(self._state, now, captured):
            self._mail.add_first(peer, copy)
        if self._standbys.trouble != before:
            complain(self._standbys.trouble or "the run has standbys again")

    def _write_down(self, now: float, *, last: bool = False) -> None:
        if self._record and (trouble := self._record.keep(self._state, now, last=last)):
            complain(trouble)

    def _send_worker(self, worker: str, incarnation: int, message: Downward) -> None:
        if isinstance(message, Go | Stop) and (member := self._state.roster.find(worker, incarnation)):
            message = abridged(message, member)
        if peer := self._mail.route_to(worker, incarnation):
            self._send(peer, _worker_socket(incarnation), message)

    def _send(self, peer: bytes, worker: bytes, message: Message) -> None:
        try:
            self._mail.add(peer, worker, message)
        except (OverflowError, ValueError) as error:  # a number of more than 64 bits, a text that is no Unicode
            self._guard.complain_of(peer, f"a {type(message).__name__} for it cannot be encoded: {error}")

    def _flush(self) -> None:
        for peer in self._mail.flush():
            if self._standbys is not None:
                self._standbys.failed(peer)


def node_of(message: Message) -> str:
    """Return the name of the node that a message speaks for, itself or its worker; empty for an operator's."""
    match message:
        case NodeHello() | NodeLeave():
            return f"node{message.node}"
        case _ if isinstance(message, Upward):
            return message.worker.partition("/")[0]
    return ""


def _worker_socket(incarnation: int) -> bytes:
    """Return the name of a worker's socket at its local server."""
    return str(incarnation).encode()
