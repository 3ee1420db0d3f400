"""Low precision decentralized SGD: DCD-PSGD of Tang et al., arXiv 1803.06443 (algorithm 1)."""

from typing import Any

import torch
from torch import Tensor

from lsgd.algorithms.averaging import contribute, divide, empty_sums
from lsgd.algorithms.base import Algorithm, Flat, clones, copy_all, empties
from lsgd.group import Group
from lsgd.kernels import Quantized, quantize
from lsgd.kernels.layout import Layout
from lsgd.messages import Round
from lsgd.quantized import add_decoded, rounding_of, seed_of
from lsgd.settings import LowPrecisionDecentralizedSettings
from lsgd.topology import complete, mixing_matrix, node_index, ring


class LowPrecisionDecentralizedSGD(Algorithm):
    """Neighbors in a fixed graph mix their models, and tell each other the changes in 8 bits.

    With x the model as of the last exchange, x_now the model after the steps since, x_j the neighbors' models as of
    their last exchange and W the mixing matrix, an exchange computes ``z = W_rr x + sum_j W_rj x_j - x + (x_now - x)``
    and sends Q(z); then ``x ← x + Q(z)``, ``x_j ← x_j + Q(z_j)`` for each neighbor, and the model is x.

    Everyone changes its x and the copies that others hold of it by the same operation on the same bytes, so that they
    stay equal bit for bit. A generation begins by sending x to the neighbors at full precision.

    With ``hierarchical``, nodes are the members: x_now is the mean over the node's workers, its first worker talks to
    the neighbors, and Q(z) is handed down. The weights of nodes with different numbers of workers keep the mean over
    workers. A model that is not finite is left out of the node's mean; with no other, x stands for it.
    """

    settings: LowPrecisionDecentralizedSettings

    def __init__(self, settings: LowPrecisionDecentralizedSettings, parameters: Flat, run: str) -> None:
        self.settings = settings
        self._run = run
        self.model = clones(parameters)
        self.copies: dict[int, list[Tensor]] = {}
        self._unit = 0
        self._neighbors: tuple[int, ...] = ()
        self._weights = [1.0]
        self._sums: list[Tensor] = []
        self._sent: list[Tensor] = []
        self._received: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def reset(self, parameters: Flat, group: Group, round: Round) -> None:
        """Exchange models at full precision with the new neighbors."""
        hierarchical = self.settings.hierarchical
        sizes = group.node_sizes if hierarchical else (1,) * group.size
        graph = _GRAPHS[self.settings.topology](len(sizes))
        self._unit = node_index(group.rank, sizes)
        self._neighbors, self._weights = graph[self._unit], mixing_matrix(graph, sizes)[self._unit]
        self._sums = empty_sums(parameters)
        layouts = [Layout(x.numel(), self.settings.block or None, torch.float32) for x in parameters]
        self._sent = [layout.empty(device=x.device) for layout, x in zip(layouts, parameters, strict=True)]

        model = clones(parameters)
        if self._average(parameters, group, round):
            copy_all(model, [total[:-1] for total in self._sums])
        units = group.across if hierarchical else group
        copies: dict[int, list[Tensor]] = {}
        if units is not None:
            copies = {j: empties(model) for j in self._neighbors}
            for index, x in enumerate(model):
                units.exchange(dict.fromkeys(copies, x), {j: copy[index] for j, copy in copies.items()})
        self.model, self.copies = model, copies
        self._received = {j: empties(self._sent) for j in copies}

    @torch.no_grad()
    def before_forward(self, parameters: Flat, group: Group, round: Round | None) -> None:
        """Mix the models, send the changes, and take them over."""
        if round is None:
            return
        current = [total[:-1] for total in self._sums]
        if not self._average(parameters, group, round):
            copy_all(current, self.model)
        if not self._neighbors:
            copy_all(self.model, current)
        else:
            self._exchange(current, group, round)
        copy_all(parameters, self.model)

    def _average(self, parameters: Flat, group: Group, round: Round) -> bool:
        """Write the node's mean model (or this worker's) to the scratch sums; False if none is finite."""
        contribute(parameters, self._sums, round.id)
        if not self.settings.hierarchical:
            return divide(self._sums, 1)
        for total in self._sums:
            group.node.all_reduce(total).wait()
        return divide(self._sums, group.node.size)

    def _exchange(self, current: Flat, group: Group, round: Round) -> None:
        """Exchange the changes in 8 bits; then, when all have arrived, apply them to the model and the copies."""
        units = group.across if self.settings.hierarchical else group
        if units is not None:
            for index, now in enumerate(current):
                z = self._change(index, now)
                seed = seed_of(self._run, round.id, self._unit, index)
                payload = self._sent[index]
                quantize(
                    z,
                    block=self.settings.block or None,
                    rounding=rounding_of(self.settings.rounding),
                    seed=seed,
                    out=payload,
                )
                received = {j: payloads[index] for j, payloads in self._received.items()}
                units.exchange(dict.fromkeys(received, payload), received)
        if self.settings.hierarchical:
            for payload in self._sent:
                group.node.broadcast(payload, 0)
        _apply(self._sent, self.model)
        for j, copy in self.copies.items():
            _apply(self._received[j], copy)

    def _change(self, index: int, now: Tensor) -> Tensor:
        """Return z for one flat tensor, in float32."""
        x = self.model[index]
        z = now.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        z.add_(x, alpha=self._weights[self._unit] - 2)
        for j, copy in self.copies.items():
            z.add_(copy[index], alpha=self._weights[j])
        return z.to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return the model as of the last exchange, and the neighbors'."""
        return {"model": self.model, "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the model as of the last exchange, and the neighbors'; a new generation exchanges them anew."""
        self.model = clones(state["model"])
        self.copies = {j: clones(copy) for j, copy in state["copies"].items()}


_GRAPHS = {"ring": ring, "all": complete}


def _apply(payloads: Flat, model: Flat) -> None:
    """Add the decoded changes to a model."""
    for payload, x in zip(payloads, model, strict=True):
        add_decoded(Quantized.from_payload(payload), x)
