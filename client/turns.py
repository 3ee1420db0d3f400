"""A worker's turns: it asks for each iteration, carries out its round, and counts it when it is made."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lsgd.algorithms import Algorithm
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.channel import Expected
from lsgd.client.checkpoints import Checkpoints
from lsgd.client.exchange import Exchanger
from lsgd.client.gradients import GradientExchange
from lsgd.client.grants import Grants
from lsgd.client.joining import Membership
from lsgd.client.loss import LossWindow
from lsgd.errors import ExchangeError, JoinError, LsgdError, ServerLostError
from lsgd.group import Group
from lsgd.messages import Done, Go, Pause, Paused, Request, Round, Stop

logger = logging.getLogger("lsgd")

MAX_FAILURES = 10
"""How many rounds in a row may fail before a worker gives up."""

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
        self.rank = membership.welcome.rank
        self.world_size = membership.welcome.world_size
        self.progress = 0.0
        self.stopped = False
        self.granted = False
        self.done = 0
        self.gradients: GradientExchange | None = None
        self._attended: Algorithm | None = None
        self._channel = membership.channel
        self._who = (membership.join.worker, membership.join.incarnation)
        self._exchanger = exchanger
        self._checkpoints = checkpoints
        self._count = 0  # of the run, as of the last global round
        self.committed = 0
        self._run = membership.plan.run
        self._grants = Grants(self._run.lookahead)
        self._ahead: Expected | None = None  # the answer to the request for more
        self._alone = 0  # iterations made since the servers fell silent
        self._dropped = 0  # the last round that could not be completed
        self._stepped = False
        self._skipped = False  # the optimizer was kept from its step
        self._gave_back = False  # a pause has given back the grant of this turn
        self._pending: tuple[Group, Round] | None = None  # a round that the backward pass completes
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
        elif self.gradients is not None and self._pending is None:
            self.granted = (
                False  # a step was skipped whose gradients were exchanged: the next one needs a round
            )
        self._stepped = False

    def pause(self) -> None:
        """Give an unused grant back, and let rounds go on without this worker until it asks again."""
        self.finish()
        if self._pending is not None:
            self._drop("paused in the middle of an iteration")
        if not self.stopped:
            self._forget_ahead()
            self._grants.withdraw()
            self._gave_back, self.granted = self.granted, False
            self._say_pause(Pause(*self._who, self._grants.seq, self.done, self.committed))

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

    def keep(self) -> str:
        """Save the state between two iterations as that of the last global round; return in words where it is."""
        if not self._count or self._checkpoints.folder is None:
            why = "no folder was given" if self._count else "no global round came after an iteration"
            return f"its state is not saved: {why}"
        self._take(self._count)
        path = self._checkpoints.save(self._count)
        if path is None:
            return "its state cannot be saved"
        return (
            f"its state is saved in {path}; when the servers can run again, go on from it with lsgd launch --resume "
            f"(RESUME=1 bash scripts/train.sh)"
        )

    def close(self) -> None:
        """Count the last iteration, and remove the hooks."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        if self.gradients is not None:
            self.gradients.close()

    # -- asking ------------------------------------------------------------------------------------------------

    def _may_go_on_alone(self) -> bool:
        lockstep = self._exchanger.algorithm.settings.schedule().lockstep
        return self._alone < self._run.unsupervised_iterations and self.committed > 0 and not lockstep

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
        """
        failures = 0
        while True:
            answer = self._request(silence_s)
            round = answer.round
            if round is not None and round.id <= self._dropped:
                continue
            if round is not None:
                try:
                    self._carry_out(round, redo=redo)
                except ExchangeError as error:
                    logger.warning(
                        "round %d failed, the model is as before: %s; asking again", round.id, error
                    )
                    self._dropped, failures = round.id, failures + 1
                    self._channel.send(Done(*self._who, round.id, False, str(error)))
                    if failures == MAX_FAILURES:
                        raise ExchangeError(
                            f"{failures} rounds in a row failed, the last one: {error}"
                        ) from error
                    continue
            if isinstance(answer, Stop):
                self.stopped, self.progress = True, 1.0
                logger.info("%s stops after %d iterations: %s", self.name, self.done, answer.reason)
            else:
                self.progress = answer.progress
            return answer

    def _make_request(self, seq: int, *, ahead: bool = False) -> Request:
        loss = None if ahead else self.losses.mean()  # it is looked at in rounds only
        return Request(*self._who, seq, self.done, self.committed, self._dropped, loss, ahead)

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

    def _carry_out(self, round: Round, *, redo: bool) -> None:
        """Carry out a round, up to the backward pass if it is that which completes it."""
        # In the middle of an iteration, what a snapshot was to be of is gone: the one of its beginning counts.
        self._exchanger.when_ready(None if redo else self._enter)
        round = self._exchanger.whole(round)
        group = self._exchanger.run(round)
        self._attend(self._exchanger.algorithm)
        members = round.generation.members
        self.rank, self.world_size = members.index(self.name), len(members)
        if round.final or not self._exchanger.algorithm.spans_backward:
            self._commit(round)
        elif redo:
            assert self.gradients is not None
            self.gradients.again(group, round)
            self._commit(round)
        else:
            self._pending = group, round
            if self.gradients is not None:
                self.gradients.arm(group, round)

    def _enter(self, round: Round) -> None:
        """Note the state that a round is entered with, if it is to be saved."""
        self._checkpoints.restore_random()
        if round.checkpoint:
            self._take(round.count)

    def _take(self, count: int) -> None:
        self._checkpoints.take(count, self._exchanger.algorithm, self.losses.values, self.done)

    def _attend(self, algorithm: Algorithm) -> None:
        """Let the backward passes exchange gradients if the algorithm does."""
        if self._attended is algorithm:
            return
        self._attended = algorithm
        if self.gradients is not None:
            self.gradients.close()
        self.gradients = None
        if isinstance(algorithm, GradientAlgorithm):
            self.gradients = GradientExchange(self._exchanger.flat, algorithm, self._complete_gradients)

    def _commit(self, round: Round) -> None:
        self._pending = None
        self.committed = round.id
        if round.scope == "global":
            self._count = round.count
        if round.checkpoint:
            self._checkpoints.save(round.count)
        self._channel.send(Done(*self._who, round.id, True, ""))

    def _drop(self, reason: str) -> None:
        """Give up the round that is pending: the servers order another."""
        assert self._pending is not None
        _, round = self._pending
        self._pending, self._dropped = None, round.id
        self._exchanger.leave(cut=True)
        if self.gradients is not None:
            self.gradients.disarm()
        self._channel.send(Done(*self._who, round.id, False, reason))

    # -- the moments of an iteration ---------------------------------------------------------------------------

    def _complete_gradients(self) -> None:
        """At the end of a backward pass: wait for the exchange; if it failed, exchange the gradients again."""
        assert self.gradients is not None and self._pending is not None
        _, round = self._pending
        try:
            self.gradients.wait()
        except ExchangeError as error:
            logger.warning("round %d failed: %s; its gradients will be exchanged again", round.id, error)
            self._drop(str(error))
            if isinstance(self._negotiate(redo=True), Stop):
                self.gradients.drop_gradients()
                self.granted = False
        else:
            self._commit(round)

    def _before_step(self, *_: Any) -> None:
        """See that what the optimizer is about to use is what the round has made of it."""
        if self._gave_back:
            raise LsgdError(
                f"{self.name}: optimizer.step() after worker.pause() in the same turn: the pause gave this turn's "
                f"iteration back to the run; pause after the step, or between two loops"
            )
        if self.gradients is not None and self.gradients.spoilt:
            logger.warning("%s: a member's gradient is not finite; all skip this step", self.name)
            self.gradients.drop_gradients()
            self._skipped = True
        if self._pending is None:
            return
        if self.gradients is not None:
            raise LsgdError(
                f"{self.name}: optimizer.step() before the gradients were exchanged; no backward pass ran in this "
                f"iteration, or all of it inside worker.no_sync()"
            )
        group, round = self._pending
        try:
            self._exchanger.algorithm.after_backward(self._exchanger.flat.buffers, (), group, round)
        except ExchangeError as error:
            logger.warning("round %d failed, the model is as before: %s", round.id, error)
            self._drop(str(error))
        else:
            self._commit(round)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A fused optimizer is stepped by GradScaler in any case, and skips the step itself where this tensor says so.
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped |= not self._skipped and (found_inf is None or not bool(found_inf))
        self._skipped = False
