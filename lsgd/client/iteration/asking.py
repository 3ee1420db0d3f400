"""How a worker asks the servers for iterations, one after another and ahead of need."""

import logging

from lsgd.client.control.channel import Expected
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.grants import Grants
from lsgd.client.iteration.progress import Progress
from lsgd.client.iteration.standing import Standing
from lsgd.client.iteration.tally import Tally
from lsgd.errors import ExchangeError, JoinError, LsgdError, ServerLostError
from lsgd.protocol.messages import Go, Pause, Paused, Request, Stop

logger = logging.getLogger("lsgd")

PAUSE_WITHIN_S = 3.0
"""How long a pausing worker waits for the servers to acknowledge, in seconds."""


class Asking:
    """One worker's requests, and what the servers have granted it.

    In an island the head asks, and all processes get the answers.

    Args:
        membership: its place in the run.
        tally: what it has done, for every request.
        standing: its loss, for requests that may open a round.

    Attributes:
        progress: share of the run that is done.
        stopped: whether the run has ended, at least for this worker.
    """

    def __init__(self, membership: Membership, tally: Tally, standing: Standing) -> None:
        self.progress = Progress(membership.plan.run, membership.welcome.world_size, lambda: tally.done)
        self.stopped = False
        self._island = membership.island
        self._channel = membership.channel
        self._who = membership.who
        self._tally = tally
        self._standing = standing
        self._grants = Grants(membership.plan.run.lookahead)
        self._ahead: Expected | None = None  # the answer to the request for more
        self._last = False  # requests are for a round only, without an iteration
        self._reported = 0  # iterations completed, as of the last request

    def next(self) -> bool:
        """Take the next iteration that was granted ahead; return False if there is none."""
        granted, progress, done = self._island.share("begins a step", self._next)
        if progress is not None:
            self.progress.answered(progress, done)
        return granted

    def _next(self) -> tuple[bool, float | None, int]:
        """Return whether there was one, the progress that an answer reported (or None), and as of which iteration."""
        progress = None
        if self._ahead is not None and (go := self._ahead.answered) is not None:
            progress = go.progress
            self._grants.take(go)
            self._forget_ahead()
        if self._channel.recalled():
            self._forget_ahead()
            self._grants.give_back()  # the next message says so
        return self._grants.next(), progress, self._reported

    def request(self, silence_s: float | None) -> Go | Stop:
        """Ask for an iteration and return the answer; repeats the same request until :meth:`take`.

        Args:
            silence_s: how long the servers may be silent; None: as in the plan.
        """
        loss = self._mean_loss()
        self._reported = self._tally.done
        return self._island.share("asks for an iteration", lambda: self._request(loss, silence_s))

    def _mean_loss(self) -> float | None:
        """Return the mean loss of this worker's processes; None if none has one."""
        reports = self._island.gather("asks for an iteration", (self._standing.loss(), self._tally.done))
        if len({done for _, done in reports}) > 1:
            raise LsgdError(
                f"{self._who[0]}: the processes of this island have completed "
                f"{', '.join(str(done) for _, done in reports)} iterations; all of them must step the optimizer, or "
                f"skip the step, together"
            )
        losses = [loss for loss, _ in reports if loss is not None]
        return sum(losses) / len(losses) if losses else None

    def _request(self, loss: float | None, silence_s: float | None) -> Go | Stop:
        seq = self._grants.seq
        expected, self._ahead = self._ahead, None
        with self._tally.spending("waiting"):
            answer: Go | Stop = self._channel.ask(
                self._make_request(seq, loss),
                expected or (lambda m: isinstance(m, Go | Stop) and m.seq == seq),
                what=f"{self._who[0]} waits for its next iteration",
                silence_s=silence_s,
            )
        return answer

    def take(self, answer: Go | Stop) -> bool:
        """Accept an answer whose round is done; return whether it grants an iteration, or the run has ended."""
        if isinstance(answer, Stop):
            self.stopped = True
            self.progress.answered(1.0, self._reported)
            logger.info("%s stops after %d iterations: %s", self._who[0], self._tally.done, answer.reason)
            return False
        self.progress.answered(answer.progress, self._reported)
        return self._island.share("takes an iteration", lambda: self._grants.take(answer))

    def want_only_round(self) -> None:
        """Give back all grants; the next request is only for a round, after which this worker leaves."""
        self._forget_ahead()
        self._grants.withdraw()
        self._grants.next()
        self._last = True

    def ask_ahead(self) -> None:
        """If few iterations are left, ask for more without waiting."""
        if self._island.is_head and self._grants.wants_more():
            seq = self._grants.seq + 1
            self._ahead = self._channel.expect(lambda m: isinstance(m, Go | Stop) and m.seq == seq)
            self._channel.send(self._make_request(seq, None, ahead=True))  # only rounds use a loss

    def remind(self) -> float:
        """Repeat the unanswered request without waiting; return how long the servers have been silent, in seconds."""
        loss = self._mean_loss()
        return self._island.share("continues alone", lambda: self._remind(loss))

    def _remind(self, loss: float | None) -> float:
        self._channel.send(self._make_request(self._grants.seq, loss))
        return self._channel.silent_s()

    def given_up(self) -> bool:
        """Whether the servers will never answer again."""
        return self._island.share("continues alone", lambda: self._channel.given_up)

    def pause(self) -> None:
        """Give back all grants, and tell the others not to wait until the next request."""
        self._island.share("pauses", self._pause)

    def _pause(self) -> None:
        self._forget_ahead()
        self._grants.withdraw()
        seq = self._grants.seq
        message = Pause(*self._who, seq, self._tally.done, self._tally.committed)
        try:
            self._channel.ask(
                message,
                lambda m: isinstance(m, Paused) and m.seq == seq,
                what=f"{self._who[0]} pauses",
                timeout_s=PAUSE_WITHIN_S,
            )
        except (ExchangeError, JoinError, ServerLostError) as error:
            me = self._who[0]
            logger.warning("%s pauses, but could not tell the servers, so others may wait for it: %s", me, error)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._channel.forget(self._ahead)
            self._ahead = None

    def _make_request(self, seq: int, loss: float | None, *, ahead: bool = False) -> Request:
        tally = self._tally
        self._reported = tally.done
        rate = None if ahead else self._standing.rate()  # only rounds use it
        return Request(*self._who, seq, tally.done, tally.committed, tally.dropped, loss, ahead, self._last, rate)
