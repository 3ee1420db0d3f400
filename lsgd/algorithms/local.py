"""Local SGD (Stich, arXiv 1805.09767) and DiLoCo (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lsgd.algorithms.base import Algorithm, Flat, all_finite, copy_all, empties
from lsgd.algorithms.common import Periodic, block, codec
from lsgd.codecs import codec_of
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.lazy import no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import setting

if TYPE_CHECKING:
    from torch import Tensor

    from lsgd.collectives.group import Group

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalSettings(Periodic):
    """Local SGD (arXiv 1805.09767): models are averaged every period, with an optional outer optimizer."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "local SGD, models averaged every period (arXiv 1805.09767)"

    outer_lr: float = setting(1.0, "learning rate of the outer step; 1 without momentum: the mean", low=0)
    outer_momentum: float = setting(0.0, "Nesterov momentum of the outer step", low=0, high=1)
    compression: str = codec("none", "the models' changes")
    block: int = block()

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """The model's change twice, except the worker's own share."""
        codec = codec_of(self.compression, self.block)
        return 2 * (workers - 1) / workers * numel * codec.element_nbytes / self.schedule().period

    def create(self, parameters: Flat, run: str = "") -> LocalSGD:
        """Return the algorithm."""
        return LocalSGD(self, parameters, run)


@dataclass(frozen=True)
class DiLoCoSettings(LocalSettings):
    """DiLoCo (arXiv 2311.08105): local SGD with an outer Nesterov step, which is ``local`` with other defaults."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "DiLoCo, local SGD with an outer Nesterov step (arXiv 2311.08105)"

    outer_lr: float = setting(0.7, "learning rate of the outer step", low=0)
    outer_momentum: float = setting(0.9, "Nesterov momentum of the outer step", low=0, high=1)


class LocalSGD(Algorithm):
    """Workers train alone; a round uses the mean change of their models as pseudo-gradient of an outer step.

    With c the common model of the last round and d the mean over workers of ``x - c`` (algorithm 1 of DiLoCo, with
    the opposite sign), a round sets ``v ← momentum v + d``, ``c ← c + lr (d + momentum v)`` and ``x ← c``: Nesterov's
    step as in torch.optim.SGD. With ``outer_lr = 1`` and no momentum, c is the mean of the models.

    c and v are float32 (float64 for float64 parameters) and equal on all members. d is sent in the model's dtype, or
    in the codec of ``compression``.
    """

    settings: LocalSettings

    def __init__(self, settings: LocalSettings, parameters: Flat, run: str) -> None:
        self.settings = settings
        self._run = run
        self.common = [x.detach().to(_wide(x), copy=True) for x in parameters]
        self.velocity = [torch.zeros_like(c) for c in self.common]
        self._scratch: list[Tensor] = []
        self._all_reduce: QuantizedAllReduce | None = None

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Make new scratch tensors."""
        self._scratch = empties(parameters)
        codec = codec_of(self.settings.compression, self.settings.block)
        self._all_reduce = None if codec.lossless else QuantizedAllReduce(group, codec)

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round | None) -> None:
        """Average the models' changes and take the outer step."""
        if order is None:
            return
        finite = all_finite(parameters)
        if not finite:
            log.warning("round %d: this worker's model is not finite; it takes the common one", order.id)
        for index, (x, c, change) in enumerate(zip(parameters, self.common, self._scratch, strict=True)):
            torch.sub(x, c, out=change) if finite else change.zero_()
            self._average(change, index, group, order)
        lr, momentum = self.settings.outer_lr, self.settings.outer_momentum
        for x, c, v, change in zip(parameters, self.common, self.velocity, self._scratch, strict=True):
            v.mul_(momentum).add_(change)
            c.add_(change, alpha=lr).add_(v, alpha=lr * momentum)
            x.copy_(c)

    def _average(self, change: Tensor, index: int, group: Group, order: Round) -> None:
        """Replace ``change`` by its mean over all members, with the same bits on all."""
        if self._all_reduce is not None:
            self._all_reduce(change, change, (self._run, order.id, index))
        else:
            change.div_(group.size)
            group.all_reduce(change).wait()

    def shared_state(self) -> list[Tensor]:
        """Return the common model and the outer step's velocity."""
        return [*self.common, *self.velocity]

    def state_dict(self) -> dict[str, Any]:
        """Return the common model and the outer step's velocity."""
        return {"common": self.common, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the common model and the outer step's velocity."""
        copy_all(self.common, state["common"])
        copy_all(self.velocity, state["velocity"])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
