"""How a worker gets its iterations: it asks the servers, one request after another and ahead of need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from lsgd.client.control.waiting import Expected, Notice
from lsgd.errors import ExchangeError, JoinError, LsgdError, ServerLostError
from lsgd.means import mean_of
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Go, Met, Pause, Paused, Request, Stop
from lsgd.protocol.wants import STEP, Call, End, More, Step, Want

if TYPE_CHECKING:
    from lsgd.client.control.joining import Membership
    from lsgd.client.iteration.replica import Look
    from lsgd.client.iteration.reports import ElectionInput, Stopwatch

logger = logging.getLogger("lsgd")

PAUSE_WITHIN_S = 3.0
"""How long a pausing worker waits for the servers to acknowledge, in seconds."""

MEMORY = 0.9
"""Weight of the answers before the last one in the estimate of this worker's share."""

EQUAL_FOR = 8.0
"""The estimate starts as if this many iterations had been an equal share of the run."""


class GrantedIterations:
    """The iterations granted to a worker: by one request after another, and, with ``lookahead``, by one request ahead.

    Attributes:
        seq: number of the last request that was not ahead; 0 before the first.
    """

    def __init__(self, lookahead: int) -> None:
        self.seq = 0
        self._lookahead = lookahead
        self._left = 0  # iterations after the current one
        self._last_grant = 0
        self._unanswered = False  # the last request has no answer yet
        self._asking = False  # ahead, under the next number
        self._ahead: Go | None = None  # the answer to that, until needed

    def next(self) -> bool:
        """Begin a granted iteration; if there is none, go to the next request's number, and return False.

        An unanswered request keeps its number.
        """
        if (go := self._ahead) is not None:
            self.seq, self._left, self._last_grant = go.seq, self._left + go.iterations, go.iterations
            self._ahead, self._asking = None, False
        if self._left:
            self._left -= 1
            return True
        self.seq += not self._unanswered
        self._unanswered, self._asking = True, False
        return False

    def wants_more(self) -> bool:
        """Whether to ask for more now, under the number ``seq + 1``."""
        if not self._lookahead or self._asking or self._left > self._last_grant // 2:
            return False
        self._asking = True
        return True

    def take(self, go: Go) -> bool:
        """Accept an answer; return whether it answers the last request, so that an iteration begins."""
        if self._asking and go.seq == self.seq + 1:
            self._ahead = go
            return False
        if go.seq != self.seq:
            return False
        self._unanswered = False
        self._last_grant, self._left = go.iterations, go.iterations - 1
        return True

    def give_back(self) -> None:
        """Give up what is granted beyond the current iteration, and the request ahead."""
        self._left, self._ahead = 0, None
        self.seq, self._asking = self.seq + self._asking, False

    def withdraw(self) -> None:
        """Give up all grants and the last request: the next request gets a new number."""
        self.give_back()
        self._unanswered = False


class ProgressEstimate:
    """The share of the run that is done, 0 to 1, as far as this worker knows.

    Answers give it exactly, but one may cover many iterations. In between, each iteration of this worker counts as much
    as those before it (at first, an equal share); time counts if the plan ends by time. The estimate never falls: if
    it is ahead of an answer, it waits. Only if the run goes back to a checkpoint, or has lost iterations, an answer is
    below the last one, and the estimate follows.
    """

    def __init__(
        self, run: RunSettings, world_size: int, done: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._world_size = run, world_size
        self._counts = run.iterations > 0
        self._done = done
        self._clock = clock
        self._answer: float | None = None  # the last one; below, when it came
        self._answer_done, self._answer_s = 0, 0.0
        self._highest = 0.0  # share that was returned
        # This many iterations of this worker were this share of the run; older ones count less.
        self._iterations = EQUAL_FOR
        self._share = EQUAL_FOR * world_size / run.iterations if run.iterations else 0.0

    def expect(self, steps: int) -> None:
        """Take the length of this worker's own loop for an equal share of the run, if the plan has no length."""
        if steps and not self._run.iterations:
            self._counts, self._share = True, EQUAL_FOR / steps

    def answered(self, answer: float, done: int) -> None:
        """Accept the share in an answer to a request that reported ``done`` iterations of this worker."""
        if self._answer is not None:
            if answer < self._answer:
                self._highest = answer
            elif done > self._answer_done:
                self._iterations = MEMORY * self._iterations + done - self._answer_done
                self._share = MEMORY * self._share + answer - self._answer
        self._answer, self._answer_done, self._answer_s = answer, done, self._clock()

    def share(self, ahead: float = 0.0) -> float:
        """Return the share ``ahead`` iterations of this worker from now: 0.5 is the middle of the next one."""
        if self._answer is None:
            return 0.0
        made = self._done() - self._answer_done + ahead
        by_count = made * self._share / self._iterations if self._counts else 0.0
        by_time = (self._clock() - self._answer_s) / self._run.seconds if self._run.seconds else 0.0
        self._highest = max(self._highest, min(1.0, self._answer + max(by_count, by_time)))
        return self._highest


class Report(NamedTuple):
    """What a process tells the head of its island.

    Args:
        look: what it finds in its part of the model; None: it has not looked.
        numbers: for the mean over the workers.
    """

    loss: float | None
    done: int
    look: Look | None
    numbers: dict[str, float]


@dataclass(frozen=True)
class NextStep:
    """What a worker does next; in an island the head decides.

    Args:
        answer: the servers'; None: an iteration that was granted ahead.
        reported: progress in an answer since the decision before, and this worker's iterations as of its request.
        middle: progress in the middle of the next iteration, for learning rates.
        looks: what the processes have found in the model, by rank; empty: nobody has looked.
    """

    answer: Go | Stop | Met | None
    reported: tuple[float, int] | None
    middle: float
    looks: Sequence[Look] = ()


@dataclass(frozen=True)
class Asking:
    """What a worker asks for, until that is something else.

    Args:
        within_s: longest wait for an answer; None: no limit.
        notice: of the whole wait, with rounds in it; None: each request is a wait of its own.
    """

    wants: Want = STEP
    within_s: float | None = None
    notice: Notice | None = None


class Ahead(NamedTuple):
    """A request for more, while its answer is awaited; ``done``: this worker's iterations as of it."""

    answer: Expected
    done: int


class GrantClient:
    """One worker's requests, what the servers have granted it, and the iterations that it has completed.

    In an island the head asks, and all processes get its decisions.

    Attributes:
        done: iterations completed since it joined.
        middle: progress in the middle of the next iteration; equal in all processes of an island.
        steps: length of the script's own loop in iterations; 0: it has none.
        ending: the servers' word that the run has ended for this worker; None: it has not.
        lacking: whether it lacked parts of the run's model in the last round that it has completed.
    """

    def __init__(self, membership: Membership, election: ElectionInput, stopwatch: Stopwatch) -> None:
        self.done = 0
        self.ending: Stop | None = None
        self.lacking = False
        self.progress = ProgressEstimate(membership.plan.run, membership.welcome.world_size, lambda: self.done)
        self.middle, self.steps = 0.0, 0
        self._island, self._channel, self._who = membership.island, membership.channel, membership.who
        self._election, self._stopwatch = election, stopwatch
        self._held = GrantedIterations(membership.plan.run.lookahead)
        self._ahead: Ahead | None = None
        self._asking = Asking()

    def ask_for(self, wants: Want, *, within_s: float | None = None) -> None:
        """Give back all grants; from now on requests are for this, and each waits for at most ``within_s``."""
        self.give_back()
        notice = None if isinstance(wants, Step) else self._asking.notice or Notice()
        self._asking = Asking(wants, within_s, notice)

    def call(self, numbers: dict[str, float], *, aside: bool) -> Call:
        """Return a new call that all workers make; its number is that of its first request."""
        self.give_back()
        return Call(self._held.seq + 1, numbers, aside)

    def give_back(self) -> None:
        """Give back all grants: the next request is a new one."""
        self._forget_ahead()
        self._held.withdraw()

    def next(
        self, rounds: tuple[int, int], *, lockstep: bool, look: Callable[[], Look] | None, again: bool
    ) -> NextStep:
        """Decide what comes next.

        An answer repeats until :meth:`take` accepts it, because its round may fail; but a call is answered once.

        Args:
            rounds: last rounds that this worker has committed and dropped.
            lockstep: whether each iteration is a round, so that none can be made without the servers.
            look: looks at this process's part of the model, if the servers are asked: a round may come. None: nobody
                need look.
            again: whether to repeat the last request in any case, in the middle of its iteration.
        """
        wants = self._asking.wants
        asks = again or lockstep or not isinstance(wants, Step)  # nothing is granted ahead

        def report() -> Report:
            loss = self._election.loss(self.done, rounds[0])
            return Report(loss, self.done, look() if look else None, wants.numbers if isinstance(wants, Call) else {})

        def decide(reports: Callable[[], list[Report]]) -> NextStep:
            reported = self._take_ahead()
            if not again and self._held.next():
                return NextStep(None, reported, self._middle(reported))
            by_all, asked = reports(), wants
            if isinstance(wants, Call):
                asked = replace(wants, numbers=_means([each.numbers for each in by_all]))
            answer = self._answer(self._request(self._held.seq, asked, self._mean_loss(by_all), rounds))
            if isinstance(answer, Met):
                return NextStep(answer, reported, self._middle(reported))
            reported = (1.0 if isinstance(answer, Stop) else answer.progress), self.done
            looks = [each.look for each in by_all if each.look is not None]
            return NextStep(answer, reported, self._middle(reported), looks)

        decision = self._island.decide("begins a step", report, decide, reports=asks)
        if decision.reported is not None and not self._island.is_head:
            self.progress.answered(*decision.reported)
        self.middle = decision.middle
        if isinstance(decision.answer, Met):
            self.ask_for(STEP)
        return decision

    def take(self, answer: Go | Stop) -> None:
        """Accept an answer whose round is done."""
        if isinstance(answer, Go):
            self._held.take(answer)
            return
        self.ending = answer
        logger.info("%s stops after %d iterations: %s", self._who[0], self.done, answer.reason)
        if answer.late:
            logger.warning("the others have made the last round without %s: its model is its own", self._who[0])

    def complete(self) -> None:
        """Count the granted iteration."""
        self.done += 1

    def ask_ahead(self, rounds: tuple[int, int]) -> None:
        """If few iterations are left, ask for more without waiting."""
        if self._island.is_head and self._held.wants_more():
            seq = self._held.seq + 1
            self._ahead = Ahead(self._channel.expect(lambda m: isinstance(m, Go | Stop) and m.seq == seq), self.done)
            self._channel.send(self._request(seq, More(), None, rounds))  # only rounds use a loss

    def pause(self, committed: int, *, alone: bool = False) -> None:
        """Give back all grants, and tell the others not to wait until the next request.

        All processes of an island call it, or the head ``alone``.
        """
        if alone:
            self._pause(committed)
        else:
            self._island.share("pauses", lambda: self._pause(committed))

    # -- on the head -------------------------------------------------------------------------------------------

    def _take_ahead(self) -> tuple[float, int] | None:
        """Accept the answer to the request ahead, if it is there; return the progress in it, as of which iteration."""
        reported = None
        if self._ahead is not None and (go := self._ahead.answer.answered) is not None:
            reported = go.progress, self._ahead.done
            self._held.take(go)
            self._forget_ahead()
        if self._channel.recalled():
            self._forget_ahead()
            self._held.give_back()  # the next message says so
        return reported

    def _middle(self, reported: tuple[float, int] | None) -> float:
        if reported is not None:
            self.progress.answered(*reported)
        return self.progress.share(ahead=0.5)

    def _mean_loss(self, reports: list[Report]) -> float | None:
        """Return the mean loss of this worker's processes; None if none has one."""
        if len({each.done for each in reports}) > 1:
            raise LsgdError(
                f"{self._who[0]}: the processes of this island have completed "
                f"{', '.join(str(each.done) for each in reports)} iterations; all of them must step the optimizer, or "
                f"skip the step, together"
            )
        losses = [each.loss for each in reports if each.loss is not None]
        return sum(losses) / len(losses) if losses else None

    def _answer(self, request: Request) -> Go | Stop | Met:
        """Return the answer to a request."""
        seq, wants, (ahead, self._ahead) = request.seq, request.wants, (self._ahead, None)

        def answers(message: object) -> bool:
            if isinstance(message, Met):
                return isinstance(wants, Call) and message.number == wants.number
            return isinstance(message, Go | Stop) and message.seq == seq

        with self._stopwatch.spending("waiting"):
            answer: Go | Stop | Met = self._channel.ask(
                request,
                ahead.answer if ahead else answers,
                what=f"{self._who[0]} waits for {_awaited(wants)}",
                timeout_s=self._asking.within_s,
                notice=self._asking.notice,
            )
        return answer

    def _pause(self, committed: int) -> None:
        self.give_back()
        seq = self._held.seq
        try:
            self._channel.ask(
                Pause(*self._who, seq, self.done, committed),
                lambda m: isinstance(m, Paused) and m.seq == seq,
                what=f"{self._who[0]} pauses",
                timeout_s=PAUSE_WITHIN_S,
            )
        except (ExchangeError, JoinError, ServerLostError) as error:
            me = self._who[0]
            logger.warning("%s pauses, but could not tell the servers, so others may wait for it: %s", me, error)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._channel.forget(self._ahead.answer)
            self._ahead = None

    def _request(self, seq: int, wants: Want, loss: float | None, rounds: tuple[int, int]) -> Request:
        return Request(*self._who, seq, self.done, *rounds, loss, wants, self.steps, self.lacking)


def _awaited(wants: Want) -> str:
    """Say what a worker waits for that wants this."""
    if isinstance(wants, Call):
        return "the others in mean()" if wants.numbers else "the others in barrier()"
    return "the end of the run" if isinstance(wants, End) else "its next iteration"


def _means(reports: list[dict[str, float]]) -> dict[str, float]:
    """Return the means over the processes of an island."""
    if any(report.keys() != reports[0].keys() for report in reports):
        raise LsgdError("the processes of this island average numbers of different names in mean()")
    return {name: mean_of([report[name] for report in reports]) for name in reports[0]}
