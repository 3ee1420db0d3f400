"""The local server of a node: carries its workers' messages to the global server, in batches, and the answers back."""

import socket
import time

from lsgd import __version__
from lsgd.errors import ProtocolError
from lsgd.protocol.messages import (
    PROTOCOL,
    Join,
    Leave,
    Left,
    NodeHello,
    NodeLeave,
    NodeWelcome,
    Over,
    Pause,
    Refused,
    Request,
    RunOver,
    StatusQuery,
    VersionError,
    Waiting,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
    kind_of,
)
from lsgd.protocol.processes import Processes
from lsgd.protocol.sockets import Connector, Listener, Poller
from lsgd.server.daemon import EXIT_AT_ONCE, LAST_WORDS_S, TICK_S, Refusals, Signals, complain, say

HELLO_EVERY_S = 1.0
"""How often the local server greets the global server."""

SILENT_AFTER_S = 4.0
"""A global server that has answered no greeting for this long counts as away."""

REFUSED_FOR_S = 10.0
"""A global server that has never accepted this node, and has refused its keys for this long, never will."""

FROZEN_S = 1.0
"""If a wait takes this much longer than planned, this process was frozen."""

LEAVE_WITHIN_S = 15.0
"""How long the workers have to leave once the run or the node ends."""

LAST_LEAVE_WITHIN_S = 3.0
"""How long this server tries to tell the global server that the node has left, once its workers have."""

GATHER_S = 2.0
"""How long a server that was told to end before it could serve waits for its workers to find it."""

_ASKING = (Join, Request, Pause, Leave, StatusQuery)
"""Messages of workers that wait for an answer: if one cannot be forwarded, the local server says why."""


class LocalDaemon:
    """Forwards frames without parsing them, except those that join and leave.

    A worker's message goes up unchanged. Pairs of frames come down: the name of a worker's socket and the message, or
    an empty name and a message for this server.

    Args:
        node: index of this machine.
        incarnation: a random number that this process drew.
        listener: where the workers connect.
        link: to the global server, under the name ``node0#incarnation``.
        workers: how many this node has.
    """

    def __init__(self, node: int, incarnation: int, listener: Listener, link: Connector, workers: int = 1) -> None:
        self._node = node
        self._own_workers = workers
        self._incarnation = incarnation
        self._listener = listener
        self._global = link
        self._workers: dict[bytes, str] = {}
        self._heard_at: float | None = None
        self._run = ""
        self._refused = ""
        self._refused_at: float | None = None  # since when the global server refuses the keys
        self._ending = ""  # why this server ends; empty while it serves
        self._ends_at = 0.0  # by then all have heard, or have had the time to
        self._leave_said_at = 0.0
        self._leave_heard = False
        self._last_word = False  # the workers are gone: the next leave is the last
        self._over = False  # the global server has ended too
        self._processes = Processes()  # of the workers
        self._dead: dict[bytes, bytes] = {}  # by socket: the Leave of workers whose processes have ended

    def run(self, signals: Signals) -> int:
        """Serve until the run is over or a signal comes, and return the exit code."""
        poller = Poller(self._listener, self._global, signals.wakeup)
        refusals = Refusals()
        started_at = time.monotonic()
        greeted_at = said_at = started_at - 60
        may_end_at = started_at + GATHER_S if signals.first else started_at
        while not self._ending or time.monotonic() <= self._ends_at:
            now = time.monotonic()
            if now - greeted_at >= HELLO_EVERY_S and not self._over and not self._last_word:
                self._global.send([encode(self._hello())])
                greeted_at = now
            poller.wait(TICK_S)
            frozen_s = time.monotonic() - now - TICK_S
            if frozen_s > FROZEN_S and self._heard_at is not None:  # the global server had nobody to answer
                self._heard_at += frozen_s
            now = time.monotonic()
            self._upward(now)
            self._report_dead()
            self._downward(now)
            refusals.say(self._listener, now)
            signals.wakeup.clear()
            self._refused = self._refused or self._keys_refused(now)
            if self._refused:
                complain(f"the global server refuses this node: {self._refused}")
                return 1
            if signals.at_once:
                say("second signal: ending at once")
                return EXIT_AT_ONCE
            if signals.first and not self._ending and now >= may_end_at:
                self._end(f"the local server of node{self._node} got {signals.first}", now)
            if self._ending:
                self._forget_gone()
                self._leave(now)
            if not self._ending and self._away(now) and now - max(said_at, started_at) > SILENT_AFTER_S:
                say(self._away(now))
                said_at = now + 5
        if self._workers:
            complain(f"ended although {', '.join(sorted(self._workers.values()))} did not leave")
        say(f"ended: {self._ending}")
        return 0

    def _hello(self) -> NodeHello:
        host = socket.gethostname()
        return NodeHello(PROTOCOL, self._node, self._incarnation, host, __version__, self._own_workers)

    def _upward(self, now: float) -> None:
        """Forward the workers' messages, in one batch."""
        batch: list[bytes] = []
        senders: dict[bytes, bytes] = {}
        for peer, frames in self._listener.receive():
            for frame in frames:
                if kind_of(frame) is WorkerHello:
                    self._greet(peer, frame)
                    continue
                if self._ending and kind_of(frame) is Join:
                    self._listener.send(peer, [encode(Over(self._ending))])
                    continue
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
        """Tell a worker its node and the global server's address."""
        try:
            where = decode(frame)
        except ProtocolError as error:
            theirs = f"version {error.version} of the protocol" if isinstance(error, VersionError) else str(error)
            reason = (
                f"a worker of node{self._node} speaks {theirs}, and the local server of node{self._node} on "
                f"{socket.gethostname()} speaks {PROTOCOL} (lsgd {__version__}); install the same release of lsgd in "
                f"both environments"
            )
            complain(f"refused a worker: {reason}")
            self._listener.send(peer, [encode(Refused(reason))])
            return
        assert isinstance(where, WorkerHello)
        if peer == str(where.incarnation).encode():  # the name of every worker's socket
            self._processes.watch(peer, where.pid, where.pid_namespace)
        self._listener.send(peer, [encode(WorkerHelloReply(self._node, self._global.address))])

    def _report_dead(self) -> None:
        """Send a Leave for workers whose processes have ended, so that nobody waits for their leases to end."""
        for peer in self._processes.ended():
            if worker := self._workers.pop(peer, ""):
                reason = "its process has ended"
                self._dead[peer] = encode(Leave(worker, int(peer), 0, True, reason))
                say(f"{worker} is gone: {reason}")
        if self._dead and self._global.send(list(self._dead.values())):
            self._dead.clear()

    def _note(self, peer: bytes, frame: bytes) -> None:
        """Keep track of who is here; answer a Leave once the global server has ended."""
        unknown = kind_of(frame) is Request and peer not in self._workers
        if kind_of(frame) not in (Join, Leave) and not unknown:
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            complain(f"invalid message from a worker: {error}")
            return
        if isinstance(message, Join) and peer not in self._workers:
            self._workers[peer] = message.worker
            say(f"{message.worker} joins")
        elif isinstance(message, Request):  # it joined through this server's predecessor
            self._workers[peer] = message.worker
            say(f"{message.worker} is here already")
        elif isinstance(message, Leave) and self._over:
            self._workers.pop(peer, None)
            self._processes.forget(peer)
            self._listener.send(peer, [encode(Left())])

    def _hold(self, peer: bytes, frame: bytes, reason: str) -> None:
        """Tell a worker why it has to wait: its message could not be forwarded, and it will send it again."""
        try:
            message = decode(frame)
        except ProtocolError:
            return
        seq = message.seq if isinstance(message, Request) else 0
        self._listener.send(peer, [encode(Waiting(seq, reason, away=True))])

    def _downward(self, now: float) -> None:
        for frames in self._global.receive():
            for peer, frame in zip(frames[::2], frames[1::2], strict=False):
                if peer:
                    self._listener.send(peer, [frame])
                    if kind_of(frame) in (Left, Over, Refused) and (worker := self._workers.pop(peer, "")):
                        self._processes.forget(peer)
                        say(f"{worker} leaves")
                    continue
                try:
                    self._take(decode(frame), now)
                except ProtocolError as error:
                    complain(f"invalid message from the global server: {error}")

    def _take(self, message: object, now: float) -> None:
        match message:
            case NodeWelcome(run):
                if run != self._run:
                    say(f"connected to the global server at {self._global.address}, run {run}")
                self._run, self._heard_at = run, now
            case Refused(reason):
                self._refused = reason
            case RunOver(reason):
                self._over = True
                self._end(f"the run is over: {reason}", now)
                self._say_leave(now)
            case Left():
                self._leave_heard = True
                if self._last_word:
                    self._ends_at = min(self._ends_at, now + LAST_WORDS_S)

    def _end(self, reason: str, now: float) -> None:
        if not self._ending:
            self._ending, self._ends_at = reason, now + LEAVE_WITHIN_S

    def _leave(self, now: float) -> None:
        """Say that this node leaves, until it is heard; and again when its workers are gone."""
        if not self._workers and not self._last_word:
            # Greetings since the first leave have brought this node back.
            self._last_word, self._leave_heard, self._leave_said_at = True, False, 0.0
            answers = self._heard_at is not None and not self._over
            self._ends_at = min(self._ends_at, now + (LAST_LEAVE_WITHIN_S if answers else LAST_WORDS_S))
        if not self._leave_heard and now - self._leave_said_at >= HELLO_EVERY_S:
            self._say_leave(now)

    def _say_leave(self, now: float) -> None:
        self._leave_said_at = now
        self._global.send([encode(NodeLeave(self._node, self._incarnation, self._ending))])

    def _forget_gone(self) -> None:
        """Stop waiting for workers whose processes have ended, which no message can reach."""
        for peer in list(self._workers):
            if not self._listener.send(peer, [encode(Waiting(0, self._ending))]):
                self._processes.forget(peer)
                say(f"{self._workers.pop(peer)} is gone")

    def _away(self, now: float) -> str:
        """Return a line about a global server that does not answer, or an empty text if it does."""
        if self._heard_at is not None and now - self._heard_at < SILENT_AFTER_S:
            return ""
        return self._silence(now)

    def _keys_refused(self, now: float) -> str:
        """Return why the global server will never accept this node, and what to type; empty while it may."""
        trouble = self._global.trouble() if self._heard_at is None else ""
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
        if self._heard_at is None:
            return (
                f"no global server answers at {address}; start it there with: lsgd-server --global --listen {address}"
            )
        return (
            f"the global server at {address} has been silent for {now - self._heard_at:.0f} s; restart it there "
            f"with its --journal: lsgd-server --global --listen {address}"
        )
