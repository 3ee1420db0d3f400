"""ByteGrad, low precision synchronous SGD: Bagua, Gan et al., arXiv 2107.01499 (section 4.1, "C_LP_S")."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from lsgd.algorithms.base import Flat
from lsgd.algorithms.common import hierarchical
from lsgd.algorithms.quantized_gradient import QuantizedGradient, QuantizedGradientSettings
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import STAGES
from lsgd.lazy import Tensor
from lsgd.protocol.messages import Round


@dataclass(frozen=True)
class ByteGradSettings(QuantizedGradientSettings):
    """ByteGrad (Bagua, arXiv 2107.01499): gradients averaged in 8 bits between nodes."""

    name: ClassVar[str] = "bytegrad"
    summary: ClassVar[str] = "ByteGrad, gradients in 8 bits between nodes (Bagua, arXiv 2107.01499)"

    hierarchical: bool = hierarchical()

    def create(self, parameters: Flat, run: str = "") -> ByteGrad:
        """Return the algorithm."""
        return ByteGrad(self, parameters, run)


class ByteGrad(QuantizedGradient):
    """Gradients are averaged at full precision inside a node, and in the codec between the nodes' first workers.

    The mean is over workers, however many each node has. With ``hierarchical`` off, or with one worker on every node,
    all workers exchange in the codec.
    """

    settings: ByteGradSettings

    def quantizing_group(self, group: Group) -> Group | None:
        """Return the first worker of each node, or all workers."""
        return group.across if self.settings.hierarchical else group

    def count(self, present: Tensor, group: Group) -> None:
        """Begin to sum ``present``; after all buckets, if their operations inside a node must be alone there."""
        if self.settings.hierarchical and max(group.node_sizes) > 1:
            self.complete()
        super().count(present, group)

    def reduce(self, gradient: Tensor, result: Tensor, index: int, group: Group, order: Round) -> Iterator[None]:
        """Average one bucket inside the node, then between nodes, and broadcast the result inside."""
        if not self.settings.hierarchical:
            yield from super().reduce(gradient, result, index, group, order)
            return
        nodes = len(group.node_sizes)
        result.copy_(gradient)
        if self.settings.average:
            result.mul_(nodes / group.size)
        group.node.all_reduce(result).wait()
        if nodes > 1:
            if group.across is not None:
                yield from self.quantized_mean(result, result, index, order)
            else:
                yield from repeat(None, STAGES - 1)
            group.node.broadcast(result, 0)
