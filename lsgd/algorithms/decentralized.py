"""Decentralized SGD: Lian et al., arXiv 1705.09056, with the peers of Ying et al., arXiv 2110.13363, or of Bagua."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from lsgd.algorithms.averaging import contribute, divide, empty_sums, tell
from lsgd.algorithms.base import Commit, Flat, copy_all, empties
from lsgd.algorithms.common import Gossip
from lsgd.algorithms.delayed import UNTIL_SETTLED, Delayed
from lsgd.collectives.group import Group
from lsgd.collectives.topology import exponential_peer, node_index, shift_one_peer
from lsgd.lazy import Tensor, no_grad
from lsgd.protocol.messages import Round
from lsgd.settings import setting

ONE_PEER: Mapping[str, Callable[[int, int, int], int | None]] = {
    "exponential": exponential_peer,
    "shift_one": shift_one_peer,
}
"""The peer of a unit, from the unit's index, the number of units and that of the exchange; None: it has a bye."""


@dataclass(frozen=True)
class DecentralizedSettings(Gossip):
    """Decentralized SGD (arXiv 1705.09056): models are averaged with a peer that changes in every round."""

    name: ClassVar[str] = "decentralized"
    summary: ClassVar[str] = "decentralized SGD, models averaged with one peer (arXiv 1705.09056)"

    peers: str = setting(
        "exponential",
        "whose models are averaged: that of one peer at a distance of 2^k, or shifted by one each time; or all",
        choices=(*ONE_PEER, "all"),
    )

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """The model once, unless the worker has a bye; with all peers twice, except the worker's own share."""
        models = 2 * (workers - 1) / workers if self.peers == "all" else _share_with_peer(self.peers, workers)
        return models * 4 * numel / self.interval

    def create(self, parameters: Flat, run: str = "") -> DecentralizedSGD:
        """Return the algorithm."""
        return DecentralizedSGD(self)


def _share_with_peer(peers: str, workers: int) -> float:
    """Return the share of the workers that have a peer, on average over a sweep of exchanges."""
    exchanges = (workers - 1).bit_length()  # with shift_one every exchange has the same number of byes
    peer_of = ONE_PEER[peers]
    found = [peer_of(rank, workers, s) is not None for s in range(exchanges) for rank in range(workers)]
    return sum(found) / max(1, len(found))


class DecentralizedSGD(Delayed):
    """``x ← mean(x, x of the peer) - lr g(x)``: the gradient is that of the model before the exchange.

    The exchange of x begins before the forward pass and overlaps it and the backward pass. Its result is written back
    just before the optimizer's step. The peer changes in every round, or all models are averaged.

    With ``hierarchical``, nodes exchange the sums of their workers' models, so the mean is always over workers. A
    non-finite model is excluded from the mean and replaced by it.
    """

    spans_backward: ClassVar[bool] = True

    settings: DecentralizedSettings

    def __init__(self, settings: DecentralizedSettings) -> None:
        super().__init__()
        self.settings = settings
        self._sums: list[Tensor] = []
        self._received: list[Tensor] = []

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the pending exchange, and allocate memory for those of this generation."""
        super().reset(parameters, group, order)
        self._sums = empty_sums(parameters)
        self._received = empties(self._sums) if self.settings.peers in ONE_PEER else []

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Begin the exchange."""
        if not parameters:
            return None
        finite = contribute(parameters, self._sums, self.finite)
        averaged: Tensor | bool = False

        def exchange() -> None:
            nonlocal averaged
            models = self._add_up(group, order)
            averaged = models > 1 and divide(self._sums, models)

        def land(parameters: Flat) -> Commit:
            return Commit(partial(self._take, order, parameters), (~finite, averaged))

        return self._begin(exchange, land, parameters, UNTIL_SETTLED)

    def _take(self, order: Round, parameters: Flat, broken: float, averaged: float) -> None:
        """Replace the model by the mean, if there is one."""
        self.replaced = bool(broken)
        if broken:
            tell(order.id)
        if averaged:
            copy_all(parameters, [mean[:-1] for mean in self._sums])

    def after_backward(self, parameters: Flat, gradients: Flat, group: Group, order: Round) -> Commit | None:
        """Wait for the exchange, to write the means back."""
        return self.settle(parameters)

    def _add_up(self, group: Group, order: Round) -> int:
        """Replace the sums by those over all models to average; return the number of models."""
        if not self.settings.hierarchical:
            return self._between(group, group.rank, [1] * group.size, order)
        sizes = group.node_sizes
        for total in self._sums:
            group.node.all_reduce(total).wait()
        models = self._between(group.across, node_index(group.rank, sizes), sizes, order)
        if len(sizes) > 1:
            for total in self._sums:
                group.node.broadcast(total, 0)
        return models

    def _between(self, units: Group | None, unit: int, sizes: Sequence[int], order: Round) -> int:
        """Add up the sums of ``unit`` and its peer, or of all units; return the number of models in the result.

        A unit is a node or a worker, with a sum of ``sizes[unit]`` models. ``units`` is None on a member that only
        receives the result.
        """
        if self.settings.peers == "all":
            if units is not None:
                for total in self._sums:
                    units.all_reduce(total).wait()
            return sum(sizes)
        peer = ONE_PEER[self.settings.peers](unit, len(sizes), order.exchanges)
        if peer is None:
            if units is not None:  # every member takes part in building the group, with or without a peer
                units.exchange({}, {})
            return sizes[unit]
        if units is not None:
            for total, received in zip(self._sums, self._received, strict=True):
                units.exchange({peer: total}, {peer: received})
                total.add_(received)
        return sizes[unit] + sizes[peer]
