"""A worker's checkpoints: saved when a round says so, and loaded when a run is resumed."""

import copy
import logging
import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree

from lsgd.algorithms import Algorithm
from lsgd.algorithms.base import all_finite
from lsgd.client.checkpoint.file import (
    DamagedError,
    Packed,
    Unsaved,
    from_bytes,
    pack,
    read,
    sweep,
    to_bytes,
    unpack,
    write,
)
from lsgd.client.checkpoint.reshard import Resharding, layout_of
from lsgd.client.control.island import Island
from lsgd.errors import ConfigError, NonFiniteError
from lsgd.flat import Layout, describe, named_floating_buffers, written, written_buffers
from lsgd.plan.plan import algorithm_of, table_of
from lsgd.protocol.messages import Origin
from lsgd.run_folder import checkpoint_path, counts, island_sizes, process_name, runs, stage_of
from lsgd.schedulers import Rates, bring, count_of, hold, inner
from lsgd.schedulers import counts as counts_steps
from lsgd.settings import AlgorithmSettings
from lsgd.shards import load_optimizer, local, local_state

logger = logging.getLogger("lsgd")

NAMED = 3
"""How many tensors a message names."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

COUNT = "lsgd_steps"
"""The only entry in what newcomers take over of a scheduler."""

RATES = "lsgd_rates"
"""Name of the run's learning rates among the objects to save."""

WHOLE = "whole_model"
"""Key in a file's metadata: digest of the whole model, regardless of sharding."""


class Stateful(Protocol):
    """What can be saved: a GradScaler, a learning-rate scheduler, or any object with these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: dicts, lists, tuples, tensors, texts, numbers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore what :meth:`state_dict` returned."""
        ...


class Positioned(Protocol):
    """What has a position in the data, like the loaders that ``Worker.loader`` makes."""

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds; ``place`` is the rank and the world size of the shard."""
        ...

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in this data."""
        ...

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue there."""
        ...


P = TypeVar("P", bound=Positioned)

Noted: TypeAlias = "tuple[weakref.ref[Positioned], dict[str, Any]]"
"""A loader and a position of it."""


@dataclass(frozen=True)
class Snapshot:
    """A worker's state in memory, after the run's iteration ``count``."""

    count: int
    packed: Packed


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
        iterations: this worker's iterations at the checkpoint it resumed from.
        losses: losses of its last batches then.
        algorithm: settings and state of the algorithm then; None without a checkpoint.
        restarted: whether this worker replaces a process that died in the same run.
        finite: finds tensors of the model that training has made non-finite.
        rates: the run's learning rates, to compare with.
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
        for name, thing in extra.items():
            _check_stateful(name, thing)
        self.rates = Rates(optimizers)
        self.run = ""
        self.iterations = 0
        self.losses: list[float] = []
        self.algorithm: tuple[AlgorithmSettings, dict[str, Any]] | None = None
        self.restarted = False
        self.folder = folder
        self.finite = FiniteCheck(model)
        self._model, self.layout = model, Layout(model)
        self._optimizers = optimizers
        self._extra: dict[str, Stateful] = {RATES: self.rates, **extra}
        self._of_run = {RATES}  # names of those that newcomers take over
        self._saved_extra: dict[str, Any] = {}  # of a checkpoint or of the source, whatever has joined
        self._resume, self._stage = resume, stage
        self._island = island
        self._about: dict[str, str] = {}
        self._random: dict[str, Any] = {}
        self._between: dict[str, Any] | None = None  # the same, before anything was drawn for the step; {}: no other
        self._positions: list[dict[str, Any]] = []  # of loaders that do not exist yet
        self._misfit = False  # whether a loader was told that none of them is its own
        self._loaders: list[weakref.ref[Positioned]] = []
        self._noted: list[Noted] | None = None
        self._path: Path | None = None  # of the checkpoint that was restored
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
                *(worker, path, origin.iterations, self.iterations),
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
        state, self._path = state | self._own_of(state), path
        self._saved_extra = state["extra"]
        for name, thing in self._extra.items():
            self._restore_extra(name, thing)
        self._restore_algorithm(state["algorithm"], path)
        self.iterations, self.losses = state["iterations"], state["losses"]
        self._random, self._positions = state["random"], state["loaders"]
        self._between = state.get("between")

    def _own_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint of replicas has of this process; if it has nothing, what starts over."""
        rank, others = self._island.rank, state.get("others", ())
        if rank == self._island.shard:
            return {}
        if len(others) == self._island.size - 1:
            return dict(others[rank - 1])
        return {"loaders": [position | {"place": []} for position in state["loaders"]], "random": {}, "between": None}

    def _restore_algorithm(self, saved: dict[str, Any], path: Path) -> None:
        """Keep the algorithm's state for a run with the same one; another run needs neither it nor its package."""
        try:
            self.algorithm = algorithm_of(saved["settings"], f"the checkpoint {path}"), saved["state"]
        except ConfigError as error:
            logger.warning("%s; its algorithm's state is not used", error)

    def restore_random(self) -> None:
        """Restore the checkpoint's random state. Called when the first batch is drawn, as at saving."""
        if self._random:
            _set_random_state(self._random, next(self._model.parameters()).device)
            self._random = {}

    def restore_between(self) -> None:
        """Restore the random state between two steps, for a script that draws its data itself: it draws it again."""
        if self._between:
            _set_random_state(self._between, next(self._model.parameters()).device)
        elif self._between is not None:
            self.restore_random()

    def attend_extra(self, name: str, thing: Stateful, *, of_run: bool = False) -> None:
        """Save this object from now on, as those of the join; restore it, if there is a state of it.

        What is ``of_run``, newcomers take over from a member, as they do schedulers and GradScalers.
        """
        _check_stateful(name, thing)
        if (taken := self._extra.get(name)) is not None:
            raise ConfigError(f"there is an extra {name!r}, a {type(taken).__name__}; choose another name")
        self._extra[name] = thing
        if of_run:
            self._of_run.add(name)
        if self._path is not None or name in self._saved_extra:
            self._restore_extra(name, thing)

    def follow_extra(self, thing: Stateful) -> None:
        """Attend to an object of the run under a name of its own: its class, and how many there are before it."""
        kind = type(thing).__name__
        _check_stateful(kind, thing)
        if all(each is not thing for each in self._extra.values()):
            taken = sum(name.startswith(f"{kind} ") for name in self._of_run)
            self.attend_extra(f"{kind} {taken}", thing, of_run=True)

    def _restore_extra(self, name: str, thing: Stateful) -> None:
        if name in self._saved_extra:
            _load(thing, self._saved_extra.pop(name))
        elif name != RATES:
            logger.warning("the checkpoint %s has no extra %r: it stays as it is", self._path, name)

    def shared(self) -> Packed:
        """Return what newcomers take over from this member, packed; a state that cannot be is left out.

        Of a scheduler it is how many steps it has made: its rates are each worker's own.
        """
        states: dict[str, Any] = {}
        for name, thing in self._extra.items():
            if counts_steps(scheduler := inner(thing)):
                states[name] = {COUNT: count_of(scheduler)}
            elif name in self._of_run or isinstance(thing, torch.amp.GradScaler):
                try:
                    states[name] = unpack(pack(thing.state_dict()))
                except TypeError as error:
                    logger.warning("newcomers do not take over %r: %s", name, error)
        return pack(states)

    def take_shared(self, packed: Packed) -> None:
        """Take over what :meth:`shared` has returned on another member."""
        for name, state in unpack(packed).items():
            if name not in self._extra:
                self._saved_extra[name] = state
            elif state:  # a GradScaler that is not enabled has none
                _load(self._extra[name], state)

    def schedulers(self) -> list[LRScheduler]:
        """Return the learning-rate schedulers among the objects to save."""
        return [each for thing in self._extra.values() if isinstance(each := inner(thing), LRScheduler)]

    def attend(self, loader: P) -> P:
        """Save this loader's position from now on; continue at the first position in the checkpoint that fits.

        A script may make its loaders anew in each epoch, so that at a checkpoint the last to be made comes first.
        """
        if any(each() is loader for each in self._loaders):
            return loader
        self._loaders.append(weakref.ref(loader))
        if self._positions:
            fitting = [index for index, saved in enumerate(self._positions) if loader.fits(saved)]
            if fitting:
                loader.take_position(self._positions.pop(fitting[0]))
            elif not self._misfit:
                logger.warning("a loader is for other data than that of the checkpoint: it begins at the first epoch")
            self._misfit |= not fitting
        if self._noted is not None:
            self._noted.append((self._loaders[-1], loader.position()))
        return loader

    def note_positions(self) -> None:
        """Save the loaders' present positions until the next call: what is drawn meanwhile is not trained on yet.

        Without a loader, it is the random state: the script draws its data itself.
        """
        if self.folder is not None:
            self._noted = copy.deepcopy(self._positions_now())  # a stream may go on with the state that it returned
            self._between = None if self._loaders else _random_state(next(self._model.parameters()).device)

    def forget_positions(self) -> None:
        """Save the positions that loaders have when a checkpoint is taken, as before :meth:`note_positions`."""
        self._noted = self._between = None

    def _positions_now(self) -> list[Noted]:
        return [(each, loader.position()) for each in self._loaders if (loader := each()) is not None]

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
        noted = self._positions_now() if self._noted is None else self._noted
        own = {
            "loaders": [position for loader, position in noted if loader() is not None],
            **self._random_states(),
            "losses": list(losses),
            "extra": self._saved_extra | {name: _state_of(thing) for name, thing in self._extra.items()},
        }
        broken, others = self._look(own)
        if not self._check_finite(count, broken):
            return None
        state = {
            **own,
            "model": dict(self._tensors()),
            "optimizers": local_state([_state_of(optimizer) for optimizer in self._optimizers]),
            "optimizer_kinds": [type(optimizer).__name__ for optimizer in self._optimizers],
            "algorithm": {"settings": table_of(algorithm.settings), "state": algorithm.state_dict()},
            "iterations": self.iterations + done,
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

    def _random_states(self) -> dict[str, Any]:
        now = _random_state(next(self._model.parameters()).device)
        if self._between is None or self._loaders:
            return {"random": now}
        same = all(_is_same(value, now[name]) for name, value in self._between.items())
        return {"random": now, "between": {} if same else self._between}

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


def _load(thing: Stateful, state: dict[str, Any]) -> None:
    """Restore an object, and of a scheduler also the rates that it has set."""
    scheduler = inner(thing)
    if COUNT in state and counts_steps(scheduler):
        if count_of(scheduler) < state[COUNT]:
            bring(scheduler, state[COUNT])
        return
    thing.load_state_dict(state)
    if isinstance(scheduler, LRScheduler):
        hold(scheduler)


def _check_stateful(name: str, thing: object) -> None:
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        raise ConfigError(f"extra[{name!r}] is a {type(thing).__name__}, without state_dict()")


def _state_of(thing: Any) -> Any:
    """Return the state of the script's own object; if it has none now, what :func:`pack` refuses, with the reason."""
    try:
        return thing.state_dict()
    except Exception as error:  # it may raise anything, and a checkpoint never ends a training
        return Unsaved(f"{type(thing).__name__}, whose state_dict() has failed ({type(error).__name__}: {error})")


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


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _is_same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


class FiniteCheck:
    """Finds the tensors of a model that training has made non-finite.

    It checks the trainable parameters, and the floating-point buffers that are finite at construction. A buffer that
    is not (a mask with minus infinity, for example) is meant to be non-finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._left_out = {name for name, b in named_floating_buffers(model) if not all_finite([_comparable(b)])}
        self._shapes = self._shapes_now()

    def _shapes_now(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(b.shape) for name, b in named_floating_buffers(self._model)}

    def reshaped(self) -> str:
        """Say which buffers have another shape than at construction, when all workers' were equal; empty: none has."""
        now = self._shapes_now()
        found = [name for name in self._shapes | now if self._shapes.get(name) != now.get(name)]
        return ", ".join(f"{name} (was {self._shapes.get(name)}, is {now.get(name)})" for name in found)

    def buffers(self) -> list[Tensor]:
        """Return the buffers to average, shared ones once."""
        return [b for name, b in named_floating_buffers(self._model) if name not in self._left_out]

    def counters(self) -> list[Tensor]:
        """Return the integer buffers, which count or index, shared ones once."""
        return [b for b in written_buffers(self._model) if b.dtype in INTEGERS]

    @torch.no_grad()
    def broken(self) -> dict[str, int]:
        """Return the number of non-finite values by tensor, in this process's part of those that have some."""
        parameters = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        named: list[tuple[str, Tensor]] = [(name, local(p)) for name, p in parameters]
        named += [(name, b) for name, b in named_floating_buffers(self._model) if name not in self._left_out]
        if all_finite([_comparable(x) for _, x in named]):
            return {}
        wrong = ((name, int((~_comparable(x).isfinite()).sum())) for name, x in named)
        return {name: number for name, number in wrong if number}


@torch.no_grad()
def clear(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set non-finite values in the optimizers' states to zero: they would break the model again."""
    for optimizer in optimizers:
        for value in tensors_in(optimizer):
            if value.is_floating_point() and not all_finite([value]):
                value.nan_to_num_(0.0, 0.0, 0.0)


def tensors_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state, also those in lists, in other tensors, and those of no parameter."""
    leaves = _pytree.tree_leaves(list(optimizer.state.values()))
    return [part for x in leaves if isinstance(x, Tensor) for part in _parts(local(x))]


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield a plain tensor, or those that a subclass wraps."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from _parts(getattr(x, name))


def in_words(broken: Mapping[str, int]) -> str:
    """Describe which tensors have how many non-finite values; empty if none has."""
    if not broken:
        return ""
    names = list(broken)
    more = f" and {len(names) - NAMED} more tensors" if len(names) > NAMED else ""
    values = sum(broken.values())
    return f"{values} value{'s' * (values > 1)} (NaN or infinite) in {', '.join(names[:NAMED])}{more}"


def _comparable(x: Tensor) -> Tensor:
    """Return a tensor whose minimum torch can compute: it cannot for 8-bit floats."""
    return x.float() if x.element_size() == 1 else x
