"""A worker's turns: it asks for each iteration, has its round carried out, and counts it when it is made."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.channel import Expected
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.exchange import Exchanger
from lsgd.client.iteration.grants import Grants
from lsgd.client.iteration.loss import LossWindow
from lsgd.client.iteration.rounds import Rounds
from lsgd.errors import ExchangeError, JoinError, LsgdError, NoConsensusError, ServerLostError
from lsgd.protocol.messages import Go, Pause, Paused, Request, Stop

logger = logging.getLogger("lsgd")

UNSUPERVISED_AFTER_S = 3.0
"""How long the servers are silent before a worker goes on without them, where the plan lets it, in seconds."""

PAUSE_WITHIN_S = 3.0
"""How long a worker that pauses waits until the servers know, in seconds."""


class Turns:
    """The iterations of one worker.

    Args:
        membership: its place in the run.
        exchanger: carries out rounds.
        optimizers: whose steps are counted: a turn in which one stepped is an iteration.
        checkpoints: of this worker.

    Attributes:
        losses: of its last batches.
        progress: share of the run that is made, as of the last answer.
        stopped: the run has ended.
        granted: an iteration may be made that has not been made yet.
        done: iterations made since the worker joined.
        rounds: its part in them.
    """

    def __init__(
        self,
        membership: Membership,
        exchanger: Exchanger,
        optimizers: Sequence[torch.optim.Optimizer],
        checkpoints: Checkpoints,
    ) -> None:
        self.losses = LossWindow(membership.plan.loss_window)
        self.losses.values = checkpoints.losses
        self.progress = 0.0
        self.stopped = False
        self.granted = False
        self.done = 0
        self.rounds = Rounds(membership, exchanger, checkpoints, self._take, self._redo)
        self._channel = membership.channel
        self._who = (membership.join.worker, membership.join.incarnation)
        self._exchanger = exchanger
        self._checkpoints = checkpoints
        self._run = membership.plan.run
        self._grants = Grants(self._run.lookahead)
        self._ahead: Expected | None = None  # the answer to the request for more
        self._alone = 0  # iterations made since the servers fell silent
        self._stepped = False
        self._skipped = False  # this turn's gradients were dropped: whatever steps, it is no iteration
        self._gave_back = False  # a pause has given back the grant of this turn
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in optimizers]
        self._hooks += [o.register_step_post_hook(self._after_step) for o in optimizers]

    @property
    def name(self) -> str:
        """This worker's name in the run."""
        return self._who[0]

    def begin(self) -> bool:
        """Ask for an iteration and carry out its round; return False if the run has ended."""
        self._exchanger.flat.check()
        self._take_ahead()
        if self._channel.recalled():
            self._forget_ahead()
            self._grants.give_back()  # the next message says so
        self._gave_back = False
        if self._grants.next():
            self.granted = True
            self._ask_ahead()
            return True
        if self._alone and self._may_go_on_alone() and not self._servers_are_back():
            return self._go_on_alone()
        try:
            answer = self._negotiate(silence_s=UNSUPERVISED_AFTER_S if self._may_go_on_alone() else None)
        except ServerLostError as error:
            if not self._may_go_on_alone():
                raise
            most = self._run.unsupervised_iterations - self._alone
            logger.warning("%s goes on alone for at most %d iterations: %s", self.name, most, error)
            return self._go_on_alone()
        if self._alone:
            logger.warning("%s has made %d iterations alone; the servers are back", self.name, self._alone)
        self._alone = 0
        self.granted = isinstance(answer, Go) and self._grants.take(answer)
        self._ask_ahead()
        return self.granted

    def finish(self) -> None:
        """If an optimizer has stepped since the last grant, that was an iteration."""
        if self._stepped and self.granted:
            self.granted = False
            self.done += 1
            self._exchanger.algorithm.after_step(self._exchanger.flat.buffers)
        elif self.rounds.gradients is not None and not self.rounds.pending:
            # A step was skipped whose gradients were exchanged: the next one needs a round.
            self.granted = False
        self._stepped = self._skipped = False

    def pause(self) -> None:
        """Give an unused grant back, and let rounds go on without this worker until it asks again."""
        self.finish()
        if self.rounds.pending:
            self.rounds.drop("paused in the middle of an iteration")
        if not self.stopped:
            self._forget_ahead()
            self._grants.withdraw()
            self._gave_back, self.granted = self.granted, False
            self._say_pause(Pause(*self._who, self._grants.seq, self.done, self.rounds.committed))

    def _say_pause(self, message: Pause) -> None:
        try:
            self._channel.ask(
                message,
                lambda m: isinstance(m, Paused) and m.seq == message.seq,
                what=f"{self.name} pauses",
                timeout_s=PAUSE_WITHIN_S,
            )
        except (ExchangeError, JoinError, ServerLostError) as error:
            logger.warning(
                "%s pauses without the servers' knowing, so that others may wait: %s", self.name, error
            )

    def close(self) -> None:
        """Count the last iteration, and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        self.rounds.close()

    def _take(self, count: int) -> None:
        self._checkpoints.take(count, self._exchanger.algorithm, self.losses.values, self.done)

    # -- asking ------------------------------------------------------------------------------------------------

    def _may_go_on_alone(self) -> bool:
        lockstep = self._exchanger.algorithm.settings.schedule().lockstep
        may = self._alone < self._run.unsupervised_iterations and self.rounds.committed > 0 and not lockstep
        return may and not self._channel.given_up()

    def _servers_are_back(self) -> bool:
        """Say what was asked and not answered, without waiting; return whether the servers have been heard since."""
        self._channel.send(self._make_request(self._grants.seq))
        return self._channel.silent_s() < UNSUPERVISED_AFTER_S

    def _go_on_alone(self) -> bool:
        self._alone += 1
        self.granted = True
        return True

    def _ask_ahead(self) -> None:
        """Ask for more iterations while there are some to make, if few enough are left."""
        lockstep = self._exchanger.algorithm.settings.schedule().lockstep
        if self.granted and not lockstep and self._grants.wants_more():
            seq = self._grants.seq + 1
            self._ahead = self._channel.expect(lambda m: isinstance(m, Go | Stop) and m.seq == seq)
            self._channel.send(self._make_request(seq, ahead=True))

    def _take_ahead(self) -> None:
        """Take in what was granted ahead since the last turn."""
        if self._ahead is not None and (go := self._ahead.answered) is not None:
            self.progress = go.progress
            self._grants.take(go)
            self._forget_ahead()

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._channel.forget(self._ahead)
            self._ahead = None

    def _negotiate(self, *, redo: bool = False, silence_s: float | None = None) -> Go | Stop:
        """Ask until an answer's round has been carried out, and return that answer.

        Args:
            redo: exchange the gradients of a backward pass that has ended.
            silence_s: longest that the servers may be silent; None: as the plan has it.

        Raises:
            NoConsensusError: the run has ended without a consensus; this worker has saved its state, if it can.
        """
        while True:
            answer = self._request(silence_s)
            round = answer.round
            if round is not None and round.id <= self.rounds.dropped:
                continue
            if round is not None:
                try:
                    self.rounds.carry_out(round, redo=redo)
                except ExchangeError as error:
                    logger.warning(
                        "round %d failed, the model is as before: %s; asking again", round.id, error
                    )
                    continue  # the servers count them, and end the run if too many fail
            if isinstance(answer, Stop):
                if answer.failed:
                    raise NoConsensusError(
                        f"{self.name} has no consensus at the end of the run: {answer.reason}; {self.rounds.keep()}"
                    )
                self.stopped, self.progress = True, 1.0
                logger.info("%s stops after %d iterations: %s", self.name, self.done, answer.reason)
            else:
                self.progress = answer.progress
            return answer

    def _make_request(self, seq: int, *, ahead: bool = False) -> Request:
        loss = None if ahead else self.losses.mean()  # it is looked at in rounds only
        return Request(*self._who, seq, self.done, self.rounds.committed, self.rounds.dropped, loss, ahead)

    def _request(self, silence_s: float | None) -> Go | Stop:
        request = self._make_request(self._grants.seq)
        expected, self._ahead = self._ahead, None
        answer: Go | Stop = self._channel.ask(
            request,
            expected or (lambda m: isinstance(m, Go | Stop) and m.seq == request.seq),
            what=f"{self.name} waits for its next iteration",
            silence_s=silence_s,
        )
        return answer

    def _redo(self) -> bool:
        """Have the gradients of this iteration exchanged in another round; return False if the run has ended."""
        self.granted = isinstance(self._negotiate(redo=True), Go)
        return self.granted

    # -- the moments of an iteration ---------------------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        """See that what the optimizer is about to use is what the round has made of it."""
        if self._gave_back:
            raise LsgdError(
                f"{self.name}: optimizer.step() after worker.pause() in the same turn: the pause gave this turn's "
                f"iteration back to the run; pause after the step, or between two loops"
            )
        gradients = self.rounds.gradients
        if gradients is not None and gradients.spoilt:
            logger.warning("%s: a member's gradient is not finite; all skip this step", self.name)
            gradients.drop_gradients()
            self._skipped = True
        if self.rounds.pending:
            self.rounds.complete()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is stepped by GradScaler in any case, and skips the step itself where this tensor says so.
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped |= not self._skipped and (found_inf is None or not bool(found_inf))
