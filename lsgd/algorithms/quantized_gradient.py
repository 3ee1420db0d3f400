"""What ByteGrad and QSGD share: the two-round all-reduce, and residuals that change only with the step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lsgd.algorithms.base import Flat
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.group import Group
from lsgd.messages import Round
from lsgd.quantized import QuantizedAllReduce
from lsgd.settings import ByteGradSettings, QSGDSettings


class QuantizedGradient(GradientAlgorithm):
    """Base of the gradient methods in 8 bits, with error feedback if wanted.

    A step that some member's NaN or Inf spoils leaves the residuals as they were. They are dropped when the members
    change.
    """

    settings: ByteGradSettings | QSGDSettings

    def __init__(self, settings: ByteGradSettings | QSGDSettings, run: str) -> None:
        super().__init__(settings.bucket_mib)
        self.settings = settings
        self._run = run
        self._members: tuple[str, ...] = ()
        self._residuals: dict[int, Tensor] = {}
        self._new_residuals: dict[int, Tensor] = {}
        self._flags: list[Tensor] = []
        self._all_reduce: QuantizedAllReduce | None = None

    def reset(self, parameters: Flat, group: Group, round: Round) -> None:
        """Drop the residuals if the members are others than before."""
        super().reset(parameters, group, round)
        if round.generation.members != self._members:
            self._members, self._residuals = round.generation.members, {}
        self._new_residuals, self._flags = {}, []
        taking_part = self.quantizing_group(group)
        settings = self.settings
        self._all_reduce = None
        if taking_part is not None:
            self._all_reduce = QuantizedAllReduce(
                taking_part,
                block=settings.block or None,
                rounding=settings.rounding,
                average=settings.average,
            )

    def quantizing_group(self, group: Group) -> Group | None:
        """Return the members that exchange in 8 bits, None for a member that does not."""
        return group

    def quantized_mean(self, x: Tensor, result: Tensor, index: int, round: Round) -> Iterator[None]:
        """Write the quantized mean (or sum, if the settings say so) of bucket ``index`` to ``result``, in stages."""
        assert self._all_reduce is not None
        residual = None
        if self.settings.error_feedback:
            old = self._residuals.get(index)
            if old is None or old.shape != x.shape:
                old = self._residuals[index] = torch.zeros_like(x, dtype=torch.float32)
            residual = self._new_residuals.setdefault(index, torch.empty_like(old))
            residual.copy_(old)
        flags = yield from self._all_reduce.stages(x, result, (self._run, round.id, index), residual)
        self._flags.append(flags)

    def finish(self) -> None:
        """Replace the gradients by the results, and the residuals by the new ones unless the step is spoilt."""
        super().finish()
        if self._new_residuals:
            spoilt = torch.stack(self._flags).any()
            for index, new in self._new_residuals.items():
                old = self._residuals[index]
                old.copy_(torch.where(spoilt, old, new))
        self._flags = []

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by bucket, and the members that they belong to."""
        return {"members": list(self._members), "residuals": dict(self._residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals; the next generation keeps them if its members are the same."""
        self._members = tuple(state["members"])
        self._residuals = {index: residual.clone() for index, residual in state["residuals"].items()}
