"""A node's local server: carries its workers' messages to the global server, in batches, and the answers back."""

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lsgd import __version__
from lsgd.errors import ProtocolError
from lsgd.node.allegiance import Allegiance, Event, State
from lsgd.node.elsewhere import LOOK_AFTER_S, Elsewhere, Link, met
from lsgd.node.farewell import Farewell, Parting
from lsgd.protocol.messages import (
    LOOP_ENDED,
    PROTOCOL,
    Completed,
    Copy,
    Evicted,
    Failed,
    GivenUp,
    Join,
    Leave,
    Left,
    Moved,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Over,
    Pause,
    Place,
    Refused,
    Request,
    RunOver,
    Status,
    StatusQuery,
    Stop,
    StopRun,
    Term,
    VersionError,
    Waiting,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
    kind_of,
)
from lsgd.protocol.processes import Processes
from lsgd.protocol.sockets import Connector, Listener, wait_for
from lsgd.run_folder import stage_name, stage_of
from lsgd.server import daemon, succession
from lsgd.server.daemon import EXIT_AT_ONCE, TICK_S, Ending, Refusals
from lsgd.server.held import HeldCopy
from lsgd.server.succession import Move

HELLO_EVERY_S = 1.0

STARTS_WITHIN_S = 30.0
"""A global server of this node's own that has not answered for this long takes long to start."""

SILENT_AFTER_S = 4.0
"""A global server that has answered no greeting for this long counts as away."""

REFUSED_FOR_S = 10.0
"""A global server that has never accepted this node, and has refused its keys for this long, never will."""

FROZEN_S = 1.0
"""If a wait takes this much longer than planned, this process was frozen."""

UNJOINED_S = 60.0
"""How long no worker's process joins until that is said, again and again."""

GATHER_S = 2.0
"""How long a server that got a signal before it could serve waits for its workers to find it."""

SERVE_AGAIN_S = 5.0
"""After how long a node that could not take over tries again, if no other one has."""

_ASKING = (Join, Request, Pause, Leave, StatusQuery)
_ROUND_ENDS = (Completed, Failed)
"""Messages of workers that wait for an answer: if one cannot be forwarded, the local server says why."""


class LocalServer:
    """Forwards frames without parsing them, except those that join and leave.

    Its owner polls :attr:`sources` and calls :meth:`turn`; :meth:`run` does this for a server without anything else.

    A worker's message goes up unchanged. Pairs of frames come down: the name of a worker's socket and the message, or
    an empty name and a message for this server.

    Args:
        incarnation: random number that this process drew.
        listener: socket where the workers connect.
        link: connection to the global server, under the name ``node0#incarnation``.
        workers: number of workers on this node.
        place: address where this node could start a global server; empty: nowhere.
        serves: whether it begins with the global server of a new run, or of one that goes on.
        elsewhere: the other places of the run.
        when_moved: called with the place of the server that this node follows, and then those where it may be later.
        clock: returns seconds that never go back.
        stages: whether its owner begins the next stage of the run when :attr:`next_is_due`.
        former: the local server of the stage before, whose workers may still say that they leave that one.

    Attributes:
        processes: watch over the ends of the workers' processes; it may watch others too.
        over: whether the run is over.
        outcome: reason why the run is over; empty before that.
        failure: reason why this node cannot take part in the run; empty while it can.
        joined: names of the workers that have asked to join.
        heard_at: when the global server last answered a greeting; None: it never has.
        rounds_at: when each worker last completed a round, or said that it had dropped one.
        ended: names of those that heard of the run's end, or left it in order.
        copy: of the global server's journal, if this node is a standby.
        allegiance: whom this node follows, and whether its own servers serve the run.
        relay: address of the relay, and the proof for it, as last heard.
        nodes: how many nodes may begin a next stage; 0: there is none, or this one is not over.
        wanted: whether a worker has come for the next stage.
    """

    def __init__(
        self,
        node: int,
        incarnation: int,
        listener: Listener,
        link: Connector,
        workers: int = 1,
        *,
        say: Callable[[str], None] = daemon.say,
        complain: Callable[[str], None] = daemon.complain,
        note: Callable[[str], None] | None = None,
        place: str = "",
        serves: bool = False,
        elsewhere: Elsewhere,
        when_moved: Callable[[Sequence[Place]], None] = lambda places: None,
        clock: Callable[[], float] = time.monotonic,
        stages: bool = False,
        former: "LocalServer | None" = None,
    ) -> None:
        self._former: set[bytes] = former._former | former._workers.keys() if former else set()  # their sockets
        self.processes: Processes = former.processes if former else Processes()
        self.ended: set[str] = set(former.ended) if former else set()
        self._stages, self._stage = stages, former.stage + 1 if former else 0  # 0: that which the global server has
        self._node = node
        self._own_workers = workers
        self._incarnation = incarnation
        self._listener = listener
        self._global: Link = link
        self._place = place
        self.copy = HeldCopy()
        self.elsewhere = elsewhere
        self._when_moved, self._told = when_moved, list[Place]()
        self.relay = ("", b"")
        self._dismissed: dict[bytes, list[bytes]] = {}  # by socket: what workers are told that have to join again
        self._say = say
        self._complain = complain
        self._detail = note or say
        self.over = False
        self.outcome = self.failure = ""
        self.nodes, self.wanted = 0, False
        self.joined: set[str] = set()
        self._workers: dict[bytes, str] = {}
        self.heard_at: float | None = None
        self.rounds_at: dict[str, float] = {}
        self._refused_at: float | None = None  # since when the global server refuses the keys
        self._farewell = Farewell()
        self._stop = ""  # why the run is to stop
        self._stop_heard: Link | None = None  # by whom; one that the node follows later has to hear it, too
        self._given_up = False  # no server can tell the workers anything any more
        self._dead: dict[bytes, bytes] = {}  # by socket: the Leave of workers whose processes have ended
        self._refusals = Refusals()
        self._clock = clock
        self._now = self._started_at = clock()
        self.allegiance = Allegiance(State.SERVING if serves else State.FOLLOWING, self._now)
        self._greeted_at = self._said_at = -math.inf
        self._unjoined_at = self._started_at  # when it was last said that nobody has joined

    @property
    def sources(self) -> tuple[Any, ...]:
        """What to poll, for :data:`TICK_S` at most; then call :meth:`turn`. It changes when the run moves."""
        return self._listener, self._global, self.processes, *self.elsewhere.links

    def next_terms(self) -> tuple[Term, ...]:
        """Return the terms of the run with the one in which this node serves next."""
        return succession.successor(self.elsewhere.terms, self._node)

    def upon(self, event: Event, stranger: str = "") -> None:
        """Let something happen to whom this node follows; its owner knows what happens to its servers."""
        self.allegiance = self.allegiance.upon(event, self._clock(), stranger)

    @property
    def places(self) -> list[Place]:
        """Where the run is served, and then where it may be later."""
        served, *others = self.elsewhere.places
        return [replace(served, address=self._global.address), *others]

    def run(self, ending: Ending) -> int:
        """Serve until the run is over or ``ending`` begins, and return the exit code."""
        may_end_at = self._started_at + (GATHER_S if ending.first else 0.0)
        while not self.finished:
            self.turn()
            if self.failure:
                self._complain(self.failure)
                return 1
            if ending.at_once:
                self._say("second signal: ending at once")
                return EXIT_AT_ONCE
            if ending.first and self._now >= may_end_at:
                self.end(f"the local server of node{self._node} got {ending.first}")
            wait_for(TICK_S, *self.sources, ending.wakeup)
            ending.wakeup.clear()
        self.close()
        return 0

    @property
    def stage(self) -> int:
        """Which stage of the run it carries, from 1; 0: it does not know yet."""
        return self._stage or (stage_of(self.elsewhere.run) if self.elsewhere.run else 0)

    @property
    def next_run(self) -> str:
        """The identity of the run's next stage."""
        return stage_name(self.elsewhere.run, self.stage + 1)

    @property
    def next_is_due(self) -> bool:
        """Whether a worker waits for the next stage, and this node has nothing left to do in this one."""
        return self.wanted and self.nodes > 0 and self.finished

    @property
    def finished(self) -> bool:
        """Whether it has ended, and all have heard that or have had the time to."""
        return self._farewell.is_late(self._now)

    def end(self, reason: str) -> None:
        """Make the node leave the run: its workers first."""
        if not self._farewell:
            self._farewell.begin(reason, self._now)
            self.upon(Event.END)

    def stop_run(self, reason: str) -> None:
        """Make the run stop: say so until the global server has heard it, and one that this node follows later, too."""
        self._stop, self._greeted_at = reason, -math.inf

    def give_up(self) -> None:
        """Tell the workers, whenever they ask, that no server will answer: to save what they have, and to leave."""
        self._given_up = True
        for peer in self._workers:
            self._listener.send(peer, [encode(GivenUp())])

    def close(self) -> None:
        """Print how it ended."""
        if self._workers:
            self._complain(f"ended although {', '.join(sorted(self._workers.values()))} did not leave")
        if self._farewell:
            self._say(f"ended: {self._farewell.reason}")

    def turn(self) -> None:
        """Carry what has arrived, and say what is due."""
        now = self._clock()
        frozen_s, self._now = now - self._now - TICK_S, now
        if frozen_s > FROZEN_S and self.heard_at is not None:  # the global server had nobody to answer
            self.heard_at += frozen_s
        self._upward(now)
        self._report_dead()
        self._downward(now)
        if not self._farewell:
            self._look_elsewhere(now)
        for refusal in self._refusals.report(self._listener, now):
            self._complain(refusal)
        if now - self._greeted_at >= HELLO_EVERY_S and not self.over and self._farewell.stage is not Parting.LAST_WORD:
            is_ours = not self.allegiance.stranger
            looks = not is_ours or self.allegiance.state is State.CLAIMING
            due = self._stop and is_ours and self._stop_heard is not self._global
            stops = [encode(StopRun(self._stop))] if due else []
            self._global.send([encode(replace(self._hello(), looks=looks)), *stops])
            self._greeted_at = now
        if not self.failure and (refused := self._keys_refused(now)):
            self._refuse(refused)
        if self._farewell:
            self._forget_gone()
            self._leave(now)
        elif self._away(now) and now - max(self._said_at, self._started_at) > self._patience_s:
            self._complain(self._away(now))
            self._said_at = now + 5
        elif not self.joined and now - self._unjoined_at >= UNJOINED_S:
            self._unjoined_at = now
            self._complain(
                f"none of the {self._own_workers} workers of node{self._node} has joined for "
                f"{now - self._started_at:.0f} s: does the script call lsgd.wrap(model, optimizer), Worker.join or a "
                f"callback of lsgd, in each of its processes? A long preparation of data needs nothing"
            )

    def _look_elsewhere(self, now: float) -> None:
        """Follow a server of a later term, bring two parts of the run together, and notice that this node has to serve.

        While this node's own server answers, it alone decides what follows from another one.
        """
        silent_s, elsewhere = self._silent_s(now), self.elsewhere
        self.allegiance = self.allegiance.at(now, silent_s, LOOK_AFTER_S)
        state, could_serve = self.allegiance.state, bool(self._place and self.copy.number)
        looks_s = max(silent_s, LOOK_AFTER_S) if state.searches else silent_s
        for place, link, welcome in list(elsewhere.hear(now, looks_s, replace(self._hello(), looks=True))):
            moves = succession.move(elsewhere.term, welcome.terms)
            if elsewhere.run and welcome.run != elsewhere.run:
                moves = Move.ANEW if welcome.run == elsewhere.other else Move.STAY
            if place.node == self._node and not self._is_to_serve(now):
                continue
            if state is not State.SERVING or silent_s >= SILENT_AFTER_S:
                # Where nobody has the model, this node does not go: it may have it, and can serve.
                if moves is Move.CONTINUE or (moves is Move.ANEW and (welcome.count > 0 or not could_serve)):
                    self._follow(place, link, welcome, anew=moves is Move.ANEW)
                    return
            elif moves is Move.STAY:
                link.send([encode(elsewhere.mine())])
            else:
                self._global.send([encode(met(welcome, place))])
        if could_serve:
            self._claim(now, silent_s)

    def _silent_s(self, now: float) -> float:
        return now - (self._started_at if self.heard_at is None else self.heard_at)

    def _claim(self, now: float, silent_s: float) -> None:
        """Take over if it is this node's turn; no more if the old server's host has answered since."""
        before, elsewhere, address = self.allegiance, self.elsewhere, self._global.address
        if before.state is State.CLAIMING:
            if not before.stranger and elsewhere.answers(now, before.since) and not elsewhere.is_next(silent_s, True):
                self.upon(Event.VAIN)
                self._complain(f"the host of {address} answers: node{self._node} does not take over yet")
            return
        waits = before.state is State.UNABLE and now - before.since < SERVE_AGAIN_S
        if waits or not before.may(Event.DUE):
            return
        if not elsewhere.is_next(silent_s, False if before.stranger else elsewhere.answers(now)):
            return
        self.upon(Event.DUE)
        if before.state is not State.UNABLE:
            why = "serves another run" if before.stranger else f"has been silent for {silent_s:.0f} s"
            self._complain(f"the global server at {address} {why}: node{self._node} takes over, at {self._place}")

    def _is_to_serve(self, now: float) -> bool:
        """Whether this node, whose server has come up, follows it, because the old one is still silent.

        The silence counts from the first missed greeting, and the last knock began when this node took over: so a link
        that was down for less time than a standby waits moves nobody.
        """
        claims, silent_s = self.allegiance, self._silent_s(now)
        if claims.state is not State.CLAIMING:
            return False
        answers = False if claims.stranger else self.elsewhere.answers(now, claims.since)
        return self.elsewhere.is_next(silent_s - HELLO_EVERY_S, answers)

    def _follow(self, place: Place, link: Link, welcome: NodeWelcome, *, anew: bool) -> None:
        """Follow another server; ``anew``: the workers' work is not part of its run, so they join as newcomers."""
        before, self._global = self._global, link
        before.close()
        self.elsewhere.take(place)
        self.upon(Event.UP if place.node == self._node else Event.FOLLOW)
        serves = f"node{self._node} serves the run from now on: it " * (place.node == self._node)
        term = welcome.terms[-1].number
        self._complain(f"{serves}follows the global server at {link.address}, in term {term} of the run")
        if self.copy.number and not anew:
            link.send([encode(self.copy.offer())])
        if anew:
            reason = f"the run continues at node{place.node}, without what was learned here since the cut"
            self._dismiss_workers(reason, welcome.run)
        self._welcomed(welcome)
        self._greeted_at = -math.inf

    def _welcomed(self, welcome: NodeWelcome) -> None:
        self.elsewhere.welcomed(welcome, self._global.address)
        standbys = [place.node for place in welcome.places[1:]]
        if standbys and self._node not in standbys:  # a copy that gets old is worse than none
            self.copy = HeldCopy()
        if welcome.places and self.elsewhere.places != self._told:
            self._told = self.elsewhere.places
            self._when_moved(self.places)
        self.heard_at = self._now
        if welcome.relay and (welcome.relay, welcome.relay_secret) != self.relay:
            self.relay = welcome.relay, welcome.relay_secret
            for peer in self._workers:
                self._listener.send(peer, [encode(self._here())])

    def _dismiss_workers(self, reason: str, run: str) -> None:
        """Tell all workers that they are no longer in the run; those that are started again join as newcomers.

        ``run``: where this node goes. A worker may be of that one, if its node has followed another for a while.
        """
        words = [encode(Evicted(reason, each)) for each in {self.elsewhere.run, run}]
        for peer, worker in self._workers.items():
            self._dismissed[peer] = words
            self._listener.send(peer, words)
            self._dead[peer] = encode(Leave(worker, int(peer), 0, True, reason))
            self._complain(f"{worker} has to join again: {reason}")
        self._workers.clear()

    def _here(self) -> WorkerHelloReply:
        return WorkerHelloReply(self._node, self._global.address, *self.relay)

    def _hello(self) -> NodeHello:
        host = socket.gethostname()
        who = PROTOCOL, self._node, self._incarnation, host, __version__, self._own_workers
        return NodeHello(*who, self._place, self.copy.copied, stage=self.stage)

    def _upward(self, now: float) -> None:
        """Forward the workers' messages in one batch."""
        batch: list[bytes] = []
        senders: dict[bytes, bytes] = {}
        hopeless = self._given_up or (self.over and self._farewell.is_late(now))
        for peer, frames in self._listener.receive():
            for frame in frames:
                if kind_of(frame) is WorkerHello:
                    self._greet(peer, frame)
                    continue
                if peer in self._dismissed:  # what it says is of no part of the run that this node is in
                    self._listener.send(peer, self._dismissed[peer] * (kind_of(frame) in _ASKING))
                    continue
                if peer in self._former:  # it leaves a stage that is over, or never will
                    answer = Left() if kind_of(frame) is Leave else GivenUp()
                    self._listener.send(peer, [encode(answer)] * (kind_of(frame) in _ASKING))
                    continue
                if self._farewell and kind_of(frame) is Join:
                    if self.wanted and self.nodes:
                        self._listener.send(peer, [self._until_next()])
                    else:
                        self._dismiss(peer, frame)
                    continue
                if kind_of(frame) in _ROUND_ENDS and (worker := self._workers.get(peer)):
                    self.rounds_at[worker] = now
                if hopeless and kind_of(frame) in _ASKING:
                    self._listener.send(peer, [encode(GivenUp())])
                self._note(peer, frame)
                batch.append(frame)
                if kind_of(frame) in _ASKING:
                    senders[peer] = frame
        away = self._away(now)
        if batch and not away and self._global.send(batch):
            return
        for peer, frame in senders.items():
            self._hold(peer, frame, away or self._silence(now))

    def _greet(self, peer: bytes, frame: bytes) -> None:
        try:
            where = decode(frame)
        except ProtocolError as error:
            theirs = f"version {error.version} of the protocol" if isinstance(error, VersionError) else str(error)
            reason = (
                f"a worker of node{self._node} speaks {theirs}, and the local server of node{self._node} on "
                f"{socket.gethostname()} speaks {PROTOCOL} (lsgd {__version__}); install the same release of lsgd in "
                f"both environments"
            )
            self._complain(f"refused a worker: {reason}")
            self._listener.send(peer, [encode(Refused(reason))])
            return
        assert isinstance(where, WorkerHello)
        if peer == str(where.incarnation).encode():  # the name of every worker's socket
            self.processes.watch(peer, where.pid, where.pid_namespace)
        answer = encode(self._here())
        if self._stages and 0 < self.stage < where.stage:
            ends = bool(self._farewell) and not self.nodes
            self.wanted = not ends
            answer = encode(Over(self.outcome or self._farewell.reason)) if ends else self._until_next()
        self._listener.send(peer, [answer])

    def _until_next(self) -> bytes:
        """Return what a worker is told that has come for the next stage."""
        waits = f"stage {self.stage + 1} of the run begins when stage {self.stage} is over for all workers of this node"
        return encode(Waiting(0, waits, away=True))

    def _dismiss(self, peer: bytes, frame: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            join = decode(frame)
            assert isinstance(join, Join)
            self.ended.add(join.worker)
            self._listener.send(peer, [encode(Over(self.outcome or self._farewell.reason))])

    def _report_dead(self) -> None:
        """Send a Leave for workers whose processes have ended, so that nobody waits for their leases to end."""
        for peer in self.processes.ended():
            if isinstance(peer, bytes) and (worker := self._workers.pop(peer, "")):
                reason = "its process has ended"
                self._dead[peer] = encode(Leave(worker, int(peer), 0, True, reason))
                self._detail(f"{worker} is gone: {reason}")
        if self._dead and not self.allegiance.stranger and self._global.send(list(self._dead.values())):
            self._dead.clear()

    def _note(self, peer: bytes, frame: bytes) -> None:
        """Keep track of who is here; answer a Leave once the global server has ended."""
        unknown = kind_of(frame) is Request and peer not in self._workers
        if kind_of(frame) not in (Join, Leave) and not unknown:
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            self._complain(f"invalid message from a worker: {error}")
            return
        assert isinstance(message, Join | Leave | Request)
        if peer != str(message.incarnation).encode():  # it came late, over a connection that was replaced
            return
        if isinstance(message, Join) and message.stage < self.stage:  # it will not be a member
            return
        if isinstance(message, Join) and peer not in self._workers:
            self._workers[peer] = message.worker
            self.joined.add(message.worker)
            self.ended.discard(message.worker)
            self._detail(f"{message.worker} joins")
        elif isinstance(message, Request):  # it joined through this server's predecessor
            self._workers[peer] = message.worker
            self.joined.add(message.worker)
            self._detail(f"{message.worker} is here already")
        elif isinstance(message, Leave):
            if not message.failed and message.reason != LOOP_ENDED:
                self.ended.add(message.worker)
            if self.over:
                self._workers.pop(peer, None)
                self.processes.forget(peer)
                self._listener.send(peer, [encode(Left())])

    def _hold(self, peer: bytes, frame: bytes, reason: str) -> None:
        """Tell a worker why its message could not be forwarded; it will send it again."""
        try:
            message = decode(frame)
        except ProtocolError:
            return
        seq = message.seq if isinstance(message, Request) else 0
        self._listener.send(peer, [encode(Waiting(seq, reason, away=True))])

    def _downward(self, now: float) -> None:
        for frames in self._global.receive():
            for peer, frame in zip(frames[::2], frames[1::2], strict=False):
                if peer and self.allegiance.stranger:
                    continue
                if peer:
                    self._listener.send(peer, [frame])
                    if kind_of(frame) in (Stop, Over):
                        self.ended.add(self._workers.get(peer, ""))
                    if kind_of(frame) in (Left, Over, Refused) and (worker := self._workers.pop(peer, "")):
                        self.processes.forget(peer)
                        self._detail(f"{worker} leaves")
                    continue
                try:
                    self._take(decode(frame), now)
                except ProtocolError as error:
                    self._complain(f"invalid message from the global server: {error}")

    def _take(self, message: object, now: float) -> None:
        if isinstance(message, NodeWelcome) and self._is_strange(message):
            return
        if self.allegiance.stranger and not isinstance(message, NodeWelcome):
            return
        match message:
            case NodeWelcome(run):
                if run != self.elsewhere.run:
                    self._say(f"connected to the global server at {self._global.address}, run {run}")
                self._heard(message)
            case Copy(run) if self.elsewhere.run in ("", run):  # it comes before the welcome of a new run
                self.copy.take(message)
            case Moved(run, place, reason, other) if self.elsewhere.run in ("", run):
                if self.allegiance.may(Event.GIVES_WAY):
                    self._complain(reason)
                self.elsewhere.add(place, other)
                self.upon(Event.GIVES_WAY)
            case Status():
                self._stop_heard = self._global
            case Refused(reason):
                self._refuse(reason)
            case RunOver(reason, nodes):
                self.over, self.outcome, self.nodes = True, reason, nodes
                self.end(f"the run is over: {reason}")
                self._farewell.is_asked_for()
            case Left():
                self._farewell.is_heard(now)

    def _is_strange(self, welcome: NodeWelcome) -> bool:
        """Whether a server has begun another run in its server's place, and this node can continue its own."""
        own, may = self.elsewhere.run, self.allegiance.may(Event.STRANGER)
        if own in ("", welcome.run) or not self.copy.number or not may:
            return False
        if not self.allegiance.stranger:
            self._complain(
                f"the global server at {self._global.address} has begun another run ({welcome.run}): this node stays "
                f"in its own ({own})"
            )
        self.upon(Event.STRANGER, welcome.run)
        return True

    def _heard(self, welcome: NodeWelcome) -> None:
        """Note that the global server lives, unless it is one of an earlier term that was replaced."""
        same = welcome.run == self.elsewhere.run
        if same and welcome.terms and welcome.terms[-1] < self.elsewhere.term:
            return
        claims = self.allegiance.state is State.CLAIMING
        own = claims and bool(welcome.terms) and welcome.terms[-1].node == self._node  # it has served here before
        if own and not self._is_to_serve(self._now):
            return
        anew = same and succession.move(self.elsewhere.term, welcome.terms) is Move.ANEW
        self.upon(Event.UP if own else Event.WELCOME)
        if claims and not own:
            self._complain(f"the global server at {self._global.address} answers again: it serves the run as before")
        self._welcomed(welcome)
        if anew:
            reason = f"the global server at {self._global.address} continues another part of the run"
            self._dismiss_workers(reason, welcome.run)

    def _refuse(self, reason: str) -> None:
        self.failure = self.failure or f"the global server refuses this node: {reason}"

    def _leave(self, now: float) -> None:
        """Say that this node leaves, until it is heard; and again when its workers are gone."""
        if not self._workers:
            self._farewell.workers_are_gone(now, answers=self.heard_at is not None and not self.over)
        if self._farewell.says(now):
            self._global.send([encode(NodeLeave(self._node, self._incarnation, self._farewell.reason))])

    def _forget_gone(self) -> None:
        """Stop waiting for workers whose processes have ended, which no message can reach."""
        for peer in list(self._workers):
            if not self._listener.send(peer, [encode(Waiting(0, self._farewell.reason))]):
                self.processes.forget(peer)
                self._detail(f"{self._workers.pop(peer)} is gone")

    def disconnect(self) -> None:
        """End the connections to global servers: to the one that this node follows, and to others."""
        self.elsewhere.close()
        self._global.close()

    def _away(self, now: float) -> str:
        """Return a line about a global server that does not answer, or an empty text if it does."""
        if self.allegiance.stranger:
            return self._silence(now)
        if self.heard_at is not None and now - self.heard_at < SILENT_AFTER_S:
            return ""
        return self._silence(now)

    @property
    def _patience_s(self) -> float:
        """How long to wait before a line says so: a server of this node's own first has to start."""
        is_starting = self.heard_at is None and self.allegiance.state.serves
        return STARTS_WITHIN_S if is_starting else SILENT_AFTER_S

    def _keys_refused(self, now: float) -> str:
        """Return why the global server will never accept this node, and what to type; empty while it may."""
        trouble = self._global.trouble() if self.heard_at is None else ""
        self._refused_at = (self._refused_at or now) if trouble else None
        if self._refused_at is None or now - self._refused_at < REFUSED_FOR_S:
            return ""
        return (
            f"{trouble}. Start this node with the line that node 0 prints, or with its token: "
            f"lsgd-server --local --node {self._node} --connect {self._global.address} --token node{self._node}.token"
        )

    def _silence(self, now: float) -> str:
        """Return a line about how long the global server has been silent, and what to do."""
        address = self._global.address
        if trouble := self._global.trouble():
            return f"the global server at {address} refuses this node: {trouble}"
        if self.heard_at is None and self.allegiance.state.serves:
            return f"this node's global server at {address} does not answer for {now - self._started_at:.0f} s yet"
        if self.heard_at is None:
            return (
                f"no global server answers at {address}; start node 0 there, which runs it (lsgd launch, train.sh), "
                f"or, if you start servers by hand: lsgd-server --global --listen {address}"
            )
        silent = f"the global server at {address} has been silent for {now - self.heard_at:.0f} s"
        if self.allegiance.stranger:
            silent = f"the global server at {address} serves another run ({self.allegiance.stranger})"
        if self.elsewhere.standbys:
            return f"{silent}; if it stays away, node{self.elsewhere.standbys[0]} serves the run"
        return f"{silent}; restart it there with its --journal: lsgd-server --global --listen {address}"
