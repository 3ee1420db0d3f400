"""A worker's checkpoints: saved when a round says so, and loaded when a run is resumed."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lsgd.algorithms import Algorithm
from lsgd.client.checkpoint.data_position import DataPosition
from lsgd.client.checkpoint.extras import Extras, Stateful, state_of
from lsgd.client.checkpoint.file import (
    DamagedError,
    Packed,
    from_bytes,
    pack,
    read,
    sweep,
    to_bytes,
    unpack,
    write,
)
from lsgd.client.checkpoint.finite import FiniteCheck, in_words
from lsgd.client.checkpoint.reshard import Resharding, layout_of
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError, NonFiniteError
from lsgd.flat import Layout, describe, written
from lsgd.plan.plan import algorithm_of, table_of
from lsgd.protocol.messages import Origin
from lsgd.run_folder import checkpoint_path, counts, island_sizes, process_name, runs, stage_of
from lsgd.settings import AlgorithmSettings
from lsgd.shards import load_optimizer, local, local_state

logger = logging.getLogger("lsgd")

WHOLE = "whole_model"
"""Key in a file's metadata: digest of the whole model, regardless of sharding."""


@dataclass(frozen=True)
class Snapshot:
    """A worker's state in memory, after the run's iteration ``count``."""

    count: int
    packed: Packed


@dataclass(eq=False)
class Resumed:
    """What a worker has of the checkpoint that it resumes from, beside what it restores; nothing without one.

    Attributes:
        iterations: this worker's, as of then.
        losses: of its last batches then.
        algorithm: settings and state of the run's algorithm then, for the first round; None: there are none that can be
            used, or :meth:`take_algorithm` has returned them.
    """

    iterations: int = 0
    losses: Sequence[float] = ()
    algorithm: tuple[AlgorithmSettings, dict[str, Any]] | None = None

    def take_algorithm(self) -> tuple[AlgorithmSettings, dict[str, Any]] | None:
        """Return ``algorithm``, and keep it no longer: its state is as large as a model."""
        taken, self.algorithm = self.algorithm, None
        return taken


class Own(NamedTuple):
    """What a replica has of its own, packed; or why it cannot be saved."""

    data: bytes = b""
    about: str = ""
    error: str = ""


class Checkpoints:
    """The checkpoints of one worker, one file each (run_folder.py says where).

    Args:
        model: module of which also frozen parameters and non-persistent buffers are saved.
        folder: where to write; None: nowhere.
        resume: where to look for a checkpoint to resume from; None: nowhere.
        stage: the one of the run to which they belong.
        island: processes of this worker; each that has a part of the model writes a file with it. Of replicas the head
            writes for all.

    Attributes:
        extras: the script's objects that it saves.
        data: where this worker is in its data.
        resumed: what this worker has of the checkpoint that it resumes from.
        restarted: whether this worker replaces a process that died in the same run.
        finite: finds tensors of the model that training has made non-finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        extra: Mapping[str, Stateful],
        folder: Path | None,
        resume: Path | None,
        island: Island,
        stage: int = 1,
    ) -> None:
        self.extras, self.data = Extras(optimizers, extra), DataPosition(model, saves=folder is not None)
        self.run = ""
        self.resumed = Resumed()
        self.restarted = False
        self.folder = folder
        self.finite = FiniteCheck(model)
        self._model, self.layout = model, Layout(model)
        self._optimizers = optimizers
        self._resume, self._stage = resume, stage
        self._island = island
        self._about: dict[str, str] = {}
        self._is_finite = True  # as of the last snapshot

    # -- resuming ----------------------------------------------------------------------------------------------

    def load(self, worker: str, digest: str, summary: str) -> Origin:
        """Restore the worker's last undamaged checkpoint; return its origin.

        All workers that see a folder look through its runs in the same order: the run that any worker wrote to last
        comes first. In each run, the worker's own files are tried from the highest count down.

        All processes of an island restore the same checkpoint, of which all files are undamaged. If it was written by
        another number of processes, the model is resharded.

        Raises:
            ConfigError: all checkpoints are damaged (no error for a restarted worker: the run continues and has the
                model), or one is of another model or version, or does not fit.
        """
        island, folder, parts = self._island, self._resume, self._island.shards
        name, whole = process_name(worker, island.shard, parts), describe(self._model, whole=True)[0]
        self._about = {"worker": name, "model": digest, "model_summary": summary, WHOLE: whole}
        if folder is None:
            return Origin()
        saved = _found(folder, worker, parts)  # the same in all processes: nobody writes for this worker now
        found = [each for each in saved if stage_of(each[0].run) == self._stage]
        for origin, size in found:
            names = [name] if size == parts else [process_name(worker, rank, size) for rank in range(size)]
            paths = [checkpoint_path(folder, origin.run, origin.iterations, each) for each in names]
            path, damage = paths[0], None
            try:
                state = read(path, digest, summary) if size == parts else self._resharded(paths)
            except DamagedError as error:
                damage = error
            undamaged = (origin, size, True)
            if any(each != undamaged for each in island.gather("looks for checkpoints", (origin, size, not damage))):
                damage = damage or DamagedError(f"the checkpoint {path} is damaged in another process of its worker")
                if origin is found[-1][0] and not self.restarted:
                    raise damage
                logger.warning("%s; trying the one before it, if there is one", damage)
                continue
            self._restore(state, path)
            logger.info(
                "%s resumes from %s: %d iterations, %d of them its own",
                *(worker, path, origin.iterations, self.resumed.iterations),
            )
            return origin
        if found or not saved:
            logger.warning(
                "%s has no undamaged checkpoint in %s: it takes over the model of workers that have one", worker, folder
            )
        return Origin()

    def _resharded(self, paths: list[Path]) -> dict[str, Any]:
        """Return this process's state from files that another number of processes wrote."""
        resharding = Resharding(self._model, self.layout, self._optimizers)
        for path in paths:  # one at a time: each is as large as a process's state
            resharding.add(read(path, self._about[WHOLE], self._about["model_summary"], WHOLE), path)
        return resharding.state

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        if len(state["optimizers"]) != len(self._optimizers):
            raise ConfigError(
                f"the checkpoint {path} has the state of {len(state['optimizers'])} optimizers, and this worker has "
                f"{len(self._optimizers)}; join with those that it was written with, or begin a new run"
            )
        for optimizer, kind, saved in zip(self._optimizers, state["optimizer_kinds"], state["optimizers"], strict=True):
            _load_optimizer(optimizer, kind, saved, path)
        with torch.no_grad():
            for name, tensor in self._tensors():
                if tensor.shape != (saved := state["model"][name]).shape:  # a buffer that training has made longer
                    tensor.data = torch.empty_like(saved, device=tensor.device)
                tensor.copy_(saved)
        state |= self._own_of(state)
        self.extras.restore(state["extra"], path)
        self.data.restore(state)
        self.resumed = Resumed(state["iterations"], state["losses"], _algorithm_in(state["algorithm"], path))

    def _own_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint of replicas has of this process; if it has nothing, what starts over."""
        rank, others = self._island.rank, state.get("others", ())
        if rank == self._island.shard:
            return {}
        if len(others) == self._island.size - 1:
            return dict(others[rank - 1])
        return {"loaders": [position | {"place": []} for position in state["loaders"]], "random": {}, "between": None}

    # -- saving ------------------------------------------------------------------------------------------------

    def start(self, run: str) -> None:
        """Write for this run from now on; delete files that earlier processes of this worker left unfinished."""
        self.run = run
        if self.folder is not None:
            sweep(self.folder, self._about["worker"])

    def last(self) -> Path | None:
        """Return the worker's last checkpoint in its folder, or None."""
        if self.folder is None or not (found := _origins(self.folder, self._about["worker"])):
            return None
        return checkpoint_path(self.folder, found[0].run, found[0].iterations, self._about["worker"])

    def non_finite_error(self) -> NonFiniteError | None:
        """Return the error if the model is not finite at the end of the run, or of the script, else None."""
        broken, _ = self._look()
        if not (values := in_words(broken)):
            return None
        last = self.last()
        return NonFiniteError(
            f"the model at the end of the run is not finite: {values}; lower the learning rate (on a resume "
            f"without a schedule, after Worker.join, since a checkpoint has its own), and "
            + (f"resume from {last} with lsgd launch --resume (RESUME=1)" if last else "begin a new run")
        )

    def take(self, count: int, algorithm: Algorithm, losses: Sequence[float], done: int) -> Snapshot | None:
        """Copy the current state, for :meth:`save`; None if it cannot be saved, or there is no folder.

        It cannot if the model is not finite, or if an optimizer or an extra has what no file holds; a warning says so.
        """
        if self.folder is None:
            return None
        own = {**self.data.state(), "losses": list(losses), "extra": self.extras.states()}
        broken, others = self._look(own)
        if not self._check_finite(count, broken):
            return None
        state = {
            **own,
            "model": dict(self._tensors()),
            "optimizers": local_state([state_of(optimizer) for optimizer in self._optimizers]),
            "optimizer_kinds": [type(optimizer).__name__ for optimizer in self._optimizers],
            "algorithm": {"settings": table_of(algorithm.settings), "state": algorithm.state_dict()},
            "iterations": self.resumed.iterations + done,
            "layout": layout_of(self.layout),
        }
        try:
            if errors := [each.error for each in others if each.error]:
                raise TypeError(errors[0])
            if self._island.replicas:
                state["others"] = (
                    [unpack(from_bytes(each.data, each.about)) for each in others[1:]] if self.writes else []
                )
            return Snapshot(count, pack(state)) if self.writes else None
        except TypeError as error:
            logger.warning(
                "no checkpoint is written: %s, and a checkpoint holds numbers, texts, and tensors in the dtypes of "
                "safetensors only; training continues, and the model can be saved, but a resume begins anew",
                error,
            )
            return None

    @property
    def writes(self) -> bool:
        """Whether this process writes a file: of replicas only the head does."""
        return self._island.rank == self._island.shard

    def save(self, snapshot: Snapshot | None) -> Path | None:
        """Write a snapshot, if there is one; a failure only logs a warning."""
        if snapshot is None:
            return None
        assert self.folder is not None
        count = snapshot.count
        try:
            path = write(self.folder, self.run, count, self._about["worker"], snapshot.packed, self._about)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "the checkpoint of %d iterations cannot be written to %s: %s; training continues, and the next one is "
                "tried again: free space there, or let this user write there",
                *(count, self.folder, error),
            )
            return None
        logger.info("checkpoint of %d iterations: %s", count, path)
        return path

    def _look(self, own: dict[str, Any] | None = None) -> tuple[dict[str, int], list[Own]]:
        """Return the number of non-finite values by tensor over all processes, and what each has of its ``own``."""
        said = self._island.gather("looks at its model", (self.finite.broken(), self._packed(own)))
        broken = Counter[str]()
        for each, _ in said:
            broken = broken | Counter(each) if self._island.replicas else broken + Counter(each)
        return broken, [each for _, each in said]

    def _packed(self, own: dict[str, Any] | None) -> Own:
        """Return a replica's own state; the head, and a process that has a file of its own, need not send theirs."""
        if own is None or self.writes:
            return Own()
        try:
            return Own(*to_bytes(pack(own)))
        except TypeError as error:
            return Own(error=str(error))

    def _check_finite(self, count: int, broken: Mapping[str, int]) -> bool:
        """Return whether the model is finite; warn the first time it is not."""
        words = in_words(broken)
        if words and self._is_finite:
            last = self.last()
            logger.warning(
                "no checkpoint of %d iterations is written: the model is not finite: %s; %s",
                *(count, words, f"{last} stays the last one" if last else "there is none before it"),
            )
        self._is_finite = not words
        return self._is_finite

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, x in chain(self._model.named_parameters(), self._model.named_buffers()):
            yield from ((f"{name}/{i}" if i else name, part) for i, part in enumerate(written(local(x))))


def _algorithm_in(saved: dict[str, Any], path: Path) -> tuple[AlgorithmSettings, dict[str, Any]] | None:
    """Return the algorithm's settings and state, for a run with the same one; None for want of its package."""
    try:
        return algorithm_of(saved["settings"], f"the checkpoint {path}"), saved["state"]
    except ConfigError as error:
        logger.warning("%s; its algorithm's state is not used", error)
        return None


def _origins(folder: Path, process: str) -> list[Origin]:
    return [Origin(count, run) for run in runs(folder) for count in reversed(counts(folder, run, process))]


def _found(folder: Path, worker: str, size: int) -> list[tuple[Origin, int]]:
    """Return a worker's checkpoints, each with its number of processes; on a tie those of ``size`` first."""
    sizes = island_sizes(folder, worker)
    every = [(origin, s) for s in sizes for origin in _origins(folder, process_name(worker, 0, s))]
    order = {run: place for place, run in enumerate(runs(folder))}
    return sorted(every, key=lambda each: (order[each[0].run], -each[0].iterations, each[1] != size))


def _load_optimizer(optimizer: torch.optim.Optimizer, kind: str, saved: dict[str, Any], path: Path) -> None:
    here = type(optimizer).__name__
    if kind != here:
        raise ConfigError(
            f"the checkpoint {path} has the state of the optimizer {kind}, and this worker's is {here}; join with "
            f"{kind}, or begin a new run"
        )
    try:
        load_optimizer(optimizer, saved)
    except (ValueError, KeyError) as error:
        why = f"its state has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"the checkpoint {path} does not fit the optimizer {here}: {why}; join with the optimizer that it was "
            f"written with, or begin a new run"
        ) from None
