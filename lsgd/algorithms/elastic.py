"""Elastic averaging SGD (EASGD): Zhang, Choromanska, LeCun, arXiv 1412.6651."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from lsgd.algorithms.base import Algorithm, Commit, Flat, chosen, clones, copy_all, empties
from lsgd.algorithms.common import Periodic
from lsgd.collectives.group import Group
from lsgd.lazy import Tensor, no_grad
from lsgd.protocol.messages import Round
from lsgd.settings import setting

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ElasticSettings(Periodic):
    """EASGD (arXiv 1412.6651): workers and a master model, which all of them hold, attract each other."""

    name: ClassVar[str] = "elastic"
    summary: ClassVar[str] = "elastic averaging SGD (arXiv 1412.6651)"
    islands: ClassVar[bool] = True

    strength: float = setting(
        0.43, "beta: how far the master moves toward the mean; a worker moves by beta / workers", low=0, high=1
    )

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """The model twice, except the worker's own share."""
        return 2 * (workers - 1) / workers * 4 * numel / self.schedule().period

    def create(self, parameters: Flat, run: str = "") -> ElasticSGD:
        """Return the algorithm."""
        return ElasticSGD(self, parameters)


class ElasticSGD(Algorithm):
    """Workers and a master m attract each other (the paper's equations 3 and 5; beta is its n alpha).

    A round sets ``x ← x + beta/n (m - x)`` and ``m ← m + beta (mean of x - m)``, both from the old values. There
    is no master process: every worker holds m and applies the same change.
    """

    settings: ElasticSettings

    def __init__(self, settings: ElasticSettings, parameters: Flat) -> None:
        self.settings = settings
        self.master = clones(parameters)

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Average the models, to move each toward the master and the master toward the mean."""
        finite = self.is_finite(parameters)
        means = empties(self.master)
        for x, m, mean in zip(parameters, self.master, means, strict=True):
            mean.copy_(chosen(finite, x, m)).div_(group.size)
            group.all_reduce(mean).wait()
        return Commit(partial(self._attract, parameters, means, group.size, order), (~finite,))

    def _attract(self, parameters: Flat, means: Flat, members: int, order: Round, broken: float) -> None:
        """Move each model toward the master, or to it if the model is ``broken``, and the master toward the mean."""
        self.replaced = bool(broken)
        share = 1.0 if broken else self.settings.strength / members
        if broken:
            log.warning("round %d: this worker's model is not finite and is replaced by the master", order.id)
        for x, m, mean in zip(parameters, self.master, means, strict=True):
            x.copy_(m) if share == 1.0 else x.lerp_(m, share)
            m.lerp_(mean, self.settings.strength)

    def shared_state(self) -> list[Tensor]:
        """Return the master."""
        return self.master

    def state_dict(self) -> dict[str, Any]:
        """Return the master."""
        return {"master": self.master}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the master."""
        copy_all(self.master, state["master"])
