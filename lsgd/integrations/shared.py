"""What the integrations have in common: a worker whose steps begin and end where another library's loop says so."""

import logging
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from lsgd.client.data.trainers import TrainerData
from lsgd.client.worker import Worker
from lsgd.errors import ConfigError, ExchangeError, ServerLostError
from lsgd.protocol.messages import MAX_LOGGED_NAME

logger = logging.getLogger("lsgd")

STATUS_WITHIN_S = 3.0
"""How long a trainer's log waits for the run's state, in seconds."""

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that make trainers use DistributedDataParallel."""


class LedWorker(Worker):
    """A worker whose steps another library's loop begins and ends."""


class Integration:
    """A loop of another library as a worker: its hooks call these methods, and docs/design.md says which calls what.

    Args:
        trainer: name of what sets up distributed training if the variables of torchrun are there.
        shards: whether to deal the training data to the workers.
        options: options of :meth:`lsgd.client.Worker.join`.

    Raises:
        ConfigError: the environment has the variables of torchrun.
    """

    def __init__(self, trainer: str, shards: bool, options: dict[str, Any]) -> None:
        if found := [name for name in DISTRIBUTED if name in os.environ]:
            raise ConfigError(
                f"with {', '.join(found)} in the environment {trainer} uses DistributedDataParallel, and lsgd takes "
                f"its place: start the script by `lsgd launch -- python SCRIPT` instead of torchrun or accelerate "
                f"launch; or `unset {' '.join(DISTRIBUTED)}`, and set LSGD_LOCAL_RANK"
            )
        self._worker: Worker | None = None
        self._shards = shards
        self._options = options
        self._data: TrainerData | None = None

    @property
    def _joined(self) -> Worker:
        assert self._worker is not None, "the worker joins when training begins"
        return self._worker

    @property
    def rank(self) -> int:
        """This worker's rank in the run, 0 before training."""
        return 0 if self._worker is None else self._worker.part[0]

    @property
    def first(self) -> bool:
        """Whether this worker saves for all; true before training: ``if callback.first:`` and what saves the model."""
        return self._worker is None or self._worker.first

    # -- the beginning -----------------------------------------------------------------------------------------

    def _join(self, model: nn.Module, optimizers: Any, scaler: Any, step: int) -> Worker:
        """Join the run; ``scaler`` is the trainer's GradScaler, or None; ``step``: how many steps it has made."""
        extra = {**(self._options.get("extra") or {}), **({} if scaler is None else {"lsgd_scaler": scaler})}
        self._worker = LedWorker.join(model, optimizers, **{"step": step, **self._options, "extra": extra})
        return self._worker

    def _shard(self, loaders: Any, seed: int, begin_at: dict[str, Any] | None = None) -> None:
        """Let the worker draw its part of the training data, if it is to: see :meth:`lsgd.client.Worker.divide`."""
        self._data = self._joined.divide(loaders, seed, begin_at) if self._shards else None

    def _expect(self, steps: float, limits: str, *, counts: bool = True) -> None:
        """Note how many steps the trainer makes, and log what ends training.

        If the plan has no end, they end the run, and a worker that is started again goes on where the others are.
        ``counts``: whether each of them is an iteration; ``limits``: what sets their number.
        """
        worker, run = self._joined, self._joined.plan.run
        if not run.has_end and counts and 0 < steps < math.inf:
            worker.steps = int(steps)
        if worker.steps:
            logger.info(
                "%s: the plan has no end, so the run ends with its workers' own steps: this one makes %d (%s), and "
                "then waits for the others",
                *(worker.name, max(0, worker.steps - worker.step), limits),
            )
            return
        ends = [f"{run.iterations} iterations of all workers together"] * bool(run.iterations)
        ends += [f"{run.seconds:g} s"] * bool(run.seconds)
        is_early = not ends or 0 <= steps * worker.world_size < run.iterations
        logger.log(
            logging.WARNING if is_early else logging.INFO,
            "%s leaves after %g steps of its own (%s); %s%s",
            *(worker.name, steps if steps >= 0 else math.inf, limits),
            f"the run ends after {' or '.join(ends)}, if that is first" if ends else "the plan has no end",
            f"; max_steps = {run.iterations} leaves the end to the run" if is_early and ends else "",
        )

    # -- steps -------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Begin a step, and end the one before; return False if there is none: the trainer is to stop.

        It leaves if the trainer's own steps are made, as those of a worker that is resumed, or late, may be.
        """
        worker = self._joined
        worker.close_step()
        if 0 < worker.steps <= worker.step:
            self._leave()
            return False
        return worker.begin_step()

    def _consume(self) -> None:
        """Count a batch that was trained on."""
        if self._data is not None:
            self._data.consume()

    def _scheduled(self, done: int, steps: float, length: int) -> int:
        """Return how many of ``length`` steps a scheduler is to have made, by the run's progress.

        ``done`` of the trainer's own ``steps`` are made.
        """
        worker = self._joined  # without a length in the plan, the run's progress falls when a fast worker leaves
        run = worker.step * length // worker.steps if worker.steps else int(worker.progress * length)
        return min(length, max(run, int(done * length / steps)))

    # -- evaluation, and saving --------------------------------------------------------------------------------

    def _alike(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the means of metrics over all workers, which meet here, so that all decide alike by them."""
        names = {name: re.sub(r"[^\w./-]", "_", name)[:MAX_LOGGED_NAME] for name in metrics}
        means = self._joined.mean({names[name]: value for name, value in metrics.items()}) if metrics else {}
        return {name: means[short] for name, short in names.items()}

    # -- the end -----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Leave the run, because the trainer stops; wait for the other trainers if their own steps end the run."""
        if self._joined.steps and not self._joined.stopped:
            self._joined.finish()
        else:
            self._joined.leave()

    def _close(self, error: BaseException | None) -> None:
        """End training as the end of ``with Worker.join(...)`` does: it tells the run of an error."""
        if self._worker is not None:
            self._worker.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def is_saver(worker: Worker) -> bool:
    """Whether this worker saves: at the end ``worker.first``, before that the first that has not left the run."""
    if worker.stopped:
        return worker.first
    # Not rank 0: while a worker pauses, the others' ranks do not count it.
    status = _status(worker)
    members = [each["worker"] for each in status["members"] if each["state"] != "left"] if status else []
    return worker.name in members[:1]


def state_of_run(worker: Worker) -> dict[str, Any]:
    """Return the run's state for a trainer's log: progress, round and leader, and the consensus distance."""
    state: dict[str, Any] = {"lsgd_progress": round(worker.progress, 4)}
    if worker.consensus_distance is not None:
        state["lsgd_consensus_distance"] = worker.consensus_distance
    if not worker.stopped and (status := _status(worker)):
        state["lsgd_round"] = status["rounds_global"]
        leaders = [each["worker"] for each in status["leaders"] if each["scope"] == "global"]
        if worker.plan.run.leads(worker.algorithm):
            state["lsgd_leader"] = leaders[-1] if leaders else ""
    return state


def _status(worker: Worker) -> dict[str, Any] | None:
    """Return the run's state; None if the servers do not say it soon: training goes on without them for a while."""
    try:
        return worker.status(timeout_s=STATUS_WITHIN_S)
    except (ExchangeError, ServerLostError):
        return None
