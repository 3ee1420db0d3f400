"""Listens to torch, Python and loaders in the script's process: batches, files and seeds."""

import functools
import os
import random
import shutil
import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as torch_dataloader

from lsgd.check.lines import here
from lsgd.check.weights import digest_of
from lsgd.client.data.first import digest
from lsgd.client.data.trainers import Endless

Note = Callable[..., None]
"""Notes a fact: its kind, and values by name."""

MOST_ROWS = 4096
"""Most rows of a batch that are noted."""


def tap_loaders(note: Note) -> None:
    """Note each pass over a DataLoader, and each batch that it yields, with its rows."""
    kind: Any = torch_dataloader._BaseDataLoaderIter
    begin, follow, index, again = DataLoader.__iter__, kind.__next__, kind._next_index, kind._reset
    numbers: dict[int, tuple[int, object]] = {}  # by the loader's address; the object, so that it stays its own
    passes = iter(range(1 << 62))

    @functools.wraps(begin)
    def iter_(loader: Any) -> Any:
        found: Any = begin(loader)
        number = numbers.setdefault(id(loader), (len(numbers), loader))[0]
        found._noted = number, next(passes)
        dataset, sampler = loader.dataset, loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        drawn = getattr(sampler, "sampler", sampler)
        length = None if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") else len(dataset)
        about = {"length": length, "dataset": type(dataset).__name__, "sampler": type(drawn).__name__}
        shape = {"batch_size": loader.batch_size, "drop_last": bool(loader.drop_last)}
        epoch = getattr(drawn, "epoch", None)
        about |= {"epoch": epoch if isinstance(epoch, int) else None, "divided": _divided(loader), **shape}
        note("pass", loader=number, number=found._noted[1], where=here(), **about)
        return found

    @functools.wraps(index)
    def next_index(self: Any) -> Any:
        before = _epoch(self._index_sampler)
        rows = index(self)
        deal = before if before == _epoch(self._index_sampler) else None  # some are of the next one
        self.__dict__.setdefault("_rows", deque()).append((rows, deal))
        return rows

    @functools.wraps(again)
    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        self._rows = deque()
        again(self, loader, first_iter)

    @functools.wraps(follow)
    def next_(self: Any) -> Any:
        loader, number = getattr(self, "_noted", (-1, -1))
        try:
            batch = follow(self)
        except StopIteration:
            note("pass_ends", loader=loader, number=number)
            raise
        rows, deal = self._rows.popleft() if getattr(self, "_rows", None) else (None, None)
        stream = self._dataset_kind == torch_dataloader._DatasetKind.Iterable
        about = {"rows": _rows(rows), "deal": deal, "samples": samples_of(batch), "digest": digest(batch)}
        note("batch", loader=loader, number=number, where=here(), stream=stream, **about)
        return batch

    DataLoader.__iter__ = iter_  # type: ignore[method-assign]
    kind.__next__, kind._next_index, kind._reset = next_, next_index, reset


def _epoch(sampler: Any) -> int | None:
    """Return the epoch of the deals that a Trainer's loader draws one after the other; None: it has none."""
    drawn = getattr(sampler, "sampler", sampler)
    return int(drawn.passes.epoch) if isinstance(drawn, Endless) else None


def _divided(loader: Any) -> bool:
    """Whether lsgd has divided what a loader draws."""
    parts = (loader, loader.dataset, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    return any(type(each).__module__.startswith("lsgd.") for each in parts)


def samples_of(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch: of all its tensors that have as many rows as the first one."""
    tensors = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    dense = [leaf.detach() for leaf in tensors if leaf.layout == torch.strided and not leaf.is_nested]
    if not dense or len(dense[0]) > MOST_ROWS:
        return []
    alike = [leaf.cpu().contiguous() for leaf in dense if len(leaf) == len(dense[0])]
    return [digest_of(*(leaf[row] for leaf in alike))[:12] for row in range(len(dense[0]))]


def _rows(rows: Any) -> list[int] | None:
    """Return the numbers of a batch's rows; None: they have none."""
    rows = rows if isinstance(rows, list | tuple) else [rows]
    numbers = [int(row) for row in rows if isinstance(row, int | np.integer)]
    return numbers[:MOST_ROWS] if len(numbers) == len(rows) else None


def tap_files(note: Note, scratch: str) -> None:
    """Note each file that the script opens to write.

    torch.save and safetensors write by themselves, so their calls are noted; what torch.compile writes is not. A file
    that was written under another name has the one that it gets. A link to a file of the user's is removed before: the
    script writes a file of its own.

    Args:
        note: see :data:`Note`.
        scratch: the check's own folder in the scratch folder; links are beside it.
    """
    inside = False
    written = set[str]()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal inside
        if event == "os.rename" and not inside:
            inside = True
            renamed(*arguments[:2])
            inside = False
        if event != "open" or inside:
            return
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or not (flags or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        inside = True
        try:
            path = os.path.abspath(os.fsdecode(path))
            if path.startswith(("/dev/", "/proc/", "/sys/", scratch)) or _compiles(sys._getframe(1)):
                return
            if where := here(sys._getframe(1)):
                unlink(path)
                written.add(path)
                note("file", path=path, where=where, by="open")
        finally:
            inside = False

    def renamed(before: Any, after: Any) -> None:
        if isinstance(before, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(before)) in written:
            note("file", path=os.path.abspath(os.fsdecode(after)), where=here(sys._getframe(2)), by="rename")

    def unlink(path: str) -> None:
        if os.path.islink(path) and path.startswith(os.path.dirname(scratch)):
            whole = os.path.realpath(path)
            os.unlink(path)
            if os.path.isfile(whole):
                shutil.copyfile(whole, path)

    sys.addaudithook(heard)
    for owner, name in ((torch, "save"), (safetensors.torch, "serialize_file")):
        save = getattr(owner, name)

        def saved(obj: object, f: Any, *args: Any, save: Any = save, by: str = name, **kwargs: Any) -> None:
            path = os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else scratch
            if not path.startswith(scratch):
                unlink(path)
            save(obj, f, *args, **kwargs)
            if not path.startswith(scratch):
                written.add(path)
                note("file", path=path, where=here(), by=by)

        setattr(owner, name, functools.wraps(save)(saved))


def _compiles(frame: FrameType | None) -> bool:
    """Whether torch.compile is at work, whose files all workers share."""
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith("torch._inductor"):
        frame = frame.f_back
    return frame is not None


def tap_seeds(note: Note) -> None:
    """Note where the script seeds a generator that lsgd has given each worker its own numbers."""
    for owner, name in ((torch, "manual_seed"), (random, "seed"), (np.random, "seed")):
        seed = getattr(owner, name)

        def noted(*args: Any, seed: Any = seed, what: str = f"{owner.__name__}.{name}", **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not str(caller).startswith("lsgd."):
                note("seed", what=what, value=repr(args[0])[:40] if args else "", where=here())
            return seed(*args, **kwargs)

        setattr(owner, name, functools.wraps(seed)(noted))
