"""A worker's part in rounds: from the servers' order to the word that a round is done, or given up."""

import logging
from collections.abc import Callable

from lsgd.algorithms import Algorithm
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.exchange import Exchanger
from lsgd.client.iteration.gradients import GradientExchange
from lsgd.collectives.group import Group
from lsgd.errors import BrokenLinksError, ExchangeError, LsgdError
from lsgd.protocol.messages import Done, Round

logger = logging.getLogger("lsgd")


class Rounds:
    """The rounds of one worker.

    Some are over before the forward pass. Others exchange what the backward pass computes, and are pending until
    then; one that fails there is given up, and the servers order another.

    Args:
        membership: its place in the run.
        exchanger: carries out what comes before the forward pass.
        checkpoints: of this worker.
        take: takes a snapshot for them, as of a count of the run's iterations.
        redo: asks for another round, for gradients whose exchange has failed, and carries it out; returns False if
            the run has ended instead.

    Attributes:
        rank: in the generation of the last round; before the first, the one expected.
        world_size: members of that generation.
        committed: number of the last round that was completed; 0: none was.
        dropped: number of the last round that was given up; 0: none was.
        gradients: exchanges gradients in the backward pass; None if the algorithm exchanges models.
    """

    def __init__(
        self,
        membership: Membership,
        exchanger: Exchanger,
        checkpoints: Checkpoints,
        take: Callable[[int], None],
        redo: Callable[[], bool],
    ) -> None:
        self.rank = membership.welcome.rank
        self.world_size = membership.welcome.world_size
        self.committed = 0
        self.dropped = 0
        self.gradients: GradientExchange | None = None
        self._who = (membership.join.worker, membership.join.incarnation)
        self._channel = membership.channel
        self._exchanger = exchanger
        self._checkpoints = checkpoints
        self._take = take
        self._redo = redo
        self._count = 0  # of the run's iterations, as of the last global round
        self._attended: Algorithm | None = None
        self._pending: tuple[Group, Round] | None = None

    @property
    def pending(self) -> bool:
        """Whether a round waits for the backward pass."""
        return self._pending is not None

    def carry_out(self, round: Round, *, redo: bool) -> None:
        """Carry out a round, up to the backward pass if it is that which completes it.

        Args:
            round: the servers' order.
            redo: exchange the gradients of a backward pass that has ended.

        Raises:
            ExchangeError: it failed and is given up; the model is as before.
        """
        # In the middle of an iteration, what a snapshot was to be of is gone: the one of its beginning counts.
        self._exchanger.when_ready(None if redo else self._enter)
        try:
            round = self._exchanger.whole(round)
            group = self._exchanger.run(round)
            self._attend(self._exchanger.algorithm)
            members = round.generation.members
            self.rank, self.world_size = members.index(self._who[0]), len(members)
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
        except ExchangeError as error:
            self._give_up(round, str(error), error.broken if isinstance(error, BrokenLinksError) else ())
            raise

    def complete(self) -> None:
        """Complete the pending round of an algorithm that exchanges models beside the backward pass, which has ended.

        One that fails is given up; the model is as before.

        Raises:
            LsgdError: the algorithm exchanges gradients, and no backward pass has.
        """
        assert self._pending is not None
        if self.gradients is not None:
            raise LsgdError(
                f"{self._who[0]}: optimizer.step() before the gradients were exchanged; no backward pass ran in this "
                f"iteration, or all of it inside worker.no_sync()"
            )
        group, round = self._pending
        try:
            self._exchanger.algorithm.after_backward(self._exchanger.flat.buffers, (), group, round)
        except ExchangeError as error:
            logger.warning("round %d failed, the model is as before: %s", round.id, error)
            self.drop(str(error))
        else:
            self._commit(round)

    def drop(self, reason: str) -> None:
        """Give up the pending round: the servers order another."""
        assert self._pending is not None
        _, round = self._pending
        self._pending = None
        self._exchanger.leave(cut=True)
        if self.gradients is not None:
            self.gradients.disarm()
        self._give_up(round, reason)

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
        """Remove the hooks in the backward pass."""
        if self.gradients is not None:
            self.gradients.close()

    def _enter(self, round: Round) -> None:
        """Note the state that a round is entered with, if it is to be saved."""
        self._checkpoints.restore_random()
        if round.checkpoint:
            self._take(round.count)

    def _attend(self, algorithm: Algorithm) -> None:
        """Let the backward passes exchange gradients if the algorithm does."""
        if self._attended is algorithm:
            return
        self._attended = algorithm
        self.close()
        self.gradients = None
        if isinstance(algorithm, GradientAlgorithm):
            self.gradients = GradientExchange(self._exchanger.flat, algorithm, self._complete_gradients)

    def _complete_gradients(self) -> None:
        """At the end of a backward pass: wait for the exchange; if it failed, exchange the gradients again."""
        assert self.gradients is not None and self._pending is not None
        _, round = self._pending
        try:
            self.gradients.wait()
        except ExchangeError as error:
            logger.warning("round %d failed: %s; its gradients will be exchanged again", round.id, error)
            self.drop(str(error))
            if not self._redo():
                self.gradients.drop_gradients()
        else:
            self._commit(round)

    def _commit(self, round: Round) -> None:
        self._pending = None
        self.committed = round.id
        if round.scope == "global":
            self._count = round.count
        if round.checkpoint:
            self._checkpoints.save(round.count)
        self._channel.send(Done(*self._who, round.id, True, ""))

    def _give_up(self, round: Round, reason: str, broken: tuple[int, ...] = ()) -> None:
        self.dropped = round.id
        self._channel.send(Done(*self._who, round.id, False, reason, broken))
