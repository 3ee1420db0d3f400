"""Sums of models that exclude non-finite ones."""

from __future__ import annotations

import logging

from lsgd.algorithms.base import Flat, copy_all, copy_judged, zero_unless
from lsgd.lazy import Tensor

log = logging.getLogger(__name__)


def empty_sums(parameters: Flat) -> list[Tensor]:
    """Return a scratch tensor for each of ``parameters``, with one more element, which counts excluded models."""
    return [x.new_empty(x.numel() + 1) for x in parameters]


def contribute(parameters: Flat, sums: Flat, finite: Tensor | None) -> Tensor:
    """Write this worker's model to ``sums``; if it is not ``finite``, zeros with a one in the last element.

    Returns whether it is finite; with None it is looked at in the same pass.
    """
    copies = [total[:-1] for total in sums]
    if finite is None:
        finite = copy_judged(copies, parameters)
    else:
        copy_all(copies, parameters)
    for copy, total in zip(copies, sums, strict=True):
        zero_unless(finite, copy)
        total[-1:].copy_(~finite)
    return finite


def divide(sums: Flat, models: int) -> Tensor:
    """Turn sums over ``models`` models, including excluded ones, into means; return whether any was finite."""
    usable = models - sums[0][-1]
    for total in sums:
        total.div_(usable.clamp(min=1).to(total))
    return usable > 0


def tell(round_id: int) -> None:
    """Log that this worker's model is not finite."""
    log.warning("round %d: this worker's model is not finite and is excluded from the mean", round_id)
