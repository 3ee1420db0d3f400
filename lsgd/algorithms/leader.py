"""Leader SGD: Teng et al., Leader Stochastic Gradient Descent for Distributed Training, arXiv 1905.10395."""

import logging
from typing import Any

import torch
from torch import Tensor

from lsgd.algorithms.base import Algorithm, Flat, all_finite, clones, copy_all, empties
from lsgd.background import Background
from lsgd.group import Group
from lsgd.kernels import Quantized, quantize
from lsgd.kernels.layout import Layout
from lsgd.messages import Round
from lsgd.quantized import add_decoded
from lsgd.settings import LeaderSettings
from lsgd.topology import node_index, node_ranks

log = logging.getLogger(__name__)


class LeaderSGD(Algorithm):
    """Workers are pulled toward the worker with the lowest training loss (the paper's equation 3 and algorithm 1).

    Every local step ends with ``x ← x + p2/period (z_g - x)``, then ``x ← x + p1/local_period (z_l - x)``. A local
    round sets z_l to the model of the node's leader and pulls ``x ← x + c1 (z_l - x)``; a global round does that in
    every node, then sets z_g to the model of the leader of all and pulls ``x ← x + c2 (z_g - x)``. The models sent are
    those before the round's pulls. With one node, or with ``local_period = period``, there is only z_g.

    With ``compression = "minmax8"`` a leader sends Q(x - z), and all add it to the z that they hold, so that it stays
    the same on all, and the next round makes up for what rounding lost. With ``delay``, z is replaced (and the pull
    made) so many steps after the round, or at the next one; a transfer that fails leaves z as it was.
    """

    settings: LeaderSettings

    def __init__(self, settings: LeaderSettings, parameters: Flat) -> None:
        self.settings = settings
        self._global = _LeaderCopy(clones(parameters), settings)
        self._local: _LeaderCopy | None = None
        self._background = Background()
        self._scope = ""
        self._round_id = 0
        self._steps_left = 0

    @property
    def global_leader(self) -> list[Tensor]:
        """The model of the leader of all, as of the last global round."""
        return self._global.model

    @property
    def local_leader(self) -> list[Tensor]:
        """The model of the node's leader, as of the last round; empty with one level only."""
        return self._local.model if self._local is not None else []

    def reset(self, parameters: Flat, group: Group, round: Round) -> None:
        """The node's leader starts as the leader of all; the first round of a generation is global."""
        two_levels = len(group.node_sizes) > 1 and self.settings.local_period < self.settings.period
        self._global = _LeaderCopy(self._global.model, self.settings)
        self._local = _LeaderCopy(clones(self._global.model), self.settings) if two_levels else None
        self._background = Background()

    @torch.no_grad()
    def before_forward(self, parameters: Flat, group: Group, round: Round | None) -> None:
        """Take over the leaders' models and be pulled toward them, or begin to."""
        if round is None:
            return
        self.settle(parameters)
        # The leader of all also leads its node, where its own local pull moves it by nothing: so both models can
        # be sent before either pull, and nothing is changed until both have arrived.
        transfers = []
        if self._local is not None:
            leader = round.leaders[node_index(group.rank, group.node_sizes)]
            first = node_ranks(group.rank, group.node_sizes).start
            transfers.append((self._local, group.node, leader - first))
        if round.scope == "global":
            transfers.append((self._global, group, round.leader))
        for copy, members, source in transfers:
            if members.rank == source:
                copy.prepare(parameters, members)

        def transfer() -> None:
            for copy, members, source in transfers:
                copy.transfer(members, source)

        self._scope, self._round_id, self._steps_left = round.scope, round.id, self.settings.delay
        if self._steps_left and parameters:
            self._background.start(transfer, parameters[0].device)
        else:
            transfer()
            self._land(parameters)

    @torch.no_grad()
    def after_step(self, parameters: Flat) -> None:
        """Apply the proximal terms, and take over models that were sent ``delay`` steps ago."""
        settings = self.settings
        _pull(parameters, self.global_leader, settings.proximal_global / settings.period)
        if self._local is not None:
            _pull(parameters, self.local_leader, settings.proximal_local / settings.local_period)
        self._steps_left -= 1
        if self._steps_left == 0 and self._background.busy and self._background.succeeded():
            self.settle(parameters)

    @torch.no_grad()
    def settle(self, parameters: Flat) -> None:
        """Take over models that are still on their way."""
        if self._background.busy:
            self._background.finish()
            self._land(parameters)

    def _land(self, parameters: Flat) -> None:
        """Replace the copies by what has arrived, and pull."""
        if self._local is not None and self._local.land(f"round {self._round_id}: the node's leader"):
            _pull(parameters, self.local_leader, self.settings.pull_local)
        if self._scope == "global" and self._global.land(f"round {self._round_id}: the leader of all"):
            _pull(parameters, self.global_leader, self.settings.pull_global)

    def shared_state(self) -> list[Tensor]:
        """Return the model of the leader of all."""
        return self.global_leader

    def state_dict(self) -> dict[str, Any]:
        """Return both leaders; that of the node is an empty list where there is none."""
        return {"global_leader": self.global_leader, "local_leader": self.local_leader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both leaders."""
        copy_all(self.global_leader, state["global_leader"])
        local = clones(state["local_leader"])
        self._local = _LeaderCopy(local, self.settings) if local else None


class _LeaderCopy:
    """A leader's model as all who are pulled to it hold it, and what is arriving to replace it."""

    def __init__(self, model: list[Tensor], settings: LeaderSettings) -> None:
        self.model = model
        self._arriving = empties(model)
        self._block = settings.block or None
        self._payloads: list[Tensor] = []
        if settings.compression == "minmax8":
            layouts = [Layout(z.numel(), self._block, torch.float32) for z in model]
            self._payloads = [layout.empty(device=z.device) for layout, z in zip(layouts, model, strict=True)]

    def prepare(self, parameters: Flat, group: Group) -> None:
        """Take what the leader sends from its model, which may change from then on."""
        if not self._payloads or group.size == 1:
            copy_all(self._arriving, parameters)
            return
        for x, z, payload in zip(parameters, self.model, self._payloads, strict=True):
            change = x.to(torch.promote_types(x.dtype, torch.float32)) - z
            quantize(change.to(torch.float32), block=self._block, out=payload)

    def transfer(self, group: Group, source: int) -> None:
        """Send what was prepared from the member ``source`` to all."""
        if not self._payloads or group.size == 1:
            for arriving in self._arriving:
                group.broadcast(arriving, source)
            return
        for z, payload, arriving in zip(self.model, self._payloads, self._arriving, strict=True):
            group.broadcast(payload, source)
            arriving.copy_(z)
            add_decoded(Quantized.from_payload(payload), arriving)

    def land(self, whose: str) -> bool:
        """Replace the model by what has arrived, unless it is not finite, which all find alike."""
        if not all_finite(self._arriving):
            log.warning("%s has a model that is not finite; nobody takes it over, the last one stays", whose)
            return False
        self.model, self._arriving = self._arriving, self.model
        return True


def _pull(parameters: Flat, leader: Flat, strength: float) -> None:
    """``x ← x + strength (leader - x)``."""
    for x, z in zip(parameters, leader, strict=True):
        x.lerp_(z, strength)
