"""What rounds change on a worker: its model, its optimizers, and the state of the algorithm; and how they do."""

import io
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lsgd.algorithms.averaging import contribute, divide, empty_sums
from lsgd.algorithms.base import Algorithm, Commit, all_finite, clones, finiteness
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.checkpoint.finite import clear, tensors_in
from lsgd.client.control.island import Island
from lsgd.client.control.joining import Membership
from lsgd.client.control.replicas import fingerprints
from lsgd.client.groups.base import WorkerGroup
from lsgd.client.iteration.copies import WeightCopies
from lsgd.client.iteration.current import CurrentAlgorithm
from lsgd.client.iteration.trained import Trained
from lsgd.errors import ExchangeError, LsgdError
from lsgd.flat import FlatParameters, written, written_buffers
from lsgd.protocol.messages import Round
from lsgd.shards import full_state_dict, load_optimizer, local, local_state

logger = logging.getLogger("lsgd")

LEFT_OUT = "this worker's model is non-finite: the average leaves it out"

MOST_APART = 1e-3
"""How far apart the replicas of an island may be before a round, as a share of their length."""


class Look(NamedTuple):
    """What a process of an island finds in its part of the model before a round.

    Attributes:
        finite: whether the parameters are finite; None: the round need not know.
        prints: the tensors' fingerprints, to compare replicas; empty: the round does not compare them.
    """

    finite: bool | None
    prints: Sequence[int] = ()


class Replica:
    """One worker's copy of what the run trains.

    Args:
        checkpoints: source of the buffers to average, of what newcomers take beside the model, and of the resumed
            algorithm's state, with which the first round starts if its algorithm has the same form.
        ddp: what reduces the model's gradients inside this worker; None: nothing does.

    Attributes:
        current: takes up the algorithm of the current phase.
        trained: what of the model is trained.
        copies: the optimizers' copies of the weights.
        consensus_distance: models' mean distance from their average just before the consensus; None until then.
        leader_model: leader's flat parameters, then buffers, just before the consensus; empty until then, and if
            the plan elects none.
    """

    def __init__(
        self,
        membership: Membership,
        flat: FlatParameters,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        checkpoints: Checkpoints,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        self.ddp = ddp
        self.run = membership.plan.run
        self.flat = flat
        self.model = model
        self.optimizers = list(optimizers)
        self.copies = WeightCopies(self.optimizers)
        self.finite = checkpoints.finite
        self.extras = checkpoints.extras
        run, shard = membership.welcome.run, membership.island.shard
        run = f"{run}/{shard}" if shard else run  # each shard has its own seeds for rounding
        resumed = checkpoints.resumed.take_algorithm()
        self.current = CurrentAlgorithm(membership.plan.algorithm, flat, self.optimizers, run, resumed)
        self.trained = Trained(flat, self.optimizers, self.copies)
        self.consensus_distance: float | None = None
        self.leader_model: list[Tensor] = []
        self._aligned = False  # parameters, which is said once

    @property
    def algorithm(self) -> Algorithm:
        """The current phase's algorithm."""
        return self.current.algorithm

    @property
    def lockstep(self) -> bool:
        """Whether every iteration is a round."""
        return self.algorithm.settings.schedule().lockstep

    @property
    def elects(self) -> bool:
        """Whether elected workers give others something of their models."""
        return self.run.leads(self.algorithm.settings)

    def clear(self) -> None:
        """Drop what would break the model again, after a round has replaced one that was not finite."""
        self.copies.mend()
        clear(self.optimizers)
        self.drop_gradients()

    def drop_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop all gradients, or an optimizer's, so that its step changes nothing: a GradScaler looks at the others."""
        if optimizer is None:
            parameters = [slot.parameter for slot in self.flat.slots]
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def leader_state_dict(self) -> dict[str, Tensor] | None:
        """Return the leader's model just before the consensus, as :func:`full_state_dict` does.

        None until then, and if the plan elects no leaders.
        """
        if not self.leader_model:
            return None
        self.flat.find()
        tensors = [*self.flat.buffers, *self.finite.buffers()]
        own = clones(tensors)
        put(tensors, self.leader_model)
        state = full_state_dict(self.model)
        self.flat.reshard()
        put(tensors, own)
        return state

    # -- in an island ------------------------------------------------------------------------------------------

    def look(self, *, compares: bool) -> Look:
        """Return what this process finds in its part of the model before a round; ``compares``: also fingerprints."""
        finite = None
        if not isinstance(self.algorithm, GradientAlgorithm):
            finite = all_finite(self.flat.tensors())
        return Look(finite, self._fingerprints() if compares else ())

    def _fingerprints(self) -> list[int]:
        return fingerprints(self._mirrored())

    def _mirrored(self) -> list[Tensor]:
        """Return what is equal in all replicas: the parameters, then the buffers."""
        return [*self.flat.tensors(), *written_buffers(self.model)]

    def align(
        self, island: Island, group: WorkerGroup, looks: Sequence[Look], add: Callable[[Sequence[float]], list[float]]
    ) -> None:
        """Give all processes of an island of replicas the head's model where they differ.

        Buffers do, because each process has its own statistics of batches. Parameters only do if a kernel is not
        deterministic, or if DDP does not average the gradients. Then they get its optimizers' states, too.

        Args:
            island: the processes.
            group: the round's.
            looks: of all processes, with fingerprints; empty: they compare theirs with the head's now.
            add: returns the sums over the processes of the numbers that each has.

        Raises:
            ExchangeError: the head has failed, or another process.
            LsgdError: the processes have trained apart.
        """
        tensors, parameters = self._mirrored(), len(self.flat.tensors())
        if looks:
            differs = [float(len({*each}) > 1) for each in zip(*(look.prints for look in looks), strict=True)]
        else:
            own = torch.tensor(fingerprints(tensors), dtype=torch.int64, device="cpu")
            group.take_heads([heads := own.clone()])
            differs = add((own != heads).tolist())
        differ = [index for index, number in enumerate(differs) if number]
        before = clones([tensors[index] for index in differ])
        group.take_heads([tensors[index] for index in differ])
        changed = [(was, tensors[index]) for was, index in zip(before, differ, strict=True) if index < parameters]
        if not changed:
            return
        distance = max(_relative(was, now) for was, now in changed)
        apart = max(add([distance * (rank == island.rank) for rank in range(island.size)]))
        if apart > MOST_APART:
            raise LsgdError(
                f"the processes of this island have trained apart, by {apart:.2g} of their models' length: "
                f"DistributedDataParallel averages their gradients only if the loop calls it, not the module inside; "
                f"and all must make the same steps"
            )
        group.take_heads([x for optimizer in self.optimizers for x in tensors_in(optimizer)])
        if not self._aligned:
            self._aligned = True
            logger.warning(
                "the processes of this island have computed different models, by %.2g of their length, as kernels do "
                "that are not deterministic: from now on, rounds give all of them the head's",
                apart,
            )

    # -- for newcomers -----------------------------------------------------------------------------------------

    def newcomers_parts(
        self, states: Sequence[Tensor], *, any_: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Return what newcomers take, not copied: what changes in every step, what never does, the shared state.

        Without newcomers (``any_``), only the last counts. ``states`` are those of the optimizers.
        """
        if not any_:
            return [], [], self.algorithm.shared_state()
        flat = [] if self.algorithm.common_model() else self.flat.tensors()
        frozen = [part for x in self.flat.frozen for part in written(local(x))]
        return [*flat, *written_buffers(self.model), *states], frozen, self.algorithm.shared_state()

    def own(self) -> list[Tensor]:
        """Return what rounds change of the model and of the algorithm's shared state, not copied."""
        return [*self.flat.buffers, *written_buffers(self.model), *self.algorithm.shared_state()]

    def take_states(self, states: Sequence[Tensor]) -> None:
        """Take over the optimizers' states from files as :meth:`optimizer_bytes` returns, if any."""
        for data in states:
            stream = io.BytesIO(data.numpy().tobytes())
            try:
                # Loading moves it to the parameters, but for counts of steps, which would hold up a GPU there.
                loaded = torch.load(stream, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise LsgdError(
                    f"an optimizer's state has something that is neither a tensor nor a number, so another worker "
                    f"cannot take it over; keep it elsewhere: {str(error).splitlines()[0]}"
                ) from None
            try:
                for optimizer, state in zip(self.optimizers, loaded, strict=True):
                    load_optimizer(optimizer, state)
            except (ValueError, KeyError) as error:
                raise LsgdError(
                    f"this worker's optimizers do not fit those whose state it takes over: {error}; join with the same "
                    f"optimizers on all workers, and with all parameter groups from the start (a group can train later "
                    f"by lr=0 until then)"
                ) from None

    def optimizer_bytes(self) -> Tensor:
        """Return the optimizers' states as a file, uint8: the same bytes on members with the same states."""
        stream = io.BytesIO()
        torch.save(local_state([optimizer.state_dict() for optimizer in self.optimizers]), stream)
        return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)

    # -- in a round --------------------------------------------------------------------------------------------

    def judge(self, order: Round, *, whole: bool) -> Tensor | None:
        """Return whether the model that enters a round is finite; None: the round need not know.

        This is the round's only look at the model, unless that changes in it. Of an island it is this process's part,
        and only a ``whole`` worker leaves the look to the algorithm.
        """
        if order.averaged:
            return finiteness(self.flat.buffers)
        if order.final:
            return finiteness([*self.flat.buffers, *map(wide, self.finite.buffers()), *self.copies.tensors()])
        if isinstance(self.algorithm, GradientAlgorithm) or (whole and (self.lockstep or order.scope == "local")):
            return None
        return finiteness(self.flat.buffers)

    def exchange(self, group: WorkerGroup, order: Round, finite: Tensor | None) -> Commit | None:
        """Let the algorithm exchange a model that is ``finite`` or not, or begin to; return its commit.

        Raises:
            ExchangeError: it failed.
        """
        self.algorithm.finite = finite
        commit = self.algorithm.before_forward(self.flat.buffers, group, order)
        self.algorithm.finite = None
        return self.moving(commit)

    def after_step(self) -> Commit | None:
        """Let the algorithm act after a step; return the commit of an exchange that it completes.

        Raises:
            ExchangeError: that failed.
        """
        if not self.algorithm.acts_after_step:
            return self.moving(self.algorithm.after_step(self.flat.buffers))
        self.flat.find()
        with self.copies.following():
            commit = self.algorithm.after_step(self.flat.buffers)
        return self.moving(commit)

    def moving(self, commit: Commit | None) -> Commit | None:
        """Return a commit of the algorithm's that also lets the optimizers' copies of the weights follow.

        Where it replaces a model that was not finite, the optimizers' states and the gradients would break it again.
        """
        if commit is None:
            return None

        def change(*sums: float) -> None:
            with self.copies.following():
                commit.change(*sums)
            if self.algorithm.replaced:
                self.clear()

        return Commit(change, commit.judged)

    def exchange_buffers(self, group: WorkerGroup, order: Round) -> Commit:
        """Exchange the model's floating-point buffers as the plan says; return the commit.

        Raises:
            ExchangeError: it failed.
        """
        buffers = self.finite.buffers()
        # In lockstep, every iteration is a round, and averaging them in the consensus is enough.
        if order.scope == "local" or self.run.buffers == "keep" or not buffers or group.size == 1 or self.lockstep:
            return Commit()
        flat = torch.cat([wide(b) for b in buffers])
        try:
            return self._exchange_flat(group, order, buffers, flat)
        except ExchangeError as error:
            if not (reshaped := self.finite.reshaped()):
                raise
            raise ExchangeError(
                f"the model's buffers have changed since Worker.join: {reshaped}; all workers need the same shapes, so "
                f"make them before the join, or set buffers to keep ({error})"
            ) from error

    def _exchange_flat(self, group: WorkerGroup, order: Round, buffers: list[Tensor], flat: Tensor) -> Commit:
        finite, usable = torch.tensor(True, device="cpu"), torch.tensor(True, device="cpu")
        if self.run.buffers == "leader":
            group.broadcast(flat, order.leader)
            usable = finiteness([flat])  # of the leader, so all decide alike
        else:
            (total,) = sums = empty_sums([flat])
            finite = finiteness([flat])
            contribute([flat], sums, finite)
            group.all_reduce(total).wait()
            flat, usable = total[:-1], divide(sums, group.size)

        def change(broken: float, usable: float) -> None:
            if broken:
                logger.warning(LEFT_OUT)
            if not usable:
                logger.warning("no finite buffers have come: each worker keeps its own")
            else:
                put(buffers, torch.split(flat, [b.numel() for b in buffers]))

        return Commit(change, (~finite, usable))

    def average(self, group: WorkerGroup, order: Round, *, finite: bool) -> Commit:
        """Return the commit that replaces every model by the average of the round's ``averaged`` members.

        A model that is not ``finite``, or that the algorithm leaves out, does not contribute.

        Raises:
            ExchangeError: it failed.
        """
        own = [wide(x) for x in self.flat.buffers]
        means, _ = _means(own, group, counts=finite and group.rank in order.averaged and self.algorithm.counts)

        def change() -> None:
            with self.copies.following():
                put(self.flat.buffers, means)
            if not finite:
                self.clear()

        return Commit(change)

    def consensus(self, group: WorkerGroup, order: Round, *, finite: bool, own: bool) -> Commit:
        """Return the commit that replaces every model by the average of all, or by the leader's.

        It records how far apart the models were. Each process of an island does so with its part. A model that is not
        ``finite`` or not this worker's ``own``, or that the algorithm leaves out, does not contribute to the average,
        and as a leader's, it does not replace the others'. The optimizers' copies of the weights are averaged with
        them. Integer buffers, such as batch norm's counts, become those of rank 0, or the leader's.

        Raises:
            ExchangeError: it failed.
        """
        parameters, buffers = self.flat.buffers, self.finite.buffers()
        anywhere = _anywhere([place.copy is not None for place in self.copies.places()], group)
        copies = self.copies.averaged(anywhere)
        rows = [wide(x) for x in (*parameters, *buffers)]
        models = len(rows)
        rows += [torch.cat([wide(x) for x in copies])] if copies else []
        led = of_member(order.leader, rows, group) if self.elects else []
        if not finite:
            logger.warning(LEFT_OUT)
        means, counted = _means(rows, group, counts=finite and own and self.algorithm.counts)
        if not any(counted):
            means = led or of_member(order.leader, rows, group)
        follows = self.run.consensus == "leader"
        if follows and any(counted) and not counted[order.leader]:
            logger.warning("the model of the leader, rank %d, does not count: the average replaces it", order.leader)
            follows = False
        chosen, counters = led if follows else means, self.finite.counters()
        counted_by_all = of_member(order.leader if follows else 0, counters, group)

        def change(*squares: float) -> None:
            self.consensus_distance, self.leader_model = _distance(squares), led[:models]
            put([*parameters, *buffers, *counters], [*chosen[:models], *counted_by_all])
            for kept in chosen[models:]:
                self.copies.take(anywhere, torch.split(kept, [x.numel() for x in copies]))
            if not finite:
                self.clear()

        return Commit(change, _squares(rows[: len(parameters)], means[: len(parameters)], group))


def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to tensors of the same sizes; shapes may differ."""
    for x, value in zip(tensors, values, strict=True):
        x.copy_(value.view(x.shape))


def of_member(rank: int, tensors: Sequence[Tensor], group: WorkerGroup) -> list[Tensor]:
    """Return a member's tensors."""
    copies = [x.clone() for x in tensors]
    for x in copies:
        group.broadcast(x, rank)
    return copies


def _anywhere(here: Sequence[bool], group: WorkerGroup) -> list[bool]:
    """Return what is true on a member, from what is true on this one."""
    found = torch.tensor(here, dtype=torch.float32, device=group.device)
    if here:
        group.all_reduce(found).wait()
    return [bool(each) for each in found.tolist()]


def _means(own: list[Tensor], group: WorkerGroup, *, counts: bool) -> tuple[list[Tensor], list[bool]]:
    """Return the means over the members that count, or this one's tensors if none does; and who counts, by rank."""
    said = torch.zeros(group.size, device=group.device)
    said[group.rank] = float(counts)
    group.all_reduce(said).wait()
    counted = [bool(each) for each in said.tolist()]
    if not any(counted):
        return own, counted
    means = [x / sum(counted) if counts else torch.zeros_like(x) for x in own]
    for x in means:
        group.all_reduce(x).wait()
    return means, counted


def _relative(was: Tensor, now: Tensor) -> float:
    """Return |was - now| / |now|, or 0 if one is not finite."""
    distance = float(torch.linalg.vector_norm(wide(was) - wide(now)) / torch.linalg.vector_norm(wide(now)))
    return distance if math.isfinite(distance) else 0.0


def wide(x: Tensor) -> Tensor:
    """Return ``x`` as one row, in float32 or wider."""
    return x.reshape(-1).to(torch.float32 if x.element_size() < 4 else x.dtype)  # torch promotes no 8-bit floats


def _squares(own: Sequence[Tensor], means: Sequence[Tensor], group: WorkerGroup) -> list[float]:
    """Return |x - mean|² of each member and |mean|² of all, for this process's part; equal on all members."""
    squares = torch.zeros(group.size + 1, dtype=torch.float64, device=group.device)
    squares[group.rank] = sum(float((x - mean).square_().sum()) for x, mean in zip(own, means, strict=True))
    squares[-1] = sum(float(mean.square().sum()) for mean in means) / group.size
    group.all_reduce(squares).wait()
    return squares.tolist()


def _distance(squares: Sequence[float]) -> float:
    """Return the mean of |x - mean| / |mean| over the members whose model is finite."""
    *apart, length = squares
    distances = [math.sqrt(each / length) for each in apart if length and math.isfinite(each / length)]
    return sum(distances) / len(distances) if distances else 0.0
