"""A node's local server: carries its workers' messages to the global server, in batches, and the answers back."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lsgd import __version__
from lsgd.errors import ProtocolError
from lsgd.node.allegiance import Allegiance, Event, State
from lsgd.node.candidates import Candidates, Link
from lsgd.node.farewell import Farewell, Parting
from lsgd.node.following import Following, Identity
from lsgd.node.uplink import Uplink
from lsgd.node.workers import Lines, Workers
from lsgd.protocol.messages import (
    PROTOCOL,
    Completed,
    Copy,
    Endpoint,
    Failed,
    GivenUp,
    Join,
    Leave,
    Left,
    Moved,
    NodeLeave,
    NodeWelcome,
    Over,
    Pause,
    Refused,
    Request,
    RunOver,
    Status,
    StatusQuery,
    StopRun,
    VersionError,
    Waiting,
    WorkerHello,
    decode,
    encode,
    kind_of,
)
from lsgd.protocol.sockets import Connector, Listener, wait_for
from lsgd.run_folder import stage_name, stage_of
from lsgd.server import daemon
from lsgd.server.daemon import EXIT_AT_ONCE, TICK_S, Ending, Refusals

FROZEN_S = 1.0
"""If a wait takes this much longer than planned, this process was frozen."""

GATHER_S = 2.0
"""How long a server that got a signal before it could serve waits for its workers to find it."""

_ASKING = (Join, Request, Pause, Leave, StatusQuery)
_ROUND_ENDS = (Completed, Failed)
"""Messages of workers that wait for an answer: if one cannot be forwarded, the local server says why."""


@dataclass
class _RunStage:
    """The stage of the run that a local server carries, and whether another one follows.

    Args:
        number: which one, from 1; 0: that which the global server has.
        continues: whether the node begins the next one when it is due.

    Attributes:
        over: whether the run is over; outcome: the reason, empty before that.
        nodes: how many nodes may begin a next stage; 0: there is none, or this one is not over.
        wanted: whether a worker has come for the next stage.
    """

    number: int
    continues: bool
    over: bool = False
    outcome: str = ""
    nodes: int = 0
    wanted: bool = False

    def ends(self, reason: str, nodes: int) -> None:
        self.over, self.outcome, self.nodes = True, reason, nodes


@dataclass
class _StopOrder:
    """Why the run is to stop, and who has heard that: one that the node follows later has to hear it, too."""

    reason: str = ""
    heard_by: Link | None = None

    def for_(self, link: Link) -> list[bytes]:
        """Return what a server has to hear, if it has not yet."""
        return [encode(StopRun(self.reason))] if self.reason and self.heard_by is not link else []


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
        candidates: the other places of the run.
        when_moved: as in :class:`lsgd.node.following.Following`.
        clock: returns seconds that never go back.
        stages: whether its owner begins the next stage of the run when :attr:`next_is_due`.
        former: the local server of the stage before, whose workers may still say that they leave that one.

    Attributes:
        failure: reason why this node cannot take part in the run; empty while it can.
        workers: those of this node.
        following: which global server this node follows.
        of_run: the stage of the run that it carries.
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
        candidates: Candidates,
        when_moved: Callable[[Sequence[Endpoint]], None] = lambda places: None,
        clock: Callable[[], float] = time.monotonic,
        stages: bool = False,
        former: "LocalServer | None" = None,
    ) -> None:
        self._who = Identity(node, incarnation, workers, place)
        self._lines = Lines(say, complain, note or say)
        self._clock = clock
        self._now = clock()
        self.of_run = _RunStage(former.stage + 1 if former else 0, stages)
        self.workers: Workers = Workers(listener, self._lines, workers, self._now, former.workers if former else None)
        begins = Allegiance(State.SERVING if serves else State.FOLLOWING, self._now)
        uplink = Uplink(link, node, self._now)
        self.following = Following(self._who, uplink, candidates, begins, self.workers, self._lines, when_moved, clock)
        self.failure = ""
        self._farewell = Farewell()
        self._stop = _StopOrder()
        self._refusals = Refusals()
        self._unsent: dict[bytes, bytes] = {}  # by worker: the request that could not be forwarded

    @property
    def sources(self) -> tuple[Any, ...]:
        """What to poll, for :data:`TICK_S` at most; then call :meth:`turn`. It changes when the run moves."""
        following = self.following
        return self.workers.listener, following.uplink.link, self.workers.processes, *following.candidates.links

    @property
    def allegiance(self) -> Allegiance:
        """Whom this node follows, and whether its own servers serve the run."""
        return self.following.allegiance

    def run(self, ending: Ending) -> int:
        """Serve until the run is over or ``ending`` begins, and return the exit code."""
        may_end_at = self._now + (GATHER_S if ending.first else 0.0)
        while not self.finished:
            self.turn()
            if self.failure:
                self._lines.complain(self.failure)
                return 1
            if ending.at_once:
                self._lines.say("second signal: ending at once")
                return EXIT_AT_ONCE
            if ending.first and self._now >= may_end_at:
                self.end(f"the local server of node{self._who.node} got {ending.first}")
            wait_for(TICK_S, *self.sources, ending.wakeup)
            ending.wakeup.clear()
        self.close()
        return 0

    @property
    def stage(self) -> int:
        """Which stage of the run it carries, from 1; 0: it does not know yet."""
        run = self.following.candidates.run
        return self.of_run.number or (stage_of(run) if run else 0)

    @property
    def next_run(self) -> str:
        """The identity of the run's next stage."""
        return stage_name(self.following.candidates.run, self.stage + 1)

    @property
    def next_is_due(self) -> bool:
        """Whether a worker waits for the next stage, and this node has nothing left to do in this one."""
        return self.of_run.wanted and self.of_run.nodes > 0 and self.finished

    @property
    def finished(self) -> bool:
        """Whether it has ended, and all have heard that or have had the time to."""
        return self._farewell.is_late(self._now)

    def end(self, reason: str) -> None:
        """Make the node leave the run: its workers first."""
        if not self._farewell:
            self._farewell.begin(reason, self._now)
            self.following.upon(Event.END)

    def stop_run(self, reason: str) -> None:
        """Make the run stop: say so until the global server has heard it, and one that this node follows later, too."""
        self._stop.reason = reason
        self.following.uplink.greet_now()

    def close(self) -> None:
        """Print how it ended."""
        if here := self.workers.here:
            self._lines.complain(f"ended although {', '.join(sorted(here.values()))} did not leave")
        if self._farewell:
            self._lines.say(f"ended: {self._farewell.reason}")

    def turn(self) -> None:
        """Carry what has arrived, and say what is due."""
        now, following, uplink = self._clock(), self.following, self.following.uplink
        frozen_s, self._now = now - self._now - TICK_S, now
        if frozen_s > FROZEN_S:
            uplink.thaw(frozen_s)
        self._upward(now)
        self.workers.report_dead(lambda words: not self.allegiance.stranger and uplink.send(words))
        self._downward(now)
        if not self._farewell:
            following.look(now, self.stage)
        for refusal in self._refusals.report(self.workers.listener, now):
            self._lines.complain(refusal)
        if not self.of_run.over and self._farewell.stage is not Parting.LAST_WORD:
            uplink.greet(now, self._greeting)
        if not self.failure and (refused := uplink.refusal(now)):
            self._refuse(refused)
        if self._farewell:
            self.workers.forget_gone(self._farewell.reason)
            self._leave(now)
        elif not self.failure and not following.complain(now):
            self.workers.remind(self._who.node, now)

    def _greeting(self) -> list[bytes]:
        stops = [] if self.allegiance.stranger else self._stop.for_(self.following.uplink.link)
        return [encode(self.following.greeting(self.stage)), *stops]

    def _upward(self, now: float) -> None:
        """Forward the workers' messages in one batch, after the requests for which nobody was there before."""
        # Who is gone makes no round wait.
        unsent = {peer: frame for peer, frame in self._unsent.items() if peer in self.workers.here}
        self._unsent = {}
        batch: list[bytes] = []
        senders: dict[bytes, bytes] = {}
        workers, listener = self.workers, self.workers.listener
        hopeless = workers.given_up or (self.of_run.over and self.finished)
        for peer, frames in listener.receive():
            for frame in frames:
                asks = kind_of(frame) in _ASKING
                if kind_of(frame) is WorkerHello:
                    self._greet(peer, frame)
                    continue
                if workers.is_answered(peer, frame, asks=asks):
                    continue
                if self._farewell and kind_of(frame) is Join:
                    if self.of_run.wanted and self.of_run.nodes:
                        listener.send(peer, [self._until_next()])
                    else:
                        self._dismiss(peer, frame)
                    continue
                if kind_of(frame) in _ROUND_ENDS:
                    workers.takes_part(peer, now)
                if hopeless and asks:
                    listener.send(peer, [encode(GivenUp())])
                workers.note(peer, frame, self.stage, over=self.of_run.over)
                batch.append(frame)
                if asks:
                    senders[peer] = frame
                    unsent.pop(peer, None)
        away = self.following.away(now)
        batch = [*unsent.values(), *batch]
        if batch and not away and self.following.uplink.send(batch):
            return
        self._unsent = unsent | {peer: frame for peer, frame in senders.items() if kind_of(frame) is Request}
        for peer, frame in senders.items():
            self._hold(peer, frame, away or self.following.silence(now))

    def _greet(self, peer: bytes, frame: bytes) -> None:
        try:
            where = decode(frame)
        except ProtocolError as error:
            theirs = f"version {error.version} of the protocol" if isinstance(error, VersionError) else str(error)
            node = self._who.node
            reason = (
                f"a worker of node{node} speaks {theirs}, and the local server of node{node} on "
                f"{socket.gethostname()} speaks {PROTOCOL} (lsgd {__version__}); install the same release of lsgd in "
                f"both environments"
            )
            self._lines.complain(f"refused a worker: {reason}")
            self.workers.listener.send(peer, [encode(Refused(reason))])
            return
        assert isinstance(where, WorkerHello)
        if peer == str(where.incarnation).encode():  # the name of every worker's socket
            self.workers.processes.watch(peer, where.pid, where.pid_namespace)
        answer = encode(self.following.here)
        if self.of_run.continues and 0 < self.stage < where.stage:
            ends = bool(self._farewell) and not self.of_run.nodes
            self.of_run.wanted = not ends
            answer = encode(Over(self._why_over)) if ends else self._until_next()
        self.workers.listener.send(peer, [answer])

    def _until_next(self) -> bytes:
        """Return what a worker is told that has come for the next stage."""
        waits = f"stage {self.stage + 1} of the run begins when stage {self.stage} is over for all workers of this node"
        return encode(Waiting(0, waits, away=True))

    @property
    def _why_over(self) -> str:
        return self.of_run.outcome or self._farewell.reason

    def _dismiss(self, peer: bytes, frame: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            join = decode(frame)
            assert isinstance(join, Join)
            self.workers.refuse(peer, join.worker, self._why_over)

    def _hold(self, peer: bytes, frame: bytes, reason: str) -> None:
        """Tell a worker why its message could not be forwarded; it will send it again."""
        try:
            message = decode(frame)
        except ProtocolError:
            return
        seq = message.seq if isinstance(message, Request) else 0
        self.workers.listener.send(peer, [encode(Waiting(seq, reason, away=True))])

    def _downward(self, now: float) -> None:
        for frames in self.following.uplink.link.receive():
            for peer, frame in zip(frames[::2], frames[1::2], strict=False):
                if peer and self.allegiance.stranger:
                    continue
                if peer:
                    self.workers.deliver(peer, frame)
                    continue
                try:
                    self._take(decode(frame), now)
                except ProtocolError as error:
                    self._lines.complain(f"invalid message from the global server: {error}")

    def _take(self, message: object, now: float) -> None:
        following = self.following
        if isinstance(message, NodeWelcome):
            following.welcome(message, now)
            return
        if self.allegiance.stranger:
            return
        match message:
            case Copy(run) if following.candidates.run in ("", run):  # it comes before the welcome of a new run
                following.copy.store(message)
            case Moved(run) if following.candidates.run in ("", run):
                following.gives_way(message)
            case Status():
                self._stop.heard_by = following.uplink.link
            case Refused(reason):
                self._refuse(reason)
            case RunOver(reason, nodes):
                self.of_run.ends(reason, nodes)
                self.end(f"the run is over: {reason}")
                self._farewell.is_asked_for()
            case Left():
                self._farewell.is_heard(now)

    def _refuse(self, reason: str) -> None:
        self.failure = self.failure or f"the global server refuses this node: {reason}"

    def _leave(self, now: float) -> None:
        """Say that this node leaves, until it is heard; and again when its workers are gone."""
        uplink, who = self.following.uplink, self._who
        if not self.workers.here:
            self._farewell.workers_are_gone(now, answers=uplink.heard_at is not None and not self.of_run.over)
        if self._farewell.says(now):
            uplink.send([encode(NodeLeave(who.node, who.incarnation, self._farewell.reason))])
