"""Workers and their Group as threads of one process: for tests, and for more workers than cores.

docs/contributing/extending.md has an example.
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from lsgd.algorithms.base import Commit, is_muon
from lsgd.collectives.group import Group, Transfer
from lsgd.collectives.topology import first_ranks, node_ranks
from lsgd.election import standing, usual_loss
from lsgd.errors import ConfigError, ExchangeError
from lsgd.flat import FlatParameters, floating_buffers
from lsgd.probe import probe_loss
from lsgd.protocol.messages import Generation, Round
from lsgd.settings import AlgorithmSettings, Schedule

T = TypeVar("T")


class _Mail:
    """Tensors in transit between members: a queue for each sender and receiver, so that only the receiver wakes."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._boxes: dict[tuple[str, int, int], SimpleQueue[Tensor | None]] = {}  # None: nothing more comes
        self._failure = ""

    def send(self, name: str, source: int, target: int, tensor: Tensor) -> None:
        self._box(name, source, target).put(tensor.detach().clone())

    def receive(self, name: str, source: int, target: int, out: Tensor) -> None:
        box = self._box(name, source, target)
        try:
            tensor = box.get(timeout=self._timeout_s)
        except Empty:
            raise ExchangeError(f"rank {source} sent nothing to rank {target} for {self._timeout_s:g} s") from None
        if tensor is None:
            box.put(None)
            raise ExchangeError(self._failure)
        if tensor.shape != out.shape or tensor.dtype != out.dtype:
            raise AssertionError(
                f"{source} sent {tensor.shape} {tensor.dtype}, {target} expects {out.shape} {out.dtype}"
            )
        out.copy_(tensor)

    def fail(self, reason: str) -> None:
        with self._lock:
            self._failure = reason
            for box in self._boxes.values():
                box.put(None)

    def _box(self, name: str, source: int, target: int) -> "SimpleQueue[Tensor | None]":
        with self._lock:
            if (place := (name, source, target)) not in self._boxes:
                box = self._boxes[place] = SimpleQueue()
                if self._failure:
                    box.put(None)
            return self._boxes[place]


class SimulatedGroup(Group):
    """One member's view of a simulated group; :class:`lsgd.collectives.group.Group` describes the operations."""

    def __init__(self, mail: _Mail, name: str, members: Sequence[int], rank: int, node_sizes: Sequence[int]) -> None:
        self._mail = mail
        self._name = name
        self._members = tuple(members)
        self.rank = rank
        self.size = len(members)
        self.node_sizes = tuple(node_sizes)
        self._own_nbytes = 0
        self._subgroups: dict[str, SimulatedGroup] = {}

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this member has sent in this group and its subgroups."""
        return self._own_nbytes + sum(group.sent_nbytes for group in self._subgroups.values())

    @property
    def aside(self) -> "SimulatedGroup":
        """A second group of the same members, for use while an algorithm's own exchange is in flight."""
        return self._subgroup("aside", list(range(self.size)), one_node=False)

    def _subgroup(self, kind: str, ranks: list[int], *, one_node: bool) -> "SimulatedGroup":
        if kind not in self._subgroups:
            members = [self._members[rank] for rank in ranks]
            sizes = [len(ranks)] if one_node else [1] * len(ranks)
            name = f"{self._name}/{kind}"
            self._subgroups[kind] = SimulatedGroup(self._mail, name, members, ranks.index(self.rank), sizes)
        return self._subgroups[kind]

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """Begin to replace ``tensor`` by the sum over all members."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        under_way = self.all_gather(parts, tensor)

        def wait() -> None:
            under_way.wait()
            total = parts[0]
            for part in parts[1:]:
                total += part
            tensor.copy_(total)

        return Transfer(wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace ``tensor`` by that of ``source``."""
        others = [rank for rank in range(self.size) if rank != source]
        if self.rank == source:
            self.exchange(dict.fromkeys(others, tensor), {})
        else:
            self.exchange({}, {source: tensor})

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        me = self._members[self.rank]
        for rank, tensor in sends.items():
            self._mail.send(self._name, me, self._members[rank], tensor)
            self._own_nbytes += tensor.nbytes

        def receive() -> None:
            for rank, tensor in receives.items():
                self._mail.receive(self._name, self._members[rank], me, tensor)

        return Transfer(receive)


def simulate(node_sizes: Sequence[int], member: Callable[[SimulatedGroup], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run ``member(group)`` for each rank in its own thread and return the results in rank order.

    If one raises, the others' exchanges fail at once with ExchangeError, and the first error is raised here.
    """
    size = sum(node_sizes)
    mail = _Mail(timeout_s)
    errors: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return member(SimulatedGroup(mail, "world", range(size), rank, node_sizes))
        except BaseException as error:
            errors.append(error)
            mail.fail(f"rank {rank} failed: {error!r}")
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def generation_of(node_sizes: Sequence[int], number: int = 1) -> Generation:
    """Return a generation of workers on nodes of these sizes, over TCP."""
    places = [(node, index) for node, size in enumerate(node_sizes) for index in range(size)]
    return Generation.of(number, places, "tcp")


def steps_at(speed: float, steps: int) -> int:
    """Return how many steps a worker takes while the mean worker takes ``steps``, given its speed over the mean.

    Raises ConfigError for a fraction, because all workers must reach a round at the same time.
    """
    own = speed * steps
    if round(own) < 1 or not math.isclose(own, round(own)):
        raise ConfigError(
            f"a worker of {speed:g} times the mean speed takes {own:g} steps while the mean worker takes {steps}; "
            f"choose a speed and a period whose product is a positive whole number"
        )
    return round(own)


class _Calendar:
    """Says when a worker's rounds come, by the algorithm's schedule, and which settings hold between them.

    Args:
        steps: the mean worker's steps in the whole run; 0: unknown, and no setting changes.
        speed: the worker's, relative to the mean.
    """

    def __init__(self, settings: AlgorithmSettings, steps: int, speed: float) -> None:
        self._planned, self._speed, self._steps_in_all = settings, speed, steps * speed
        self._began = 0  # at this step, with a global round
        self._hold(settings)

    def due(self, step: int) -> str | None:
        """Return the scope of the round before a step, if one is due."""
        since = step - self._began
        return "global" if since % self._period == 0 else "local" if since % self._local_period == 0 else None

    def settings_from(self, step: int) -> AlgorithmSettings:
        """Return the settings that hold from this step, and its global round, to the next global round."""
        self._began = step
        settings = self._planned.at(step / self._steps_in_all if self._steps_in_all else None)
        self._hold(settings)
        return settings

    def _hold(self, settings: AlgorithmSettings) -> None:
        self.schedule = schedule = settings.schedule()
        self._period, self._local_period = (steps_at(self._speed, n) for n in (schedule.period, schedule.local_period))


class _Election:
    """Elects the leaders of rounds as the servers do: by what workers have lost lately, or lose on a common batch.

    Args:
        run: what lots are derived from.
        probe: returns the loss on a batch common to all workers, for elections by probe.

    Raises:
        ConfigError: elections are by probe, and there is none.
    """

    def __init__(self, group: SimulatedGroup, schedule: Schedule, run: str, probe: Callable[[], float] | None) -> None:
        if schedule.election == "probe" and probe is None:
            raise ConfigError("the election needs a probe, and this worker has none; pass one with probe=...")
        self._group, self._run = group, run
        self._kind, self._probe = schedule.election, probe if schedule.election == "probe" else None
        self._losses: deque[float] = deque(maxlen=schedule.local_period)
        self._usual: list[float | None] = [None] * group.size  # each worker's usual loss, as the server keeps it

    def note(self, loss: float) -> None:
        """Note the loss of a step."""
        self._losses.append(loss)

    def leaders(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the leader of the round with this number, and each node's."""
        loss = math.inf  # before the first step
        if self._losses:
            loss = self._probe() if self._probe is not None else sum(self._losses) / len(self._losses)
        own = torch.tensor([loss if math.isfinite(loss) else math.inf], dtype=torch.float64)
        losses = [torch.empty_like(own) for _ in range(self._group.size)]
        self._group.aside.all_gather(losses, own).wait()
        standings: list[tuple[bool, float]] = []
        for rank, loss in enumerate(map(float, losses)):
            standings.append(standing(self._kind, loss, self._usual[rank], f"{self._run} {number} {rank}"))
            if math.isfinite(loss):
                self._usual[rank] = usual_loss(self._usual[rank], loss)
        sizes = self._group.node_sizes
        nodes = (node_ranks(first, sizes) for first in first_ranks(sizes))
        leaders = tuple(min(node, key=standings.__getitem__) for node in nodes)
        return min(leaders, key=standings.__getitem__), leaders


class SimulatedWorker:
    """A worker that trains with one of lsgd's algorithms and without servers: what the client does in an iteration.

    Rounds come before every ``period``-th and ``local_period``-th step, as in the algorithm's schedule; a worker of
    another ``speed`` takes that many times as many steps between them. Leaders are elected as with servers. If
    ``steps`` is given, the period has the same ramps as with servers.

    Args:
        parameters: the model's parameters as one-dimensional tensors; see :meth:`of_model`.
        gradients: tensors of the same shapes, to which the backward pass adds.
        buffers: the model's buffers that global rounds average (batch-norm's statistics).
        steps: the mean worker's steps in the whole run; 0: unknown.
        run: what the seeds of stochastic rounding and of elections are derived from.
        probe: returns the loss on a batch common to all workers, for elections by probe.
        speed: relative to the mean speed of all workers; times a period, it must be a whole number of steps.

    Raises:
        ConfigError: the period or the delay is ``auto``, the election needs a probe, or the speed does not fit the
            periods.
    """

    def __init__(
        self,
        group: SimulatedGroup,
        settings: AlgorithmSettings,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        buffers: Sequence[Tensor] = (),
        steps: int = 0,
        run: str = "",
        probe: Callable[[], float] | None = None,
        speed: float = 1.0,
    ) -> None:
        if settings.period_is_auto:
            raise ConfigError("simulated workers have no network to measure; set a period")
        if settings.delay_is_auto:  # where a transfer takes no time
            settings = settings.with_delay(0)
        self.group = group
        self.parameters = parameters
        self.gradients = gradients
        self.optimizer = optimizer
        self.algorithm = settings.create(parameters, run)
        self.algorithm.muon = is_muon([optimizer])
        self.steps = 0
        self._calendar = _Calendar(settings, steps, speed)
        schedule = self._calendar.schedule
        self._buffers = () if schedule.lockstep else buffers
        self._election = _Election(group, schedule, run, probe)
        self._rounds = Counter[str]()

    @classmethod
    def of_model(
        cls,
        group: SimulatedGroup,
        settings: AlgorithmSettings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int = 0,
        run: str = "",
        probe: Callable[[], Tensor | float] | None = None,
        speed: float = 1.0,
        offload: bool = False,
    ) -> Self:
        """Return a worker that trains ``model``, whose gradients move into flat tensors.

        The probe is called without gradients and with the model in evaluation mode. With ``offload``, the algorithm's
        tensors are in host memory, as with the setting of that name.
        """
        flat = FlatParameters(model, offload=offload)
        gradients = [torch.zeros_like(x) for x in flat.buffers]
        for slot, view in zip(flat.slots, flat.layout.views(gradients), strict=True):
            slot.parameter.grad = view
        evaluate = partial(probe_loss, model, probe) if probe else None
        options: dict[str, Any] = {"steps": steps, "run": run, "probe": evaluate, "speed": speed}
        return cls(group, settings, flat.buffers, gradients, optimizer, buffers=floating_buffers(model), **options)

    def step(self, compute_loss: Callable[[], Tensor]) -> float:
        """Take one step, after a round if one is due, and return its loss.

        ``compute_loss`` runs the forward pass on the next batch and returns its loss, one number.
        """
        order = None
        if scope := self._calendar.due(self.steps):
            order = self._round(scope)
            if self.steps:
                self.settle()
            if scope == "global":
                self.algorithm.settings = self._calendar.settings_from(self.steps)
            if self.steps == 0:
                self.begin(order)
            for buffer in self._buffers if scope == "global" else ():
                self.average(buffer)
        return self.iterate(order, compute_loss)

    def begin(self, order: Round) -> None:
        """Begin a generation: copy the shared state from the source, and reset the algorithm."""
        for tensor in self.algorithm.shared_state():
            self.group.broadcast(tensor, order.source)
        self.algorithm.reset(self.parameters, self.group, order)

    def settle(self) -> None:
        """Complete a transfer that is still in flight, as a worker does before each round."""
        land(self.algorithm.settle(self.parameters))

    def iterate(self, order: Round | None, compute_loss: Callable[[], Tensor]) -> float:
        """Take one step, with this round or without one, and return its loss."""
        if order is not None:
            land(self.algorithm.before_forward(self.parameters, self.group, order))
        for gradient in self.gradients:
            gradient.zero_()
        loss = compute_loss()
        loss.backward()  # type: ignore[no-untyped-call]
        if order is not None:
            land(self.algorithm.after_backward(self.parameters, self.gradients, self.group, order))
        self.optimizer.step()
        land(self.algorithm.after_step(self.parameters))
        self.steps += 1
        own = float(loss.detach())
        self._election.note(own)
        return own

    @torch.no_grad()
    def average(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its mean over all workers."""
        self.group.aside.all_reduce(tensor.div_(self.group.size)).wait()

    def _round(self, scope: str) -> Round:
        """Return the next round with the elected leaders: one on each node, and one of these."""
        exchanges = self._rounds["global"]
        self._rounds[scope] += 1
        number = self._rounds.total()
        leader, leaders = self._election.leaders(number)
        generation = generation_of(self.group.node_sizes)
        return Round(number, generation, scope, leader, leaders, exchanges, (), 0, False)


def land(commit: Commit | None) -> None:
    """Make the changes that an algorithm's hook has returned, if there are some."""
    if commit is not None:
        commit.apply()
