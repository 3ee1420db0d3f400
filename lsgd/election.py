"""Who leads a round: one rule for the servers and for simulated workers."""

import hashlib
import math

RULES = ("random", "progress", "probe", "loss")
"""By lot; the lowest loss relative to the worker's usual one; the lowest loss on a batch that all share; the lowest
loss (Leader SGD's paper)."""

USUAL_SHARE = 0.25
"""Weight of a new loss in a worker's usual one."""


def usual_loss(before: float | None, loss: float) -> float:
    """Return the exponentially weighted mean of a worker's finite losses at its rounds; None: there was none."""
    return loss if before is None else before + USUAL_SHARE * (loss - before)


def standing(rule: str, loss: float, usual: float | None, lot: str) -> tuple[bool, float]:
    """Return a candidate's standing in an election by one of :data:`RULES`; the lowest wins.

    ``loss`` is that of its batches, under ``probe`` of its probe; infinite if none is finite, which puts it last.
    ``lot`` names the run, the round and the candidate, so that every machine draws the same.
    """
    lossless = math.isinf(loss)
    if rule == "random":
        return lossless, int.from_bytes(hashlib.blake2b(lot.encode(), digest_size=6).digest())
    if rule in ("loss", "probe"):
        return lossless, loss
    if lossless or usual is None:
        return lossless, 0.0
    return False, (loss - usual) / (abs(usual) or 1.0)
