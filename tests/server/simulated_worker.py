"""A worker in virtual time: the real connection and the real requests of a client, without a model.

Its script waits as a script does. So it is a greenlet, which takes turns with the loop of events that moves the clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from greenlet import GreenletExit, getcurrent, greenlet

from lsgd.client.control.channel import Channel, Clock
from lsgd.client.iteration.grants import GrantClient, Report
from lsgd.errors import ExchangeError, JoinError, ServerLostError
from lsgd.protocol import wants
from lsgd.protocol.messages import Completed, Failed, Go, Leave, Left, Met, Request, Round, Stop, Welcome, decode

from .helpers import greeting

if TYPE_CHECKING:
    from .simulated_run import SimulatedRun

HEARTBEAT_S = 1.0
LEAVE_WITHIN_S = 3.0
LOOKS_EVERY_S = 1.0
"""How long a script that waits for an answer sleeps when nothing comes."""

R = TypeVar("R")


class WorkerClock(Clock):
    """The clock of a simulated worker."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker

    def now(self) -> float:
        return self._worker.run.now

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self._worker.sleep(LOOKS_EVERY_S, until_word=True)


class Alone:
    """An island of one process."""

    is_head = True

    def decide(self, what: str, report: Callable[[], Report], decide: Callable[..., R], *, reports: bool) -> R:
        return decide(lambda: [report()])

    def share(self, what: str, do: Callable[[], R]) -> R:
        return do()


class SimulatedWorker:
    """One worker: its script, and what carries its messages.

    Attributes:
        state: ``joining``, ``waiting``, ``exchanging``, ``committed``, ``training``, ``paused``, ``leaving`` or
            ``gone``.
        met: answers to its calls.
        refused: why the servers do not let it train; empty: they do.
    """

    def __init__(self, run: SimulatedRun, node: int, index: int, incarnation: int, step_s: float) -> None:
        self.run = run
        self.join = greeting(node, index, incarnation)
        self.name, self.incarnation, self.step_s = self.join.worker, incarnation, step_s
        self.slow, self.pauses = run.faults.slow, run.faults.pause
        self.state, self.refused = "joining", ""
        self.seq = self.committed = self.dropped = 0
        self.learned: set[tuple[int, int]] = set()  # which iterations of which incarnations it has learned from
        self.began = 0  # its place in its own loop of run.own_steps iterations
        self.met: list[Met] = []
        self.current: Go | Stop | None = None
        self.stopped_with: Round | None = None
        self.grants: GrantClient | None = None
        self._arrived: list[list[bytes]] = []
        self._nap: object = None  # the sleep that an event ends
        self._listens = False  # a message ends it, too
        silence_s = run.plan.run.server_timeout_s
        self.channel = Channel("", incarnation, silence_s, clock=WorkerClock(self), link=self)
        self.channel.endings.when_over = lambda generation: run.after(0.0, lambda: self._is_over(generation))
        self._script = greenlet(self._live)
        self.go_on()
        self._beat()

    # -- its connection, which is a carrier, and its clock ----------------------------------------------------

    def send(self, frames: list[bytes]) -> bool:
        for message in map(decode, frames):
            if isinstance(message, Request):
                self.seq = message.seq
            self.run.upward(self, cast(Any, message))
        return True

    def receive(self) -> Iterable[Sequence[bytes]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """It ends with the worker."""

    def hears(self, frame: bytes) -> None:
        """Get a message."""
        if self.state != "gone":
            self._arrived.append([frame])
            self.channel.turn()
            if self._listens:
                self.go_on()

    def _beat(self) -> None:
        if self.state != "gone":
            self.channel.turn()
            self.run.after(HEARTBEAT_S, self._beat)

    def go_on(self) -> None:
        """Let the script go on until it waits, and send what it has said."""
        self._nap, self._listens = None, False
        self._script.switch()
        if self.state != "gone":
            self.channel.turn()

    def sleep(self, seconds: float, *, until_word: bool = False) -> None:
        """Let time pass in the script; ``until_word``: or a message come."""
        nap = self._nap = object()
        self._listens = until_word
        self.run.after(seconds, lambda: self._nap is nap and self.go_on())
        self._script.parent.switch()

    # -- its script -------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._join()
            while self._iterate():
                pass
        except (JoinError, ServerLostError) as error:
            self.refused = str(error)
            self.fails(error)
            self._leave(self.refused, failed=True)
        except GreenletExit:
            return
        self.channel.turn()  # the last words
        self.end()

    def _join(self) -> None:
        run, channel = self.run.plan.run, self.channel
        welcome = channel.ask(self.join, lambda m: isinstance(m, Welcome), what=f"{self.name} joins")
        channel.endings.run = welcome.run
        channel.signs.lease_s, channel.silence.global_s = run.lease_s, run.server_timeout_s
        channel.signs.live_as(self.name)
        who = (self.name, self.incarnation)
        membership = SimpleNamespace(plan=self.run.plan, welcome=welcome, island=Alone(), channel=channel, who=who)
        self.grants = GrantClient(cast(Any, membership), cast(Any, self), cast(Any, self))
        self.grants.steps, self.began = self.run.own_steps, welcome.step
        self.sleep(self.run.random.random())

    def loss(self, done: int, committed: int) -> float | None:
        """Report anything, as a worker's losses may be."""
        return self.run.random.choice([None, float("nan"), self.run.random.random(), float("inf")])

    def spending(self, what: str) -> AbstractContextManager[None]:
        """Count no time."""
        return nullcontext()

    @property
    def done(self) -> int:
        """Iterations that it has made."""
        return self.grants.done if self.grants else 0

    @property
    def round(self) -> Round:
        """The round that it is in, or was last."""
        assert self.current is not None and self.current.round is not None
        return self.current.round

    @property
    def _lockstep(self) -> bool:
        return bool(self.run.state.phases.schedule.lockstep)

    def _iterate(self) -> bool:
        """Get an iteration and make it; return whether there is another one."""
        if isinstance(self._follow(), Stop):
            return self._leave("stopped")
        if not self._lockstep:
            self.grants.ask_ahead((self.committed, self.dropped))
        if self.run.happens(self.run.faults.unused_pause):
            return self._pause()
        self.state = "training"
        self.sleep(self.run.slowness_s(self) + self.step_s * self.run.random.uniform(0.5, 1.5))
        self.grants.complete()
        self.run.steps += 1
        self.learned.add((self.incarnation, self.done))
        self.has_stepped()
        run, faults = self.run, self.run.faults
        if run.own_steps and self.began + self.done >= run.own_steps:
            return self._finish(waits=True)
        if run.meet_every and self.done % run.meet_every == 0:
            return self._meet()
        if run.happens(faults.leave):
            return self._leave("has enough")
        if run.happens(faults.last):
            return self._finish(waits=False)
        if run.happens(faults.crash):
            return False
        return self._pause() if run.happens(self.pauses) else True

    def has_stepped(self) -> None:
        """Learn something."""

    def _follow(self) -> Go | Stop | Met | None:
        """Ask until an answer's round is carried out, as a worker's rounds do; None: it was granted ahead."""
        while True:
            self.state = "waiting"
            rounds = (self.committed, self.dropped)
            answer = self.grants.next(rounds, lockstep=self._lockstep, look=None, again=False).answer
            if answer is None or isinstance(answer, Met):
                return answer
            if answer.round is None or (answer.round.id > self.dropped and self._carry_out(answer)):
                self.grants.take(answer)
                if isinstance(answer, Stop):
                    self.stopped_with = answer.round
                return answer

    def _carry_out(self, answer: Go | Stop) -> bool:
        """Be in a round until it is committed or dropped; return which of them."""
        self.current, self.state = answer, "exchanging"
        if self.channel.endings.generation_over(self.round.generation.number):
            self._drop()
        else:
            self.run.arrive(self)
        while self.state == "exchanging":
            self._script.parent.switch()
        return self.state == "committed"

    def _meet(self) -> bool:
        """Make a call together with the others, and take part in rounds until they have come."""
        call = self.grants.call({"value": self.run.random.random()}, aside=False)
        while True:
            self.grants.ask_for(call)
            answer = self._follow()
            if isinstance(answer, Stop):
                return self._leave("stopped")
            if isinstance(answer, Met):
                self.met.append(answer)
                return True

    def _finish(self, *, waits: bool) -> bool:
        """Give the others what it has learned in a last round; ``waits``: for the end of the run, too."""
        knows: wants.Want = wants.Round()
        while not isinstance(self._asks(knows), Stop):
            if self.round.scope == "global" and not waits:
                return self._leave("has made its last round")
            knows = wants.End() if self.round.scope == "global" else knows
        return self._leave("stopped")

    def _asks(self, want: wants.Want) -> Go | Stop | Met | None:
        self.grants.ask_for(want)
        return self._follow()

    def _pause(self) -> bool:
        self.state = "paused"
        self.grants.pause(self.committed)
        self.sleep(self.run.random.uniform(0.1, 5.0))
        return True

    def _leave(self, reason: str, *, failed: bool = False) -> bool:
        self.state = "leaving"
        leave = Leave(self.name, self.incarnation, self.done, failed, reason, self.committed)
        try:
            self.channel.ask(leave, lambda m: isinstance(m, Left), what="leaving", timeout_s=LEAVE_WITHIN_S)
        except (ExchangeError, JoinError, ServerLostError):
            pass  # the servers notice the end of its process
        return False

    # -- what happens to it -----------------------------------------------------------------------------------

    def drop(self, broken: tuple[int, ...] = ()) -> None:
        """Let the round fail here."""
        if self.state == "exchanging":
            self._drop(broken)
            self.go_on()

    def _drop(self, broken: tuple[int, ...] = ()) -> None:
        self.dropped, self.state = self.round.id, "dropped"
        self.channel.send(Failed(self.name, self.incarnation, self.round.id, "a peer closed", broken))

    def _is_over(self, generation: int) -> None:
        if self.state == "exchanging" and self.round.generation.number <= generation:
            self.drop()

    def commit(self) -> None:
        """Let the round be completed here."""
        if self.state == "exchanging":
            self.committed, self.state = self.round.id, "committed"
            self.learned = self.run.completed(self)
            self.channel.send(Completed(self.name, self.incarnation, self.round.id))
            self.go_on()

    def fails(self, error: JoinError | ServerLostError) -> None:
        """End with an error."""

    def end(self) -> None:
        """End the process, whatever it is about."""
        if self.state != "gone":
            self.state, self._nap = "gone", None
            if getcurrent() is not self._script:
                self._script.throw()
