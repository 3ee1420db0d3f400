"""Carries out the rounds that the global server orders, on this worker's model."""

import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lsgd.algorithms.base import all_finite
from lsgd.client.checkpoint.finite import FiniteCheck, clear
from lsgd.client.control.joining import Membership
from lsgd.client.groups.reach import probe
from lsgd.client.groups.torch_group import TorchGroup, form
from lsgd.collectives.group import Group
from lsgd.errors import ExchangeError
from lsgd.flat import FlatParameters
from lsgd.plan.plan import algorithm_of
from lsgd.protocol.messages import Generation, Round
from lsgd.settings import AlgorithmSettings, same_form

logger = logging.getLogger("lsgd")


class Exchanger:
    """One worker's part in rounds. A round that fails leaves model, buffers and algorithm as they were.

    Args:
        membership: this worker's place in the run.
        flat: the model's parameters.
        model: the model.
        optimizers: whose state a newcomer takes over, if the plan says so.
    """

    def __init__(
        self,
        membership: Membership,
        flat: FlatParameters,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.plan = membership.plan
        self.flat = flat
        self.algorithm = self.plan.algorithm.create(self.flat.buffers, membership.welcome.run)
        self._algorithm_text = ""
        self.generation: Generation | None = None
        self.consensus_distance: float | None = None
        self.leader_model: list[Tensor] = []  # flat, then floating buffers; from the last round on
        self._membership = membership
        self._model = model
        self.finite = FiniteCheck(model)
        self._optimizers = list(optimizers)
        self._group: TorchGroup | None = None
        self._fresh = False  # no round of the generation has been completed yet
        self._when_ready: Callable[[Round], None] | None = None
        self._resumed: tuple[AlgorithmSettings, dict[str, Any]] | None = None
        membership.channel.when_over(self._cut)

    def resume(self, algorithm: tuple[AlgorithmSettings, dict[str, Any]]) -> None:
        """Begin the first round with this state of an algorithm, if the round's is the same with the same form."""
        self._resumed = algorithm

    def when_ready(self, call: Callable[[Round], None] | None) -> None:
        """From now on call this in each round: when all is as it enters the round, or leaves the final one."""
        self._when_ready = call

    def whole(self, round: Round) -> Round:
        """Return a round with the names of its members, which the servers leave out when this worker has them."""
        generation = self.generation
        if generation is None or round.generation.indices or round.generation.number != generation.number:
            return round
        return replace(round, generation=generation)

    @torch.no_grad()
    def run(self, round: Round) -> Group:
        """Carry out a round, or as much of it as comes before the forward pass, and return its group.

        Raises:
            ExchangeError: it failed; nothing has changed, and the generation's groups are dropped.
        """
        try:
            group = self._enter(round.generation, probing=round.probe)
            if not self._fresh:
                self.algorithm.settle(self.flat.buffers)
            self._take_up(round.algorithm)
            if self._fresh or round.new:
                self._begin(group, round)
            if round.final:
                self._make_consensus(group, round)
                self._ready(round)
                return group
            self._ready(round)
            buffers = self._exchange_buffers(group, round)
            broken = self._may_heal(round) and not all_finite(self.flat.buffers)
            self.algorithm.before_forward(self.flat.buffers, group, round)
            for buffer, value in buffers:
                buffer.copy_(value)
            if broken and all_finite(self.flat.buffers):
                clear(self._optimizers)
        except ExchangeError:
            self.leave(cut=True)
            raise
        self._fresh = False
        return group

    def _may_heal(self, round: Round) -> bool:
        """Whether a round may give a non-finite model of this worker back what the others have."""
        return round.scope == "global" and not self.algorithm.settings.schedule().lockstep

    def _ready(self, round: Round) -> None:
        if self._when_ready is not None:
            self._when_ready(round)

    def leave(self, *, cut: bool = False) -> None:
        """Drop the process groups, so that peers which wait for this worker fail at once.

        Args:
            cut: an exchange may be under way; without its connections it ends now, else dropping it waits for it.
        """
        if self._group is not None:
            if cut:
                self._group.cut()
            self._group.close()
        self._group = None
        self.generation = None

    def _cut(self, number: int) -> None:
        """Free this worker from exchanges of a generation that is over."""
        group, generation = self._group, self.generation
        if group is not None and generation is not None and generation.number == number:
            group.cut()

    def _enter(self, generation: Generation, *, probing: bool) -> TorchGroup:
        """Return the group of a generation, built if it is a new one; ``probing``: if all members reach each other."""
        if reason := self._membership.channel.generation_over(generation.number):
            raise ExchangeError(f"generation {generation.number} is over: {reason}")
        if not generation.indices:
            raise ExchangeError(f"the members of generation {generation.number} are not known here any more")
        if self._group is None or self.generation != generation:
            self.leave()
            if probing:
                probe(generation, self._membership)
            self._group = form(generation, self._membership)
            self.generation, self._fresh = generation, True
            logger.info(
                "generation %d: rank %d of %d, over %s on %s",
                generation.number,
                self._group.rank,
                self._group.size,
                generation.backend,
                self._membership.join.address,
            )
        return self._group

    def _take_up(self, text: str) -> None:
        """Take up the algorithm and the settings that a round has; one of another kind begins anew."""
        if not text or text == self._algorithm_text:
            return
        settings = algorithm_of(json.loads(text), "the server's round")
        if not same_form(settings, self.algorithm.settings):
            self.algorithm = settings.create(self.flat.buffers, self._membership.welcome.run)
            self._fresh = True
        self.algorithm.settings = settings
        self._algorithm_text = text
        resumed, self._resumed = self._resumed, None
        if resumed is not None and same_form(resumed[0], settings):
            self.algorithm.load_state_dict(resumed[1])

    def _begin(self, group: TorchGroup, round: Round) -> None:
        """Give newcomers the model of the source, all members the shared state, and reset the algorithm."""
        if round.new and group.rank in (round.source, *round.new):
            ranks = [round.source, *round.new]
            takers = group if len(ranks) == group.size else group.subset(f"take-over-{round.id}", ranks)
            source = round.source if takers is group else 0
            self._take_over(takers, source, group.rank != round.source)
        state = self.algorithm.shared_state()
        received = [x.clone() for x in state]
        for x in received:
            group.broadcast(x, round.source)
        for x, value in zip(state, received, strict=True):
            x.copy_(value)
        self.algorithm.reset(self.flat.buffers, group, round)

    def _take_over(self, group: TorchGroup, source: int, taking: bool) -> None:
        """Take the source's model, its frozen parameters and buffers too, and its optimizers' state if so planned."""
        everything = [*self.flat.buffers, *(p.data for p in self.flat.frozen), *self._model.buffers()]
        received = []
        for x in everything:
            value = (
                x.contiguous() if not taking else torch.empty_like(x, memory_format=torch.contiguous_format)
            )
            if value.numel():
                group.broadcast(value, source)
            received.append(value)
        states = self._broadcast_object([o.state_dict() for o in self._optimizers], group, source)
        if taking:
            for x, value in zip(everything, received, strict=True):
                x.copy_(value)
            for optimizer, state in zip(self._optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def _broadcast_object(self, states: list[Any], group: TorchGroup, source: int) -> list[Any]:
        """Return the source's optimizer states, or ours if the plan leaves them alone."""
        if not self.plan.run.sync_optimizer and not self.algorithm.settings.schedule().identical:
            return states
        stream = io.BytesIO()
        torch.save(states, stream)
        data = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(group.device)
        length = torch.tensor([len(data)], device=group.device)
        group.broadcast(length, source)
        if group.rank != source:
            data = torch.empty(int(length), dtype=torch.uint8, device=group.device)
        group.broadcast(data, source)
        loaded = torch.load(
            io.BytesIO(data.cpu().numpy().tobytes()),
            map_location=self._membership.device,
            weights_only=True,
        )
        return list(loaded)

    def _exchange_buffers(self, group: TorchGroup, round: Round) -> list[tuple[Tensor, Tensor]]:
        """Return the model's floating buffers, each with the value that the round gives it."""
        buffers = self.finite.buffers()
        if round.scope == "local" or self.plan.run.buffers == "keep" or not buffers or group.size == 1:
            return []
        if self.algorithm.settings.schedule().lockstep:  # every iteration is a round: the last one is enough
            return []
        flat = torch.cat([_wide(b) for b in buffers])
        if self.plan.run.buffers == "leader":
            group.broadcast(flat, round.leader)
        else:
            (flat,) = self._mean(group, [flat], contributes=True) or [flat]
        parts = torch.split(flat, [b.numel() for b in buffers])
        return [(b, part.view(b.shape)) for b, part in zip(buffers, parts, strict=True)]

    def _make_consensus(self, group: TorchGroup, round: Round) -> None:
        """Replace every model by the average of all, or by the leader's; and note how far apart they were."""
        parameters = self.flat.buffers
        buffers = self.finite.buffers()
        own = [_wide(x) for x in (*parameters, *buffers)]
        led = [x.clone() for x in own]
        for x in led:
            group.broadcast(x, round.leader)
        means = self._mean(group, own, contributes=group.rank not in round.new) or led
        distance = self._distance(group, own[: len(parameters)], means[: len(parameters)])
        self.consensus_distance, self.leader_model = distance, led
        chosen = means if self.plan.run.consensus == "average" else led
        for x, value in zip([*parameters, *buffers], chosen, strict=True):
            x.copy_(value.view(x.shape))

    def _mean(
        self, group: TorchGroup, tensors: Sequence[Tensor], *, contributes: bool
    ) -> list[Tensor] | None:
        """Return the means over those members that contribute finite numbers; None if no member does."""
        if contributes and not all_finite(tensors):
            logger.warning("this worker's model is not finite: it is left out of the average")
            contributes = False
        count = torch.tensor([float(contributes)], device=group.device)
        group.all_reduce(count).wait()
        if not float(count):
            return None
        means = [x / count.to(x.device) if contributes else torch.zeros_like(x) for x in tensors]
        for x in means:
            group.all_reduce(x).wait()
        return means

    def _distance(self, group: TorchGroup, own: Sequence[Tensor], means: Sequence[Tensor]) -> float:
        """Return the mean over members of |x - mean| / |mean|; of those whose model is finite."""
        apart = sum(float((x - mean).square().sum()) for x, mean in zip(own, means, strict=True)) ** 0.5
        length = sum(float(mean.square().sum()) for mean in means) ** 0.5
        distance = apart / length if length else 0.0
        summed = torch.tensor([distance, 1.0] if math.isfinite(distance) else [0.0, 0.0], device=group.device)
        group.all_reduce(summed).wait()
        total, count = summed.tolist()
        return total / count if count else 0.0


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` as one row, at float32 or what is wider."""
    return x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
