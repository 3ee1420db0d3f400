"""Finds torch's learning-rate schedulers that are longer than what a worker makes of a run."""

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

LOOK_AFTER = 10
"""After how many iterations a worker looks: then a scheduler that counts iterations has counted these."""

ENOUGH = 0.9
"""Share of a scheduler that is as good as all of it."""

_LENGTHS = ("T_max", "total_steps", "total_iters")  # of torch's own, all in calls of step()


def cut_short(optimizers: Sequence[torch.optim.Optimizer], steps: float) -> str:
    """Return the first scheduler that ``steps`` iterations do not cover, and its length, in words; empty if none."""
    for scheduler in (s for o in optimizers for s in _attached(o)):
        length = length_of(scheduler)
        if length is not None and _calls(scheduler) >= LOOK_AFTER - 1 and steps < ENOUGH * length:
            share = f"{100 * steps / length:.0f} %"
            return f"{type(scheduler).__name__} is made for {length:g} steps, so it would cover {share} of itself"
    return ""


def _attached(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield an optimizer's schedulers. Nothing lists them, but torch marks the step of an optimizer that has some."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        holders = gc.get_referrers(optimizer)
        holders += gc.get_referrers(*(x for x in holders if isinstance(x, dict)))  # after state_dict(), by its __dict__
        yield from (x for x in holders if isinstance(x, lr_scheduler.LRScheduler) and x.optimizer is optimizer)


def _calls(scheduler: Any) -> int:
    """Return how often its step() was called, without the first one, which is its constructor's."""
    return int(getattr(scheduler, "_step_count", 0)) - 1


def length_of(scheduler: Any) -> float | None:
    """Return how many calls of step() a scheduler is made for; None if it does not say."""
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.LambdaLR):  # those of transformers
        functions = [f.keywords for f in scheduler.lr_lambdas if isinstance(f, functools.partial)]
        return max((f["num_training_steps"] for f in functions if "num_training_steps" in f), default=None)
    return next((length for name in _LENGTHS if isinstance(length := getattr(scheduler, name, None), int)), None)
