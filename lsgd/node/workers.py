"""The workers of a node, as its local server knows them: who is here, who has to join again, who is gone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lsgd.errors import ProtocolError
from lsgd.protocol.messages import (
    LOOP_ENDED,
    Evicted,
    GivenUp,
    Join,
    Leave,
    Left,
    Message,
    Over,
    Refused,
    Request,
    Stop,
    Waiting,
    decode,
    encode,
    kind_of,
)
from lsgd.protocol.processes import Processes
from lsgd.protocol.sockets import Listener

UNJOINED_S = 60.0
"""How long no worker's process joins until that is said, again and again."""


@dataclass(frozen=True)
class Lines:
    """Where a local server prints a line, a complaint, and a detail."""

    say: Callable[[str], None]
    complain: Callable[[str], None]
    detail: Callable[[str], None]


class Workers:
    """The workers of one node, in one stage of its run.

    A worker's socket has the name of its process's incarnation. One that is ``here`` forwards its messages; it is
    dismissed if its node goes to another part of the run, and then only hears that it has to join again. Those of an
    earlier stage are answered alone.

    Args:
        listener: socket where they connect.
        expected: how many there are.
        former: those of the stage before, whose processes may still say that they leave that one.

    Attributes:
        here: names of those in the run, by socket.
        processes: watch over the ends of their processes; it may watch others too.
        joined: names of those that have asked to join.
        ended: names of those that heard of the run's end, or left it in order.
        rounds_at: when each last completed a round, or said that it had dropped one.
        given_up: whether no server can tell them anything any more.
    """

    def __init__(self, listener: Listener, lines: Lines, expected: int, now: float, former: "Workers | None") -> None:
        self.listener, self._lines, self._expected = listener, lines, expected
        self._former: set[bytes] = former._former | former.here.keys() if former else set()
        self.processes: Processes = former.processes if former else Processes()
        self.ended: set[str] = set(former.ended) if former else set()
        self.here: dict[bytes, str] = {}
        self.joined: set[str] = set()
        self.rounds_at: dict[str, float] = {}
        self.given_up = False
        self._dismissed: dict[bytes, Sequence[bytes]] = {}  # what each is told
        self._dead: dict[bytes, bytes] = {}  # the Leave of those whose processes have ended
        self._began_at = self._reminded_at = now  # when it was last said that nobody has joined

    def tell(self, message: Message) -> None:
        """Send a message to all that are here."""
        for peer in self.here:
            self.listener.send(peer, [encode(message)])

    def give_up(self) -> None:
        """Tell them, whenever they ask, that no server will answer: to save what they have, and to leave."""
        self.given_up = True
        self.tell(GivenUp())

    def is_answered(self, peer: bytes, frame: bytes, *, asks: bool) -> bool:
        """Answer a process, if it ``asks``, that is in no part of this node's run; return whether it is one."""
        if peer in self._dismissed:
            words = self._dismissed[peer]
        elif peer in self._former:  # it leaves a stage that is over, or never will
            words = [encode(Left() if kind_of(frame) is Leave else GivenUp())]
        else:
            return False
        self.listener.send(peer, [*words] * asks)
        return True

    def takes_part(self, peer: bytes, now: float) -> None:
        """Note that one has completed a round, or dropped it."""
        if worker := self.here.get(peer):
            self.rounds_at[worker] = now

    def dismiss(self, reason: str, runs: Collection[str]) -> None:
        """Tell all that they are no longer in the run; those that are started again join as newcomers.

        ``runs``: that of this node, and where it goes. A worker may be of either, if its node has followed another for
        a while.
        """
        words = [encode(Evicted(reason, run)) for run in runs]
        for peer, worker in self.here.items():
            self._dismissed[peer] = words
            self.listener.send(peer, words)
            self._dead[peer] = encode(Leave(worker, int(peer), 0, True, reason))
            self._lines.complain(f"{worker} has to join again: {reason}")
        self.here.clear()

    def note(self, peer: bytes, frame: bytes, stage: int, *, over: bool) -> None:
        """Keep track of who is here; answer a Leave once the global server has ended, so that the run is ``over``."""
        unknown = kind_of(frame) is Request and peer not in self.here
        if kind_of(frame) not in (Join, Leave) and not unknown:
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            self._lines.complain(f"invalid message from a worker: {error}")
            return
        assert isinstance(message, Join | Leave | Request)
        if peer != str(message.incarnation).encode():  # it came late, over a connection that was replaced
            return
        if isinstance(message, Join) and message.stage < stage:  # it will not be a member
            return
        if isinstance(message, Join) and peer not in self.here:
            self._enters(peer, message.worker, "joins")
            self.ended.discard(message.worker)
        elif isinstance(message, Request):  # it joined through this server's predecessor
            self._enters(peer, message.worker, "is here already")
        elif isinstance(message, Leave):
            if not message.failed and message.reason != LOOP_ENDED:
                self.ended.add(message.worker)
            if over:
                self.here.pop(peer, None)
                self.processes.forget(peer)
                self.listener.send(peer, [encode(Left())])

    def _enters(self, peer: bytes, worker: str, how: str) -> None:
        self.here[peer] = worker
        self.joined.add(worker)
        self._lines.detail(f"{worker} {how}")

    def deliver(self, peer: bytes, frame: bytes) -> None:
        """Send one what the global server has to say to it, and note whether it is here no more."""
        self.listener.send(peer, [frame])
        if kind_of(frame) in (Stop, Over):
            self.ended.add(self.here.get(peer, ""))
        if kind_of(frame) in (Left, Over, Refused) and (worker := self.here.pop(peer, "")):
            self.processes.forget(peer)
            self._lines.detail(f"{worker} leaves")

    def refuse(self, peer: bytes, worker: str, reason: str) -> None:
        """Tell one that joins that the run is over."""
        self.ended.add(worker)
        self.listener.send(peer, [encode(Over(reason))])

    def report_dead(self, send: Callable[[Sequence[bytes]], bool]) -> None:
        """Send a Leave for those whose processes have ended, so that nobody waits for their leases to end."""
        for peer in self.processes.ended():
            if isinstance(peer, bytes) and (worker := self.here.pop(peer, "")):
                reason = "its process has ended"
                self._dead[peer] = encode(Leave(worker, int(peer), 0, True, reason))
                self._lines.detail(f"{worker} is gone: {reason}")
        if self._dead and send(list(self._dead.values())):
            self._dead.clear()

    def forget_gone(self, reason: str) -> None:
        """Stop waiting for those whose processes have ended, which no message can reach; others hear the reason."""
        for peer in list(self.here):
            if not self.listener.send(peer, [encode(Waiting(0, reason))]):
                self.processes.forget(peer)
                self._lines.detail(f"{self.here.pop(peer)} is gone")

    def remind(self, node: int, now: float) -> None:
        """Say now and then that none has joined, and what may be missing in the script."""
        if self.joined or now - self._reminded_at < UNJOINED_S:
            return
        self._reminded_at = now
        self._lines.complain(
            f"none of the {self._expected} workers of node{node} has joined for {now - self._began_at:.0f} s: does the "
            f"script call lsgd.wrap(model, optimizer), Worker.join or a callback of lsgd, in each of its processes? A "
            f"long preparation of data needs nothing"
        )
