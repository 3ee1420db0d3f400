"""The base of ByteGrad and QSGD: the two-round all-reduce, with residuals that change only if the step is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lsgd.algorithms.base import Flat
from lsgd.algorithms.common import block, codec, rounding, rounding_codec
from lsgd.algorithms.gradient import GradientAlgorithm, GradientSettings
from lsgd.codecs import Codec
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.lazy import Tensor
from lsgd.protocol.messages import Round
from lsgd.settings import setting


@dataclass(frozen=True)
class QuantizedGradientSettings(GradientSettings):
    """Base of the methods that exchange every gradient in few bits."""

    average: bool = setting(True, "apply the mean of the gradients; false: their sum", fixed=True)
    error_feedback: bool = setting(False, "add what rounding lost to the next gradient", fixed=True)
    rounding: str = rounding("nearest")
    codec: str = codec("minmax8", "gradients")
    block: int = block()

    def __post_init__(self) -> None:
        self.make_codec()

    def make_codec(self) -> Codec:
        """Return the codec."""
        return rounding_codec(self.codec, self.block, self.rounding)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """Each gradient twice, except the worker's own share."""
        return 2 * (workers - 1) / workers * numel * self.make_codec().element_nbytes


class QuantizedGradient(GradientAlgorithm):
    """Base of the gradient methods in few bits, with optional error feedback.

    A step that is non-finite on any member leaves the residuals unchanged. When the members change, a member keeps
    the residuals of its own gradients and drops those of results.
    """

    settings: QuantizedGradientSettings

    def __init__(self, settings: QuantizedGradientSettings, parameters: Flat, run: str) -> None:
        super().__init__(settings)
        settings.make_codec().prepare(parameters, settings.rounding)
        self._run = run
        self._members: tuple[str, ...] = ()
        self._feedback: dict[int, ErrorFeedback] = {}
        self._all_reduce: QuantizedAllReduce | None = None

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the exchanges of the last generation and, if the members have changed, the residuals of results."""
        super().reset(parameters, group, order)
        for feedback in self._feedback.values():
            feedback.begin_generation(same_members=order.generation.members == self._members)
        self._members = order.generation.members
        taking_part = self.quantizing_group(group)
        settings = self.settings
        self._all_reduce = None
        if taking_part is not None:
            self._all_reduce = QuantizedAllReduce(
                taking_part, settings.make_codec(), rounding=settings.rounding, average=settings.average
            )

    def quantizing_group(self, group: Group) -> Group | None:
        """Return the group of the members that exchange payloads; None on the others."""
        return group

    def quantized_mean(self, x: Tensor, result: Tensor, index: int, order: Round) -> Iterator[None]:
        """Write the quantized mean (or sum, as the settings say) of bucket ``index`` to ``result``, in stages."""
        assert self._all_reduce is not None
        feedback = None
        if self.settings.error_feedback:
            feedback = self._feedback.get(index)
            if feedback is None or feedback.residual.shape != x.shape:
                feedback = self._feedback[index] = ErrorFeedback(x.numel(), x.device)
        yield from self._all_reduce.stages(x, result, (self._run, order.id, index), feedback)

    def reduce(self, gradient: Tensor, result: Tensor, index: int, group: Group, order: Round) -> Iterator[None]:
        """Average one bucket over all members."""
        return self.quantized_mean(gradient, result, index, order)

    def _replace(self, buckets: Flat, results: Flat, broken: float) -> None:
        """Replace the gradients by the results and, if all are finite, the residuals by the new ones."""
        super()._replace(buckets, results, broken)
        for feedback in () if broken else self._feedback.values():
            feedback.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by bucket, and the members that they belong to."""
        feedback = {index: feedback.state_dict() for index, feedback in self._feedback.items()}
        return {"members": list(self._members), "feedback": feedback}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals."""
        self._members = tuple(state["members"])
        self._feedback = {}
        for index, saved in state["feedback"].items():
            residual = saved["residual"]
            self._feedback[index] = ErrorFeedback(residual.numel(), residual.device)
            self._feedback[index].load_state_dict(saved)
