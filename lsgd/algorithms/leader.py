"""Leader SGD: Teng et al., Leader Stochastic Gradient Descent for Distributed Training, arXiv 1905.10395."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from lsgd.algorithms.base import Commit, Flat, clones, copy_all, empties, finiteness, pull
from lsgd.algorithms.common import Periodic, block, codec, delay, period
from lsgd.algorithms.delayed import Delayed
from lsgd.codecs import Codec, codec_of
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
    """Leader SGD (arXiv 1905.10395): each round elects a worker and pulls the others toward its model."""

    name: ClassVar[str] = "leader"
    summary: ClassVar[str] = "Leader SGD (arXiv 1905.10395)"
    elects: ClassVar[bool] = True
    islands: ClassVar[bool] = True

    period: int = period("global rounds")
    local_period: int = setting(16, "the same for rounds inside a node; must divide period", low=1, high=1 << 30)
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
        "who leads: a random worker, or the one with the lowest loss (loss), the lowest loss relative to its usual one "
        "(progress), or the lowest loss on a common batch (probe)",
        choices=RULES,
    )
    compression: str = codec("none", "changes of the leaders' models")
    block: int = block()
    delay: int = delay("apply a leader's model")

    def __post_init__(self) -> None:
        self.make_codec()
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
        """Return the global and the local period."""
        return Schedule(self.period or self.local_period, self.local_period, election=self.election, delay=self.delay)

    def with_period(self, period: int) -> Self:
        """Return the settings with this period, rounded up to a multiple of ``local_period``.

        A period of at most ``local_period`` sets both, is raised above ``delay``, and leaves only global rounds.
        """
        if period <= self.local_period:
            period = max(period, self.delay + 1)
            return dataclasses.replace(self, period=period, local_period=period)
        return dataclasses.replace(self, period=-(-period // self.local_period) * self.local_period)

    def make_codec(self) -> Codec:
        """Return the codec."""
        return codec_of(self.compression, self.block)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """One worker's model goes to all others, directly or relayed."""
        codec = self.make_codec()
        return (workers - 1) / workers * numel * codec.element_nbytes / self.schedule().period

    def create(self, parameters: Flat, run: str = "") -> LeaderSGD:
        """Return the algorithm."""
        return LeaderSGD(self, parameters)


class LeaderSGD(Delayed):
    """Workers are pulled toward an elected leader (the paper's equation 3 and algorithm 1).

    Every local step ends with ``x ← x + p2/period (z_g - x)``, then ``x ← x + p1/local_period (z_l - x)``. A local
    round sets z_l to the model of the node's leader and pulls ``x ← x + c1 (z_l - x)``. A global round does that in
    every node, then sets z_g to the model of the global leader and pulls ``x ← x + c2 (z_g - x)``. Leaders send their
    models as they were before the round's pulls. With one node, or with ``local_period = period``, there is only z_g.

    With a codec as ``compression``, a leader sends Q(x - z) and all members add it to their z. So all z stay equal, and
    the next round corrects what rounding lost. With ``delay``, the new z and the pull come that many steps after the
    round, or at the next round if that is earlier. A failed transfer leaves z unchanged.
    """

    settings: LeaderSettings

    def __init__(self, settings: LeaderSettings, parameters: Flat) -> None:
        super().__init__()
        self.settings = settings
        settings.make_codec().prepare(parameters)
        self._global = _LeaderCopy(clones(parameters), settings)
        self._local: _LeaderCopy | None = None

    @property
    def global_leader(self) -> list[Tensor]:
        """The global leader's model, as of the last global round."""
        return self._global.model

    @property
    def local_leader(self) -> list[Tensor]:
        """The model of the node's leader, as of the last round; empty if there are only global rounds."""
        return self._local.model if self._local is not None else []

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Start the node's leader from the global one; a generation's first round is global."""
        super().reset(parameters, group, order)
        self._global, self._local = _LeaderCopy(self._global.model, self.settings), None
        self._set_levels(group)

    def _set_levels(self, group: Group) -> None:
        """Keep a model of the node's leader if there are local rounds; it starts from the global leader's."""
        two_levels = len(group.node_sizes) > 1 and self.settings.local_period < self.settings.period
        if not two_levels:
            self._local = None
        elif self._local is None:
            self._local = _LeaderCopy(clones(self._global.model), self.settings)

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Begin to send the leaders' models; without a delay, also receive them, to pull toward them."""
        finite = None
        if order.scope == "global":  # local rounds never change the periods
            finite = self.is_finite(parameters)
            self._set_levels(group)
        # The global leader also leads its node, so the local pull does not move it. Hence both models can be sent
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

        return self._begin(transfer, partial(self._land_models, order, finite), parameters, self.settings.delay)

    @property
    def acts_after_step(self) -> bool:
        """Whether there are proximal terms, or leaders' models may land."""
        settings = self.settings
        proximal = settings.proximal_global or (settings.proximal_local and self._local is not None)
        return bool(proximal) or super().acts_after_step

    @no_grad
    def after_step(self, parameters: Flat) -> Commit | None:
        """Apply the proximal terms, and land the models sent ``delay`` steps ago."""
        settings = self.settings
        towards = [(self.global_leader, settings.proximal_global / settings.period)]
        if self._local is not None:
            towards.append((self.local_leader, settings.proximal_local / settings.local_period))
        pull(parameters, towards)
        return super().after_step(parameters)

    def _land_models(self, order: Round, finite: Tensor | None, parameters: Flat) -> Commit:
        """Return the commit of the models that arrived; ``finite``: as of the round, None in a local one."""
        if self.settings.delay and finite is not None:
            finite = finiteness(parameters)
        judged = (
            self._local is not None and ~self._local.finiteness(),
            finite is not None and ~self._global.finiteness(),
            finite is not None and ~finite,
        )
        return Commit(partial(self._commit, order, parameters), judged)

    def _commit(
        self, order: Round, parameters: Flat, local_broken: float, global_broken: float, own_broken: float
    ) -> None:
        """Replace the copies by the models that arrived, unless they are broken, and pull toward them."""
        self.replaced = bool(own_broken)
        if self._local is not None and self._local.land(f"round {order.id}: the node's leader", not local_broken):
            pull(parameters, [(self.local_leader, self.settings.pull_local)])
        if order.scope != "global":
            return
        landed = self._global.land(f"round {order.id}: the global leader", not global_broken)
        if own_broken:  # no pull repairs a NaN
            log.warning("round %d: this worker's model is not finite and is replaced by the leader's", order.id)
            copy_all(parameters, self.global_leader)
        elif landed:
            pull(parameters, [(self.global_leader, self.settings.pull_global)])

    def shared_state(self) -> list[Tensor]:
        """Return the global leader's model."""
        return self.global_leader

    def state_dict(self) -> dict[str, Any]:
        """Return the global leader; a generation begins with it as the node's."""
        return {"global_leader": self.global_leader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the global leader."""
        copy_all(self.global_leader, state["global_leader"])


class _LeaderCopy:
    """A leader's model, as held by all that are pulled toward it, and during a round its successor."""

    def __init__(self, model: list[Tensor], settings: LeaderSettings) -> None:
        self.model = model
        self._arriving: list[Tensor] = []
        self._codec = settings.make_codec()
        self._payloads: list[Tensor] = []

    def prepare(self, parameters: Flat | None, group: Group) -> None:
        """Allocate the successor. The leader, which alone passes ``parameters``, copies or encodes them."""
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
        """Broadcast what member ``source`` has prepared."""
        if not self._payloads:
            for arriving in self._arriving:
                group.broadcast(arriving, source)
            return
        for z, payload, arriving in zip(self.model, self._payloads, self._arriving, strict=True):
            group.broadcast(payload, source)
            arriving.copy_(z)
            self._codec.decode_add(payload, arriving)

    def finiteness(self) -> Tensor:
        """Return whether the successor is finite; equal on all members."""
        return finiteness(self._arriving)

    def land(self, whose: str, finite: bool) -> bool:
        """Replace the model by its successor if that is finite; return whether it is."""
        if finite:
            self.model = self._arriving
        else:
            log.warning("%s has a model that is not finite; everyone keeps the previous one", whose)
        self._arriving, self._payloads = [], []
        return finite
