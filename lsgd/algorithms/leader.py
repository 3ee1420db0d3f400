"""Leader SGD: Teng et al., Leader Stochastic Gradient Descent for Distributed Training, arXiv 1905.10395."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lsgd.algorithms.base import Flat, all_finite, clones, copy_all, empties
from lsgd.algorithms.common import Periodic, block, codec, delay, period
from lsgd.algorithms.delayed import Delayed
from lsgd.codecs import codec_of
from lsgd.collectives.group import Group
from lsgd.collectives.topology import node_index, node_ranks
from lsgd.election import RULES
from lsgd.errors import ConfigError
from lsgd.lazy import Tensor, no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import Schedule, setting

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaderSettings(Periodic):
    """Leader SGD (arXiv 1905.10395): workers are pulled toward a worker that each round elects."""

    name: ClassVar[str] = "leader"
    summary: ClassVar[str] = "Leader SGD (arXiv 1905.10395)"
    elects: ClassVar[bool] = True
    islands: ClassVar[bool] = True

    period: int = period("global rounds")
    local_period: int = setting(16, "the same for rounds inside a node; divides period", low=1, high=1 << 30)
    pull_global: float = setting(0.1, "c2: pull of a global round toward the global leader", low=0, high=1)
    pull_local: float = setting(0.1, "c1: pull of a local round toward the node's leader", low=0, high=1)
    proximal_global: float = setting(
        0.1, "p2: pull toward the global leader, spread over the steps of a period", low=0, high=1
    )
    proximal_local: float = setting(
        0.1, "p1: pull toward the node's leader, spread over the steps of a local period", low=0, high=1
    )

    election: str = setting(
        "random",
        "who leads: by lot; progress: the lowest loss beside its usual one; probe: on a common batch; loss: the lowest",
        choices=RULES,
    )
    compression: str = codec("none", "changes of the leaders' models")
    block: int = block()
    delay: int = delay("take over a leader's model")

    def __post_init__(self) -> None:
        if self.period and (self.period < self.local_period or self.period % self.local_period):
            raise ConfigError(
                f"period = {self.period} is not a multiple of local_period = {self.local_period}; "
                f"set local_period to a divisor of period, or equal to it for global rounds only"
            )
        if self.delay >= self.local_period and self.delay:
            raise ConfigError(
                f"delay = {self.delay} is not less than local_period = {self.local_period}: "
                f"the next round would come first; set delay to at most {self.local_period - 1}"
            )

    def schedule(self) -> Schedule:
        """Return its two periods."""
        return Schedule(self.period or self.local_period, self.local_period, election=self.election)

    def with_period(self, period: int) -> Self:
        """Return the settings with another period: at most ``local_period``, above ``delay``, or a multiple of it.

        Up to ``local_period`` there are global rounds only.
        """
        if period <= self.local_period:
            period = max(period, self.delay + 1)
            return dataclasses.replace(self, period=period, local_period=period)
        return dataclasses.replace(self, period=-(-period // self.local_period) * self.local_period)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """One worker sends its model to all others, directly or relayed."""
        codec = codec_of(self.compression, self.block)
        return (workers - 1) / workers * numel * codec.element_nbytes / self.schedule().period

    def create(self, parameters: Flat, run: str = "") -> LeaderSGD:
        """Return the algorithm."""
        return LeaderSGD(self, parameters)


class LeaderSGD(Delayed):
    """Workers are pulled toward an elected one (the paper's equation 3 and algorithm 1).

    Every local step ends with ``x ← x + p2/period (z_g - x)``, then ``x ← x + p1/local_period (z_l - x)``. A local
    round sets z_l to the model of the node's leader and pulls ``x ← x + c1 (z_l - x)``. A global round does that in
    every node, then sets z_g to the model of the global leader and pulls ``x ← x + c2 (z_g - x)``. The models are sent
    as they were before the round's pulls. With one node, or with ``local_period = period``, there is only z_g.

    With a codec as ``compression`` a leader sends Q(x - z), and all add it to their z. So z stays the same on all, and
    the next round corrects what rounding lost. With ``delay``, z is replaced and the pull is made that many steps after
    the round, or at the next round; a transfer that fails leaves z as it was.
    """

    settings: LeaderSettings

    def __init__(self, settings: LeaderSettings, parameters: Flat) -> None:
        super().__init__()
        self.settings = settings
        self._global = _LeaderCopy(clones(parameters), settings)
        self._local: _LeaderCopy | None = None
        self._scope = ""
        self._round_id = 0

    @property
    def global_leader(self) -> list[Tensor]:
        """The global leader's model, as of the last global round."""
        return self._global.model

    @property
    def local_leader(self) -> list[Tensor]:
        """The model of the node's leader, as of the last round; empty if there is only one level."""
        return self._local.model if self._local is not None else []

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """The node's leader starts as the global leader; the first round of a generation is global."""
        super().reset(parameters, group, order)
        self._global, self._local = _LeaderCopy(self._global.model, self.settings), None
        self._set_levels(group)

    def _set_levels(self, group: Group) -> None:
        """Have a model of the node's leader where there are local rounds, at first the global leader's."""
        two_levels = len(group.node_sizes) > 1 and self.settings.local_period < self.settings.period
        if not two_levels:
            self._local = None
        elif self._local is None:
            self._local = _LeaderCopy(clones(self._global.model), self.settings)

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round | None) -> None:
        """Take over the leaders' models and pull toward them, or begin to."""
        if order is None:
            return
        self.settle(parameters)
        if order.scope == "global":  # the only one that may change the periods
            self._set_levels(group)
        # The global leader also leads its node, so its local pull does not move it. So both models can be sent
        # before either pull, and nothing changes until both have arrived.
        transfers = []
        if self._local is not None:
            leader = order.leaders[node_index(group.rank, group.node_sizes)]
            first = node_ranks(group.rank, group.node_sizes).start
            transfers.append((self._local, group.node, leader - first))
        if order.scope == "global":
            transfers.append((self._global, group, order.leader))
        for copy, members, source in transfers:
            copy.prepare(parameters if members.rank == source else None, members)

        def transfer() -> None:
            for copy, members, source in transfers:
                copy.transfer(members, source)

        self._scope, self._round_id = order.scope, order.id
        self._begin(transfer, parameters, self.settings.delay)

    @property
    def acts_after_step(self) -> bool:
        """Whether there are proximal terms, or a leader's model may be taken over."""
        settings = self.settings
        proximal = settings.proximal_global or (settings.proximal_local and self._local is not None)
        return bool(proximal) or super().acts_after_step

    @no_grad
    def after_step(self, parameters: Flat) -> None:
        """Apply the proximal terms, and take over models sent ``delay`` steps ago."""
        settings = self.settings
        _pull(parameters, self.global_leader, settings.proximal_global / settings.period)
        if self._local is not None:
            _pull(parameters, self.local_leader, settings.proximal_local / settings.local_period)
        super().after_step(parameters)

    def _land(self, parameters: Flat) -> None:
        """Replace the copies by the models that arrived, and pull."""
        assert self._group is not None
        is_global, agree = self._scope == "global", self._group.agree
        local_whole = self._local is not None and agree(self._local.has_arrived())
        global_whole = is_global and agree(self._global.has_arrived())
        finite = not is_global or agree(all_finite(parameters))
        if self._local is not None and self._local.land(f"round {self._round_id}: the node's leader", local_whole):
            _pull(parameters, self.local_leader, self.settings.pull_local)
        if not is_global:
            return
        arrived = self._global.land(f"round {self._round_id}: the global leader", global_whole)
        if not finite:  # no pull repairs a NaN
            log.warning("round %d: this worker's model is not finite; it takes the leader's", self._round_id)
            copy_all(parameters, self.global_leader)
        elif arrived:
            _pull(parameters, self.global_leader, self.settings.pull_global)

    def shared_state(self) -> list[Tensor]:
        """Return the global leader's model."""
        return self.global_leader

    def state_dict(self) -> dict[str, Any]:
        """Return both leaders; the node's is an empty list if there is none."""
        return {"global_leader": self.global_leader, "local_leader": self.local_leader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both leaders."""
        copy_all(self.global_leader, state["global_leader"])
        local = clones(state["local_leader"])
        self._local = _LeaderCopy(local, self.settings) if local else None


class _LeaderCopy:
    """A leader's model, as held by all that are pulled toward it, and in a round the one that comes in its place."""

    def __init__(self, model: list[Tensor], settings: LeaderSettings) -> None:
        self.model = model
        self._arriving: list[Tensor] = []
        self._codec = codec_of(settings.compression, settings.block)
        self._payloads: list[Tensor] = []

    def prepare(self, parameters: Flat | None, group: Group) -> None:
        """Make room for what comes; the leader, which has ``parameters``, copies or encodes them, and may go on."""
        self._arriving, self._payloads = empties(self.model), []
        if not self._codec.lossless and group.size > 1:
            self._payloads = [self._codec.empty(z.numel(), z.device) for z in self.model]
        if parameters is None:
            return
        if not self._payloads:
            copy_all(self._arriving, parameters)
        for x, z, room, payload in zip(parameters, self.model, self._arriving, self._payloads, strict=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            change = torch.sub(wide, z, out=room if room.dtype == wide.dtype else None)
            self._codec.encode(change.to(torch.float32), payload)

    def transfer(self, group: Group, source: int) -> None:
        """Broadcast what the member ``source`` has prepared."""
        if not self._payloads:
            for arriving in self._arriving:
                group.broadcast(arriving, source)
            return
        for z, payload, arriving in zip(self.model, self._payloads, self._arriving, strict=True):
            group.broadcast(payload, source)
            arriving.copy_(z)
            self._codec.decode_add(payload, arriving)

    def has_arrived(self) -> bool:
        """Whether what arrived is finite; all members see it equally."""
        return all_finite(self._arriving)

    def land(self, whose: str, whole: bool) -> bool:
        """Replace the model by the one that arrived, if that is finite, and free the room that it took."""
        arrived, self._arriving, self._payloads = self._arriving, [], []
        if not whole:
            log.warning("%s has a model that is not finite; nobody takes it over, and the previous one stays", whose)
            return False
        self.model = arrived
        return True


def _pull(parameters: Flat, leader: Flat, strength: float) -> None:
    """``x ← x + strength (leader - x)``."""
    if not strength:
        return
    for x, z in zip(parameters, leader, strict=True):
        x.lerp_(z, strength)
