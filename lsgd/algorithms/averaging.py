"""Sums of models that exclude non-finite ones."""

from __future__ import annotations

import logging

from lsgd.algorithms.base import Flat
from lsgd.lazy import Tensor

log = logging.getLogger(__name__)


def empty_sums(parameters: Flat) -> list[Tensor]:
    """Return a scratch tensor for each of ``parameters``, with one more element, which counts excluded models."""
    return [x.new_empty(x.numel() + 1) for x in parameters]


def contribute(parameters: Flat, sums: Flat, round_id: int, *, finite: bool) -> None:
    """Write this worker's model to ``sums``; if it is not ``finite``, zeros with a one in the last element."""
    if not finite:
        log.warning("round %d: this worker's model is not finite and is excluded from the mean", round_id)
    for x, total in zip(parameters, sums, strict=True):
        total[:-1].copy_(x) if finite else total[:-1].zero_()
        total[-1] = 0.0 if finite else 1.0


def divide(sums: Flat, models: int) -> bool:
    """Turn sums over ``models`` models, including excluded ones, into means; return whether any was finite."""
    usable = models - int(sums[0][-1])
    for total in sums if usable else ():
        total.div_(usable)
    return usable > 0
