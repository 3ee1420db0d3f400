"""What the integrations have in common."""

import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count, islice
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, Sampler

from lsgd.client.loader import EveryNth, ShardSampler, is_plain, length, shuffles
from lsgd.client.worker import Worker
from lsgd.errors import ConfigError, ExchangeError, ServerLostError
from lsgd.protocol.messages import MAX_LOGGED_NAME

logger = logging.getLogger("lsgd")

STATUS_WITHIN_S = 3.0
"""How long a trainer's log waits for the run's state, in seconds."""

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that make trainers use DistributedDataParallel."""


class Integration:
    """Joins the run with a worker's shards of a trainer's data, and skips exchanges while gradients accumulate.

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
        self._stream: ShardStream | None = None
        self._batch_size = 0
        self._muted = ExitStack()

    @property
    def rank(self) -> int:
        """This worker's rank in the run, 0 before training."""
        return self._place()[0]

    @property
    def first(self) -> bool:
        """Whether this worker saves for all; true before training: ``if callback.first:`` and what saves the model."""
        return self._worker is None or self._worker.first

    def _shard(self, loader: Any, seed: int) -> None:
        """Replace a DataLoader's sampler with this worker's shards; a pass keeps its number of batches, all full.

        Shards are shuffled if the sampler does it. Of a sampler that draws other samples than each once, the worker
        gets its part of what that draws.
        """
        if not self._shards:
            return
        self._stream, self._batch_size, batches = None, 0, getattr(loader, "batch_sampler", None)
        if type(batches) is not BatchSampler or length(batches) == math.inf:
            logger.warning(
                "the training data has no sampler that could be sharded, so each worker draws from all of it: pass one "
                "DataLoader of a dataset with a length, or give each worker data of its own and pass %s(shard=False)",
                type(self).__name__,
            )
            return
        self._batch_size, size = batches.batch_size, len(loader.dataset)
        per_pass = len(batches) * self._batch_size
        sampler = sampler_of(loader)
        if is_plain(sampler, size) or type(sampler).__name__ == "LengthGroupedSampler":  # that of transformers
            batches.sampler = self._stream = ShardStream(size, per_pass, self._place, seed, shuffles(sampler))
        else:
            batches.sampler = EndlessSampler(per_pass, _passes(EveryNth(sampler, self._place)))
        batches.sampler.replaces = sampler

    def _join(self, model: nn.Module, optimizers: Any, scaler: Any, step: int) -> Worker:
        """Join the run; ``scaler`` is the trainer's GradScaler, or None; ``step``: how many steps it has made."""
        own = {"lsgd_stream": self._stream, "lsgd_scaler": scaler}
        extra = {**(self._options.get("extra") or {}), **{name: x for name, x in own.items() if x is not None}}
        self._worker = Worker.join(model, optimizers, **{"step": step, **self._options, "extra": extra})
        return self._worker

    def _leave(self) -> None:
        """Leave the run, because the trainer stops; wait for the other trainers if their own steps end the run."""
        assert self._worker is not None
        if self._worker.steps and not self._worker.stopped:
            self._worker.finish()
        else:
            self._worker.leave()

    def _place(self) -> tuple[int, int]:
        """Return the worker's part of the data, and how many there are; (0, 1) before it has joined."""
        return (0, 1) if self._worker is None else self._worker.part

    def _alike(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the means of metrics over all workers, which meet here, so that all decide alike by them."""
        assert self._worker is not None
        names = {name: re.sub(r"[^\w./-]", "_", name)[:MAX_LOGGED_NAME] for name in metrics}
        means = self._worker.mean({names[name]: value for name, value in metrics.items()}) if metrics else {}
        return {name: means[short] for name, short in names.items()}

    def _consume(self) -> None:
        """Count a batch that was trained on."""
        if self._stream is not None:
            self._stream.consume(self._batch_size)

    def _mute(self, accumulates: bool) -> None:
        """Exchange no gradients until the next call if the next backward pass only accumulates them."""
        self._muted.close()
        if accumulates:
            assert self._worker is not None
            self._muted.enter_context(self._worker.no_sync())


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


def say_who_ends(worker: Worker, max_steps: float, limits: str) -> None:
    """Log what ends training: the plan, or the trainer's own number of steps, set by ``limits``."""
    run = worker.plan.run
    ends = [f"{run.iterations} iterations of all workers together"] if run.iterations else []
    ends += [f"{run.seconds:g} s"] if run.seconds else []
    if worker.steps:
        logger.info(
            "%s: the plan has no end, so the run ends with its workers' own steps: this one makes %g (%s), and then "
            "waits for the others",
            *(worker.name, max(0, max_steps - worker.step), limits),
        )
    elif not ends:
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


def sampler_of(loader: Any) -> Any:
    """Return the script's sampler of a DataLoader's batches, also if an earlier training has replaced it."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return getattr(sampler, "replaces", sampler)


class EndlessSampler(Sampler[int]):
    """Endless indices in place of a script's sampler. One pass yields ``per_pass`` of them; the next continues there.

    So the number of a trainer's own steps does not depend on the number of workers.

    Attributes:
        replaces: the script's sampler.
    """

    replaces: object = None

    def __init__(self, per_pass: int, indices: Iterator[int]) -> None:
        self._per_pass, self._indices = per_pass, indices

    def __len__(self) -> int:
        return self._per_pass

    def __iter__(self) -> Iterator[int]:
        return islice(self._indices, self._per_pass)


def _passes(sampler: EveryNth) -> Iterator[int]:
    """Yield a sampler's indices, one pass of it after another, each with an epoch of its own."""
    for epoch in count():
        if not len(sampler):
            raise ConfigError(
                "the training data's sampler draws fewer samples than there are workers, so some have none"
            )
        sampler.set_epoch(epoch)
        yield from sampler


class ShardStream(EndlessSampler):
    """This worker's shards, one epoch of the run after another.

    Args:
        length: length of the dataset.
        per_pass: number of indices in one pass.
        place: callback that returns this worker's current (rank, world size).
        seed: seed of the shards; the same on all workers.
        shuffle: whether each shard is shuffled.

    Raises:
        ConfigError: the dataset has fewer samples than there are workers (when it is iterated).
    """

    def __init__(
        self, length: int, per_pass: int, place: Callable[[], tuple[int, int]], seed: int, shuffle: bool
    ) -> None:
        super().__init__(per_pass, self._deal(0))
        self._shards = ShardSampler(length, place, seed, shuffle)
        self._epoch = 0  # of the oldest sample not yet trained on
        self._consumed = 0  # samples of that epoch's shard trained on
        self._dealt: deque[tuple[int, tuple[int, int]]] = deque()  # lengths and places of the shards from that epoch on
        self._saved: tuple[int, tuple[int, int]] | None = None  # length of the data and place, until the next shard

    def consume(self, samples: int) -> None:
        """Count samples that were trained on; prefetched samples do not count."""
        self._consumed += samples
        while self._dealt and self._consumed >= self._dealt[0][0]:
            self._consumed -= self._dealt.popleft()[0]
            self._epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and of which data and shard."""
        place = self._dealt[0][1] if self._dealt else self._shards.place()
        length, place = self._saved or (self._shards.length, place)
        position = {"epoch": self._epoch, "consumed": self._consumed, "seed": self._shards.seed}
        return {**position, "length": length, "place": list(place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that :meth:`state_dict` returned; in a new epoch, if the shards have changed.

        Whether they have is looked at when the first index is drawn, because this worker may not have joined yet.
        """
        self._epoch, self._consumed = state["epoch"], state["consumed"]
        self._shards.epoch, self._shards.seed = state["epoch"], state["seed"]
        self._saved = (state["length"], (state["place"][0], state["place"][1])) if "length" in state else None
        self._dealt.clear()
        self._indices = self._deal(self._consumed)

    def _begins_anew(self) -> bool:
        """Go to a new epoch if the position that was loaded is in a shard of other data, or of another number of them.

        It may be another worker's, because one saves for all: in their shards all are about as far.
        """
        (length, place), self._saved = self._saved or (self._shards.length, self._shards.place()), None
        if length == self._shards.length and place[1] == self._shards.place()[1]:
            return False
        self._consumed, self._epoch = 0, self._epoch + 1 if length == self._shards.length else 0
        self._shards.epoch = self._epoch
        why = "the number of workers" if length == self._shards.length else "the data"
        logger.warning("%s is not that of the checkpoint: the data is dealt again, from epoch %d on", why, self._epoch)
        return True

    def _deal(self, skip: int) -> Iterator[int]:
        skip = 0 if self._begins_anew() else skip
        while True:
            shard = self._shards.shard().tolist()
            if not shard:
                size = self._shards.place()[1]
                raise ConfigError(f"the dataset has {self._shards.length} samples for {size} workers; some have none")
            self._dealt.append((len(shard), self._shards.place()))
            yield from shard[skip:]
            skip = 0
            self._shards.epoch += 1
