"""Low precision decentralized SGD: DCD-PSGD of Tang et al., arXiv 1803.06443 (algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from lsgd.algorithms.averaging import contribute, divide, empty_sums, tell
from lsgd.algorithms.base import Algorithm, Commit, Flat, chosen, clones, copy_all, empties
from lsgd.algorithms.common import Gossip, block, codec, rounding, rounding_codec
from lsgd.codecs import Codec
from lsgd.collectives.group import Group
from lsgd.collectives.topology import complete, mixing_matrix, node_index, ring
from lsgd.collectives.two_round import seed_of
from lsgd.lazy import Tensor, no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import setting

_GRAPHS: Mapping[str, Callable[[int], Sequence[tuple[int, ...]]]] = {"ring": ring, "all": complete}


@dataclass(frozen=True)
class LowPrecisionDecentralizedSettings(Gossip):
    """DCD-PSGD (arXiv 1803.06443): neighbors in a fixed graph send the changes of their models in 8 bits."""

    name: ClassVar[str] = "low_precision_decentralized"
    summary: ClassVar[str] = "DCD-PSGD, neighbors send model changes in 8 bits (arXiv 1803.06443)"

    topology: str = setting("ring", "the graph of neighbors", choices=tuple(_GRAPHS))
    rounding: str = rounding("stochastic")
    codec: str = codec("minmax8", "changes of models")
    block: int = block()

    def __post_init__(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        """Return the codec."""
        return rounding_codec(self.codec, self.block, self.rounding)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """The model's change to each neighbor."""
        neighbors = len(_GRAPHS[self.topology](workers)[0])
        return neighbors * numel * self.make_codec().element_nbytes / self.interval

    def create(self, parameters: Flat, run: str = "") -> LowPrecisionDecentralizedSGD:
        """Return the algorithm."""
        return LowPrecisionDecentralizedSGD(self, parameters, run)


class LowPrecisionDecentralizedSGD(Algorithm):
    """Neighbors in a fixed graph mix their models, and send each other the changes in few bits.

    With x the model as of the last exchange, x_now the model after the steps since then, x_j the neighbors' models as
    of their last exchange and W the mixing matrix, an exchange computes
    ``z = W_rr x + sum_j W_rj x_j - x + (x_now - x)`` and sends Q(z). Then ``x ← x + Q(z)``, which becomes the model,
    and ``x_j ← x_j + Q(z_j)`` for each neighbor.

    A worker's x and its neighbors' copies of x change by the same operation on the same bytes, so they stay
    bit-identical. A generation begins by sending x to the neighbors at full precision.

    With ``hierarchical``, nodes take the place of workers: x_now is the mean over the node's workers, its first worker
    exchanges with the neighbors, and Q(z) is broadcast inside. The weights preserve the mean over workers even if nodes
    have different numbers of them. A non-finite model is excluded from the node's mean; if all are, x is used instead.
    """

    settings: LowPrecisionDecentralizedSettings

    def __init__(self, settings: LowPrecisionDecentralizedSettings, parameters: Flat, run: str) -> None:
        self.settings = settings
        self._run = run
        self._codec = settings.make_codec()
        self._codec.prepare(parameters, settings.rounding)
        self.model = clones(parameters)
        self.copies: dict[int, list[Tensor]] = {}
        self._unit = 0
        self._neighbors: tuple[int, ...] = ()
        self._weights = [1.0]

    @no_grad
    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Exchange models at full precision with the new neighbors."""
        hierarchical = self.settings.hierarchical
        sizes = group.node_sizes if hierarchical else (1,) * group.size
        graph = _GRAPHS[self.settings.topology](len(sizes))
        self._unit = node_index(group.rank, sizes)
        self._neighbors, self._weights = graph[self._unit], mixing_matrix(graph, sizes)[self._unit]
        self._codec = self.settings.make_codec()

        model = clones(self._mean(parameters, self.model, self.is_finite(parameters), group))
        units = group.across if hierarchical else group
        copies: dict[int, list[Tensor]] = {}
        if units is not None:
            copies = {j: empties(model) for j in self._neighbors}
            for index, x in enumerate(model):
                units.exchange(dict.fromkeys(copies, x), {j: copy[index] for j, copy in copies.items()})
        self.model, self.copies = model, copies

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Mix the models and exchange the changes, to apply them."""
        finite = self.is_finite(parameters)
        current = self._mean(parameters, self.model, finite, group)
        if not self._neighbors:
            return Commit(partial(self._take, parameters, current, order), (~finite,))
        return Commit(partial(self._mix, parameters, *self._exchange(current, group, order), order), (~finite,))

    def _take(self, parameters: Flat, current: Flat, order: Round, broken: float) -> None:
        self._note(broken, order)
        for targets in (self.model, parameters):
            copy_all(targets, current)

    def _mix(self, parameters: Flat, sent: Flat, received: Mapping[int, Flat], order: Round, broken: float) -> None:
        """Apply the changes to the model and the neighbors' copies."""
        self._note(broken, order)
        self._apply(sent, self.model)
        for j, payloads in received.items():
            self._apply(payloads, self.copies[j])
        copy_all(parameters, self.model)

    def _note(self, broken: float, order: Round) -> None:
        """Note whether the model that entered the round was ``broken``, and say so."""
        self.replaced = bool(broken)
        if broken:
            tell(order.id)

    def _mean(self, parameters: Flat, instead: Flat, finite: Tensor, group: Group) -> list[Tensor]:
        """Return the node's mean model (or this worker's model), and another ``instead`` if no model is finite."""
        sums, models = empty_sums(parameters), 1
        contribute(parameters, sums, finite)
        if self.settings.hierarchical:
            models = group.node.size
            for total in sums:
                group.node.all_reduce(total).wait()
        usable = divide(sums, models)
        return [chosen(usable, total[:-1], other) for total, other in zip(sums, instead, strict=True)]

    def _exchange(self, current: Flat, group: Group, order: Round) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
        """Exchange the changes; return what this worker has sent, and what it has received from each neighbor."""
        units = group.across if self.settings.hierarchical else group
        sent = [self._codec.empty(x.numel(), x.device) for x in current]
        received = {j: empties(sent) for j in self.copies}
        if units is not None:
            for index, now in enumerate(current):
                z = self._change(index, now)
                seed = None
                if self.settings.rounding == "stochastic":
                    seed = seed_of(self._run, order.id, self._unit, index)
                self._codec.encode(z, sent[index], seed)
                arriving = {j: payloads[index] for j, payloads in received.items()}
                units.exchange(dict.fromkeys(arriving, sent[index]), arriving)
        if self.settings.hierarchical:
            for payload in sent:
                group.node.broadcast(payload, 0)
        return sent, received

    def _change(self, index: int, now: Tensor) -> Tensor:
        """Return z for one flat tensor, in float32."""
        x = self.model[index]
        z = now.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        z.add_(x, alpha=self._weights[self._unit] - 2)
        for j, copy in self.copies.items():
            z.add_(copy[index], alpha=self._weights[j])
        return z.to(torch.float32)

    def _apply(self, payloads: Flat, model: Flat) -> None:
        """Add the decoded changes to a model."""
        for payload, x in zip(payloads, model, strict=True):
            self._codec.decode_add(payload, x)

    def state_dict(self) -> dict[str, Any]:
        """Return the model as of the last exchange, and the neighbors' copies."""
        return {"model": self.model, "copies": dict(self.copies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the model and the neighbors' copies, which the next generation exchanges again."""
        self.model = clones(state["model"])
        self.copies = {j: clones(copy) for j, copy in state["copies"].items()}
