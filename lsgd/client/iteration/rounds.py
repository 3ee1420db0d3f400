"""A worker's rounds: order, enter, exchange, commit or drop, and the report to the servers."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch

from lsgd.algorithms.base import Commit
from lsgd.client.checkpoint.checkpoints import Checkpoints, Snapshot
from lsgd.client.control.channel import Totals
from lsgd.client.control.closing import on_error
from lsgd.client.control.island import Island
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.download import Download, Has
from lsgd.client.iteration.gradients import BackwardPasses
from lsgd.client.iteration.grants import GrantClient
from lsgd.client.iteration.replica import Look, Replica
from lsgd.client.iteration.reports import ElectionInput, Logged, Stopwatch, Timings
from lsgd.client.iteration.round import ActiveRound, Groups, Landing, LastRounds, Seat, State
from lsgd.client.iteration.step import Event, Step
from lsgd.errors import (
    BrokenLinksError,
    EvictedError,
    ExchangeError,
    JoinError,
    LsgdError,
    NoConsensusError,
    ServerLostError,
)
from lsgd.protocol import wants
from lsgd.protocol.events import AGREEMENT
from lsgd.protocol.messages import Completed, Failed, Go, Met, Probed, Round, Stop

logger = logging.getLogger("lsgd")

ALIGN_EVERY = 64
"""How often replicas are compared where each iteration is a round, in rounds."""


class Rounds:
    """The rounds of one worker, one at a time.

    Some are committed before the forward pass. Others wait for the backward pass; if one fails there, the gradients
    are exchanged again in the next round that the servers order.

    Attributes:
        active: last ordered round; None before the first.
        last: the last rounds that were committed and dropped.
        seat: this worker's among the members of the last round; before the first, the expected one.
        backward: what backward passes exchange.
        landing: of what a round exchanges, in the round or later.
    """

    def __init__(self, membership: Membership, replica: Replica, checkpoints: Checkpoints, step: Step) -> None:
        self.stopwatch, self.logged = Stopwatch(), Logged()
        self.election = ElectionInput(membership, replica, self.stopwatch, checkpoints.resumed)
        self.grants = GrantClient(membership, self.election, self.stopwatch)
        self.groups, self.download = Groups(membership), Download(replica)
        self.active: ActiveRound | None = None
        self.last, self.landing = LastRounds(), Landing(replica)
        rank, world_size = membership.welcome.rank, membership.welcome.world_size
        self.seat = Seat(rank, world_size, (rank, world_size))
        self.backward = BackwardPasses(replica.flat, replica.ddp, self._complete_gradients)
        self._membership = membership
        self._replica, self._checkpoints, self._step = replica, checkpoints, step
        traffic = self.groups.traffic
        self._island.passed = lambda: (traffic.sent_nbytes, traffic.received_nbytes)
        membership.channel.signs.totals = self._totals

    @property
    def _who(self) -> tuple[str, int]:
        return self._membership.who

    @property
    def _island(self) -> Island:
        return self._membership.island

    @property
    def pending(self) -> bool:
        """Whether a round waits for the backward pass."""
        return self.active is not None and self.active.pending

    @property
    def skips(self) -> bool:
        """Whether all members skip the step under way, because a gradient is not finite."""
        return self.active is not None and self.active.skipped

    @property
    def has_consensus(self) -> bool:
        """Whether the last round computed the run's consensus."""
        return self.active is not None and self.active.order.final and self.active.state is State.COMMITTED

    @property
    def final_members(self) -> tuple[str, ...]:
        """The names of those that have made the run's consensus, in rank order; empty before that."""
        return self.active.order.generation.members if self.active is not None and self.has_consensus else ()

    def timings(self) -> Timings:
        """Return the totals until now; safe from any thread."""
        traffic = self.groups.traffic
        return Timings(self.grants.done, *self.stopwatch.seconds(), traffic.sent_nbytes, traffic.received_nbytes)

    def _totals(self) -> Totals:
        """Return the totals for heartbeats, with the bytes of all processes of the island, and the transfer."""
        transfer = self.download.progress(self.groups.current)
        return *self.stopwatch.seconds(), *self._island.total_passed(), self.logged.numbers, transfer

    # -- from the order to its end -----------------------------------------------------------------------------

    def follow(self, *, redo: bool = False) -> bool:
        """Ask until an answer's round is carried out; return whether an iteration may run, or the run has ended.

        With ``redo`` the round exchanges the gradients of a backward pass that has ended. Raises a NoConsensusError if
        the run has ended without a consensus.
        """
        return not isinstance(self._follow(redo=redo), Stop)

    def _follow(self, *, redo: bool = False) -> Go | Stop | Met | None:
        """Do as :meth:`follow` does, and return the answer; None: an iteration was granted ahead."""
        while True:
            lockstep = self._replica.lockstep
            compares = self._island.replicas and (not lockstep or self.last.committed % ALIGN_EVERY == 0)
            look = partial(self._replica.look, compares=compares) if self._island.size > 1 else None
            decision = self.grants.next(self.last.numbers, lockstep=lockstep, look=look, again=redo)
            answer = decision.answer
            if answer is None or isinstance(answer, Met):
                return answer
            order = answer.round
            if order is not None:
                if order.id <= self.last.dropped:
                    continue
                try:
                    self.carry_out(order, redo=redo, looks=decision.looks)
                except ExchangeError as error:
                    # The servers count failed rounds, and end the run if too many fail.
                    logger.warning("round %d failed, the model is as before: %s; asking again", order.id, error)
                    continue
            if isinstance(answer, Stop) and answer.failed:
                self.grants.ending = answer
                raise NoConsensusError(f"{self._who[0]} has no consensus at the end of the run: {answer.reason}")
            self.grants.take(answer)
            if isinstance(answer, Stop) or not self.grants.lacking:
                return answer
            self.grants.give_back()  # this worker cannot train before it has the whole model

    def ask_ahead(self) -> None:
        """If few iterations are left, ask for more without waiting; in lockstep, each waits for its round."""
        if not self._replica.lockstep:
            self.grants.ask_ahead(self.last.numbers)

    def finish(self, within_s: float | None) -> None:
        """Carry out rounds without iterations until the others have what this worker has learned, or to the run's last.

        They have it after a global round, or after one of each part of the model.

        Args:
            within_s: how long to wait for the run's last round, and take part in it; None: leave before.
        """
        heard, ends, waits = set[int](), False, within_s is not None
        while not ends:
            schedule, before = self._replica.algorithm.settings.schedule(), self.last.committed
            is_known = schedule.identical or len(heard) >= schedule.parts
            self.grants.ask_for(wants.End() if waits and is_known else wants.Round(), within_s=within_s)
            continues = self.follow()
            self.before_step()  # some algorithms exchange here
            if self.active is not None and self.active.order.scope == "global" and self.last.committed > before:
                heard.add(self.active.order.exchanges % schedule.parts)
            ends = not continues or (len(heard) >= schedule.parts and not waits)
        if not self.has_consensus:
            self._land_before_leaving()
            logger.info(
                "%s leaves after %d iterations: the run continues without it, and its model is not the consensus, but "
                "that of round %d",
                *(self._who[0], self.grants.done, self.last.committed),
            )

    def meet(self, numbers: dict[str, float], *, aside: bool) -> Met | None:
        """Carry out rounds, without iterations, until all workers make this call; None: the run has ended before.

        ``aside``: the weights in the model are not the trained ones, so rounds are to continue without them.
        """
        call = self.grants.call(numbers, aside=aside)
        with on_error(lambda: self.grants.ask_for(wants.STEP)):
            while True:
                self.grants.ask_for(call)
                answer = self._follow()
                if not isinstance(answer, Go):
                    assert answer is not None  # nothing is granted ahead
                    return answer if isinstance(answer, Met) else None
                self.before_step()

    @torch.no_grad()
    def carry_out(self, order: Round, *, redo: bool = False, looks: Sequence[Look] = ()) -> None:
        """Carry out a round; if the backward pass completes it, up to there. ``redo``, ``looks``: :class:`ActiveRound`.

        Raises:
            ExchangeError: it failed and was dropped; the model is as before.
        """
        order, before = self.groups.whole(order), self.active
        again = redo and before is not None and before.order.count == order.count
        snapshot = before.snapshot if again and before is not None else None  # there is none in the middle of a step
        self.active = ActiveRound(order, snapshot, redo=redo, looks=looks)
        self._run(self.active, PHASES)

    def _run(self, active: ActiveRound, phases: Iterable["Phase"]) -> None:
        """Carry out phases of a round: vote on what each has exchanged, and commit that, or drop the round.

        It is dropped, too, if an error of the script's own ends it, or Ctrl-C: the group is in the middle of it. The
        script may handle the error, and then asks again.
        """
        with self.stopwatch.spending("exchange"):
            try:
                for phase in phases:
                    if (commit := phase(self, active)) is not None:
                        self._agree(commit)
            except ExchangeError as error:
                self.drop(str(error), error.broken if isinstance(error, BrokenLinksError) else ())
                self._agree(error)
                raise
            except LsgdError:
                raise
            except BaseException as error:
                if active.state not in (State.COMMITTED, State.DROPPED):
                    self.drop(type(error).__name__)
                raise

    def _land_before_parting(self, active: ActiveRound) -> None:
        """If members change, land what those of the last generation have exchanged, unless it has failed."""
        self._replica.flat.reshard()
        if active.order.generation == self.groups.generation or self._replica.algorithm.spans_backward:
            return  # what spans the backward pass has landed with its round, or was dropped
        self._land_before_leaving()

    def _form(self, active: ActiveRound) -> None:
        """Form the group of the members."""
        active.group, active.fresh = self.groups.group_of(active.order)

    def _equalize(self, active: ActiveRound) -> None:
        """Land what the last round has exchanged, and give an island's replicas one model, if they may differ."""
        if not active.fresh:
            self._settle()
        compared = [look for look in active.looks if look.prints]
        anew = active.fresh or bool(active.order.new) or not self._replica.lockstep
        if self._island.replicas and (compared or anew):
            self._replica.align(self._island, active.members, compared, self._add_up)

    def _judge_averaged(self, active: ActiveRound) -> Commit | None:
        """Look whether the model is finite that is to be averaged."""
        return self._look(active) if active.order.averaged else None

    def _average(self, active: ActiveRound) -> Commit | None:
        """After the phase of a plan that ends, average the models: the one that begins may copy one."""
        order = active.order
        if not order.averaged:
            return None
        return self._replica.average(active.members, order, finite=not active.model_is_broken)

    def _take_up(self, active: ActiveRound) -> Commit | None:
        """Take up the algorithm, give newcomers the model, and look at the one that enters the round."""
        group, order = active.members, active.order
        anew = self.download.begin(group, order, fresh=active.fresh)
        if group.rank in order.new and group.rank != order.source:
            self._say_lost()
        active.to(State.ENTERED)
        if anew or order.new or order.final or not active.looks:
            return self._look(active)
        if (finite := active.looked_finite()) is not None:
            active.finite_model = torch.tensor(finite, device="cpu")
        return None

    def _agree_on_consensus(self, active: ActiveRound) -> Commit | None:
        """In the last round, make the consensus."""
        if not active.order.final:
            return None
        own = self.download.has_own(active.members.rank, active.order)
        return self._replica.consensus(active.members, active.order, finite=not active.model_is_broken, own=own)

    def _snapshot(self, active: ActiveRound) -> None:
        """Copy to memory what the checkpoint is to have, if one is due."""
        if not active.redo or active.order.final:
            self._checkpoints.data.restore_random()
            saves = active.order.checkpoint and not active.lacking
            active.snapshot = self._take(active.order.count) if saves else None

    def _exchange(self, active: ActiveRound) -> Commit | None:
        """Exchange what is exchanged before the forward pass, or begin to."""
        order, replica = active.order, self._replica
        if order.final:
            return None
        active.buffers = replica.exchange_buffers(active.members, order)
        commit = replica.exchange(active.members, order, active.finite_model)
        if replica.algorithm.spans_backward:
            return None
        return self.landing.of(active, commit)

    def _follow_order(self, active: ActiveRound) -> None:
        """Take the rank and the part of the data that this worker has among the members."""
        self.backward.serve(self._replica.algorithm)
        self.seat = Seat.of(self._who[0], active.order.generation)
        if self.grants.done:
            self.election.warn(elects=self.seat.world_size > 1 and self._replica.elects)

    def _exchange_again(self, active: ActiveRound) -> Commit | None:
        """Exchange the gradients of a backward pass that has ended, and whose round was dropped."""
        again = active.redo and not active.order.final
        return exchange.again(active) if again and (exchange := self.backward.exchange) is not None else None

    def _report(self, active: ActiveRound) -> None:
        """Complete a round whose exchange is committed, or let the backward pass do so."""
        exchanges = self._replica.algorithm.spans_backward and not active.order.final
        if exchanges and active.state is State.ENTERED:
            active.to(State.WAITING)
        else:
            self._complete(active)

    # -- in these phases ---------------------------------------------------------------------------------------

    def _say_lost(self) -> None:
        """Say what a worker that has missed rounds loses, unless the algorithm has a common model to add it to."""
        settings, lost = self._replica.algorithm.settings, self.grants.done - self.last.done
        schedule = settings.schedule()
        if self.last.committed and lost and not (schedule.identical or schedule.common):
            logger.info(
                "%s has missed a round, and comes back with another worker's model: %s has no place for the %d "
                "iterations that it has made since round %d, so they are lost, and do not count",
                *(self._who[0], settings.name, lost, self.last.committed),
            )

    def _land_before_leaving(self) -> None:
        try:
            self._settle()
        except ExchangeError as error:
            logger.info("the exchange before the members changed has failed: %s", error)
            self._agree(error)

    def _settle(self) -> None:
        """Land what is pending, or drop it in all processes."""
        try:
            self._land(self._replica.moving(self._replica.algorithm.settle(self._replica.flat.buffers)))
        except ExchangeError:
            self._replica.algorithm.drop_pending()
            raise

    def _look(self, active: ActiveRound) -> Commit | None:
        """Look whether the model that enters the round is finite; only the processes of an island wait for that."""
        whole = self._island.size == 1
        finite = self._replica.judge(active.order, whole=whole)
        if whole:
            active.finite_model, active.lacking = finite, self.download.has is Has.PARTS
            return None
        broken = False if finite is None else ~finite
        return Commit(active.enter, (finite is None, broken, self.download.has is Has.PARTS))

    def arm(self, *, begun: bool) -> None:
        """Let backward passes exchange gradients inside a step, but not between two steps."""
        self.backward.arm(self.active if begun else None, self._replica.algorithm)

    def before_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Before an optimizer's step, complete the round, or skip the step if the exchanged values are non-finite.

        A skipped step drops the gradients of its ``optimizer``; None: of all.

        Raises:
            LsgdError: the algorithm exchanges gradients, but no backward pass did.
        """
        active = self.active
        if active is None:
            return
        if not active.finite and not active.skipped:
            logger.warning("%s: a member's gradient is non-finite; all members skip this step", self._who[0])
            active.skipped = True
        if active.skipped:
            self._replica.drop_gradients(optimizer)
        if not active.pending:
            return
        if self.backward.exchange is not None:
            raise LsgdError(
                f"{self._who[0]}: optimizer.step() before the gradients were exchanged: no backward pass ran in this "
                f"iteration, or all ran inside worker.no_sync(), or the model's parameters were replaced in it"
            )
        try:
            self._run(active, AFTER_BACKWARD)
        except ExchangeError as error:
            logger.warning("round %d failed, the model is as before: %s", active.order.id, error)

    def _await_models(self, active: ActiveRound) -> Commit:
        """Complete an exchange of models that training has hidden."""
        replica = self._replica
        commit = replica.algorithm.after_backward(replica.flat.buffers, (), active.members, active.order)
        return replica.moving(commit) or Commit()

    def _await_gradients(self, active: ActiveRound) -> Commit:
        """Wait for the exchange of gradients."""
        assert self.backward.exchange is not None
        return self.backward.exchange.wait(active)

    def after_step(self) -> None:
        """Call the algorithm's ``after_step``, and land the transfer that may have arrived."""
        with self.stopwatch.spending("exchange"):
            try:
                self._land(self._replica.after_step())
            except ExchangeError as error:  # it stays pending, so the next round fails too, and says why
                self._agree(error)

    def _land(self, commit: Commit | None) -> None:
        """Commit a transfer that began in an earlier round, if one has arrived."""
        if commit is not None:
            self._agree(self.landing.late(commit))

    def _agree(self, outcome: Commit | ExchangeError) -> list[float]:
        """Vote on this process's part of an exchange; if it has succeeded in all processes of the worker, commit it.

        Returns the sums of what they have judged.

        Raises:
            ExchangeError: it has succeeded here, but not in another process.
        """
        sums = self._island.vote(outcome.numbers() if isinstance(outcome, Commit) else outcome)
        if isinstance(outcome, Commit):
            outcome.apply(sums)
        return sums

    def _add_up(self, judged: Sequence[float]) -> list[float]:
        return self._agree(Commit(judged=judged))

    def drop(self, reason: str, broken: tuple[int, ...] = ()) -> None:
        """Drop the round in progress and its group: the servers order another one.

        They hear the reason before the group is cut, and so before the others say that this worker has left it.
        ``broken`` are pairs of ranks that cannot reach each other, as a flat list.
        """
        assert self.active is not None
        self.active.to(State.DROPPED)
        self.backward.forget()
        self.last.dropped = self.active.order.id
        self._say_missed(self.active.order)
        self._membership.channel.send(Failed(*self._who, self.active.order.id, reason, broken))
        self.groups.leave(cut=True)

    def drop_torn(self) -> None:
        """Drop the round of a backward pass that an error has ended in the middle, which the script has handled."""
        if self.backward.exchange is not None and self.active is not None and self.active.state is State.EXCHANGING:
            self.drop("its backward pass ended with an error")

    def _complete(self, active: ActiveRound) -> None:
        """Complete a round whose exchange is committed: save the checkpoint, and tell the servers."""
        active.buffers.apply()
        active.to(State.COMMITTED)
        order = active.order
        self.grants.lacking = active.lacking
        self.last.commit(order, self.grants.done)
        self.download.proceed()  # newcomers wait for what this member sends, not for its disk
        if order.checkpoint and not active.lacking:
            self._checkpoints.save(active.snapshot)
            active.snapshot = None  # it copies the model and all states
        sent_nbytes, _ = self._island.total_passed()
        self._say_missed(order)
        transfer_s = 0.0
        if order.scope == "global":
            transfer_s, algorithm = self.landing.take_s(), self._replica.algorithm
            by_layer = algorithm.agreements.items() if self.seat.rank == 0 else ()  # they are equal on all members
            self.logged.note({AGREEMENT: algorithm.agreement, **{f"{AGREEMENT}/{name}": x for name, x in by_layer}})
        self._membership.channel.send(Completed(*self._who, order.id, sent_nbytes, active.lacking, transfer_s))

    def _say_missed(self, order: Round) -> None:
        """Tell the servers which nodes cannot dial each other, if this round has found that out."""
        if self.groups.missed is not None:
            self._membership.channel.send(Probed(*self._who, order.id, self.groups.missed))
            self.groups.missed = None

    def _complete_gradients(self) -> None:
        """At the end of a backward pass, wait for the exchange; if it failed, exchange the gradients again."""
        active = self.active
        assert active is not None
        try:
            self._run(active, AFTER_GRADIENTS)
        except ExchangeError as error:
            failed = active.order.id
            logger.warning("round %d failed: %s; its gradients will be exchanged again", failed, error)
            with self.saving():
                if not self.follow(redo=True):  # before_step drops the gradients: a GradScaler looks at them first
                    assert self.active is not None
                    self.active.skipped = True
                    self._step.advance(Event.STOP)

    # -- the worker's state ------------------------------------------------------------------------------------

    def _take(self, count: int) -> Snapshot | None:
        return self._checkpoints.take(count, self._replica.algorithm, self.election.losses.values, self.grants.done)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """If the servers or the consensus are lost inside, save this worker's state, and add where to the error."""
        try:
            yield
        except EvictedError:
            raise
        except (ServerLostError, JoinError, NoConsensusError) as error:
            if not hasattr(error, "__notes__"):  # the channel may raise one error several times
                error.add_note(self._keep())
            raise

    def _keep(self) -> str:
        """Save the state as that of the last global round; return the words for where."""
        if self._checkpoints.folder is None:
            return "its state is not saved: no folder was given"
        if self.download.has is Has.PARTS:
            return "its state is not saved, because it lacks parts of the run's model"
        if not self.last.count:
            last = self._checkpoints.last()
            instead = f"resume from {last} with lsgd launch --resume" if last else "begin a new run"
            return f"its state is not saved, because no global round came after an iteration: {instead}"
        path = self._checkpoints.save(self._take(self.last.count))
        if not self._checkpoints.writes:
            return "the head of its island saves its state"
        if path is None:
            return "its state cannot be saved"
        return (
            f"its state is saved in {path}; when the servers can run again, resume from it with lsgd launch --resume "
            f"(RESUME=1 bash scripts/train.sh)"
        )


Phase: TypeAlias = Callable[[Rounds, ActiveRound], Commit | None]
"""A part of a round. What it returns is committed if the part has succeeded in all processes of the worker."""

PHASES: Sequence[Phase] = (
    Rounds._land_before_parting,
    Rounds._form,
    Rounds._equalize,
    Rounds._judge_averaged,
    Rounds._average,
    Rounds._take_up,
    Rounds._agree_on_consensus,
    Rounds._snapshot,
    Rounds._exchange,
    Rounds._follow_order,
    Rounds._exchange_again,
    Rounds._report,
)
"""A round, from the servers' order to the report, or to where the backward pass completes it."""

AFTER_BACKWARD: Sequence[Phase] = (Rounds._await_models, Rounds._report)
"""Its rest, if models are exchanged beside the forward and the backward pass."""

AFTER_GRADIENTS: Sequence[Phase] = (Rounds._await_gradients, Rounds._report)
"""Its rest, if gradients are exchanged."""
