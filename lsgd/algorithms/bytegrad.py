"""ByteGrad, low precision synchronous SGD: Bagua, Gan et al., arXiv 2107.01499 (section 4.1, "C_LP_S")."""

from collections.abc import Iterator
from itertools import repeat

from torch import Tensor

from lsgd.algorithms.base import Flat
from lsgd.algorithms.quantized_gradient import QuantizedGradient
from lsgd.group import Group
from lsgd.messages import Round
from lsgd.quantized import STAGES
from lsgd.settings import ByteGradSettings


class ByteGrad(QuantizedGradient):
    """Gradients are averaged at full precision inside a node, and in 8 bits between the nodes' first workers.

    The mean is that over workers, however many each node has. With ``hierarchical`` off, or with one worker on
    every node, all exchange in 8 bits.
    """

    settings: ByteGradSettings

    def __init__(self, settings: ByteGradSettings, parameters: Flat, run: str) -> None:
        super().__init__(settings, run)

    def quantizing_group(self, group: Group) -> Group | None:
        """Return the nodes' first workers, or all."""
        return group.across if self.settings.hierarchical else group

    def reduce(
        self, gradient: Tensor, result: Tensor, index: int, group: Group, round: Round
    ) -> Iterator[None]:
        """Average one bucket inside the node, between nodes, and hand it down."""
        if not self.settings.hierarchical:
            yield from self.quantized_mean(gradient, result, index, round)
            return
        nodes = len(group.node_sizes)
        result.copy_(gradient)
        if self.settings.average:
            result.mul_(nodes / group.size)
        group.node.all_reduce(result).wait()
        if nodes > 1:
            if group.across is not None:
                yield from self.quantized_mean(result, result, index, round)
            else:
                yield from repeat(None, STAGES - 1)
            group.node.broadcast(result, 0)
