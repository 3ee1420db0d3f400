"""Elastic averaging SGD (EASGD): Zhang, Choromanska, LeCun, arXiv 1412.6651."""

import logging
from typing import Any

import torch
from torch import Tensor

from lsgd.algorithms.base import Algorithm, Flat, all_finite, clones, copy_all, empties
from lsgd.group import Group
from lsgd.messages import Round
from lsgd.settings import ElasticSettings

log = logging.getLogger(__name__)


class ElasticSGD(Algorithm):
    """Workers and a master m attract each other (the paper's equations 3 and 5; beta is its n alpha).

    A round sets ``x ← x + beta/n (m - x)`` and ``m ← m + beta (mean of x - m)``, both from the values before. There
    is no master process: all hold m, and change it alike.
    """

    settings: ElasticSettings

    def __init__(self, settings: ElasticSettings, parameters: Flat) -> None:
        self.settings = settings
        self.master = clones(parameters)
        self._scratch: list[Tensor] = []

    def reset(self, parameters: Flat, group: Group, round: Round) -> None:
        """Make new scratch tensors."""
        self._scratch = empties(self.master)

    @torch.no_grad()
    def before_forward(self, parameters: Flat, group: Group, round: Round | None) -> None:
        """Average the models, then move each to the master and the master to the mean."""
        if round is None:
            return
        finite = all_finite(parameters)
        if not finite:
            log.warning("round %d: this worker's model is not finite; it takes the master's", round.id)
        for x, m, mean in zip(parameters, self.master, self._scratch, strict=True):
            mean.copy_(x if finite else m).div_(group.size)
            group.all_reduce(mean).wait()
        for x, m, mean in zip(parameters, self.master, self._scratch, strict=True):
            if finite:
                x.lerp_(m, self.settings.strength / group.size)
            else:
                x.copy_(m)
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
