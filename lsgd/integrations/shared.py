"""Code that the integrations with other libraries' trainers share."""

import logging
import os
from typing import Any

from lsgd.client.worker import Worker
from lsgd.errors import ConfigError

logger = logging.getLogger("lsgd")

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that make trainers use DistributedDataParallel."""


def refuse_distributed(trainer: str) -> None:
    """Reject an environment in which a trainer would set up distributed training.

    Raises:
        ConfigError: it has the variables of torchrun.
    """
    if found := [name for name in DISTRIBUTED if name in os.environ]:
        raise ConfigError(
            f"with {', '.join(found)} in the environment {trainer} uses DistributedDataParallel, and lsgd takes "
            f"its place: start the script by `lsgd launch -- python SCRIPT` instead of torchrun or accelerate "
            f"launch; or `unset {' '.join(DISTRIBUTED)}`, and set LSGD_LOCAL_RANK"
        )


def place(worker: Worker | None) -> tuple[int, int]:
    """Return a worker's current (rank, world size); (0, 1) before it has joined."""
    return (0, 1) if worker is None else (worker.rank, worker.world_size)


def is_saver(worker: Worker) -> bool:
    """Whether this worker is the one that saves: rank 0 at the end, before that the first that has not left the run."""
    if worker.stopped:
        return worker.rank == 0
    # Not rank 0: while a worker pauses, the others' ranks do not count it.
    members = [each["worker"] for each in worker.status()["members"] if each["state"] != "left"]
    return worker.name in members[:1]


def state_of_run(worker: Worker) -> dict[str, Any]:
    """Return the run's state for a trainer's log: progress, round and leader, and the consensus distance."""
    state: dict[str, Any] = {"lsgd_progress": round(worker.progress, 4)}
    if worker.consensus_distance is not None:
        state["lsgd_consensus_distance"] = worker.consensus_distance
    if not worker.stopped:
        status = worker.status()
        state["lsgd_round"] = status["rounds_global"]
        leaders = [each["worker"] for each in status["leaders"] if each["scope"] == "global"]
        state["lsgd_leader"] = leaders[-1] if leaders else ""
    return state


def say_who_ends(worker: Worker, max_steps: float, limits: str) -> None:
    """Log what ends training: the plan, or the trainer's own number of steps, set by ``limits``."""
    run = worker.plan.run
    ends = [f"{run.iterations} iterations of all workers together"] if run.iterations else []
    ends += [f"{run.seconds:g} s"] if run.seconds else []
    if not ends:
        logger.warning(
            "%s: the plan has no end, so this worker leaves after %g steps of its own (%s)",
            *(worker.name, max_steps, limits),
        )
    elif max_steps * worker.world_size < run.iterations:
        logger.warning(
            "%s leaves after %g steps of its own (%s), before the run's end after %s; max_steps = %d leaves the end "
            "to the run",
            *(worker.name, max_steps, limits, " or ".join(ends), run.iterations),
        )
    else:
        logger.info(
            "%s: the run ends after %s, and stops the trainer, or %g steps of this worker (%s) do, whichever is first",
            *(worker.name, " or ".join(ends), max_steps, limits),
        )
