"""A worker's part of a stream: data without a length, which is read from its beginning in each pass."""

import copy
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lsgd.client.data.ending import EndingLoader, never
from lsgd.client.data.randomness import Apart
from lsgd.errors import ConfigError

logger = logging.getLogger("lsgd")

_END = object()
"""What follows the last element of a pass."""

STREAM = -1
"""The length of a stream, in a checkpoint."""


def is_stream(data: object) -> TypeGuard[Iterable[Any]]:
    """Whether data can only be read in order, unlike a dataset with a length and numbered samples."""
    numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not numbered)


def check_stream(data: object) -> None:
    """Raise ConfigError unless data is a stream."""
    if not is_stream(data):
        raise ConfigError(
            f"shard() takes a DataLoader or a stream, and a {type(data).__name__} is none: for a dataset with a "
            f"length, use worker.loader(dataset, batch_size=...)"
        )


class Part(IterableDataset[Any]):
    """This worker's part of a stream, made by ``Worker.shard``.

    :func:`deal` says how a stream is divided. Every pass divides it anew, by the members of the run at that time. Where
    a worker takes every n-th element, a change of members counts at once. The processes of a DataLoader read the place
    and the pass in shared memory.

    Args:
        place: function that returns the current (rank, world size); in islands, of this process among all processes.
    """

    is_sharded = True

    over: Callable[[], bool] = staticmethod(never)
    """Whether the run has ended, and so all passes end."""

    def __init__(self, stream: Iterable[Any], place: Callable[[], tuple[int, int]]) -> None:
        check_stream(stream)
        self.stream: Iterable[Any] = stream.stream if isinstance(stream, Part) else stream
        self._place: Callable[[], tuple[int, int]] | None = place
        self._shared = torch.zeros(3, dtype=torch.int64, device="cpu")  # rank, world size, pass
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._drawn = 0  # elements of this pass that this process has drawn
        self._deal = Deal(self.stream)
        self._alike = Apart(0, 0)  # numbers for the order of a stream that each worker reads whole
        self._saved: dict[str, Any] | None = None  # where to begin the next pass
        self._trained: tuple[int, int] | None = None  # the pass under way, and how far in the stream it is trained on
        self.follow()

    def follow(self) -> None:
        """Tell the processes of a DataLoader who the current members are."""
        if self._place is not None and get_worker_info() is None and (now := self._place()) != self.place:
            self._shared[0], self._shared[1] = now

    @property
    def place(self) -> tuple[int, int]:
        """The rank and the world size that the stream is divided by."""
        rank, size, _ = self._shared.tolist()
        return rank, size

    @property
    def epoch(self) -> int:
        """The number of the current pass, or of the next one."""
        return int(self._shared[2])

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass: for a DataLoader of your own that has processes."""
        self._shared[2] = epoch

    def __iter__(self) -> Iterator[Any]:
        if self.over():
            return
        resumed, came = self._saved is not None and get_worker_info() is None, False
        self._begin()
        with self._drawing():
            source = self._from_position()
        while (element := self._next(source)) is not _END:
            came = True
            yield element
            if self.over():
                return
            self.follow()
        self._drawn = 0
        self._next_epoch()
        if resumed and not came:  # nothing was left of the pass
            yield from self

    def _next(self, source: Iterator[Any]) -> Any:
        """Return the next element that is this process's, or the end."""
        with self._drawing():
            for element in source:
                mine = self._takes(self._drawn)
                self._drawn += 1
                if mine:
                    return element
        return _END

    def _drawing(self) -> AbstractContextManager[None]:
        """Let a stream that all workers read draw the same numbers on all: one that shuffles has one order."""
        return nullcontext() if self._deal.place else self._alike.drawing()

    def _begin(self) -> None:
        """Divide the stream for a new pass; one that was left early is over."""
        self.follow()
        if self._saved is not None and get_worker_info() is None:
            self.set_epoch(self._saved["epoch"])  # whatever a Trainer that begins anew has set since
        elif self._drawn:
            self._next_epoch()
        self._drawn = 0
        self._deal = deal(self.stream, *self.place)
        info = get_worker_info()
        self._alike = Apart(info.id if info else 0, self.epoch)
        if self._saved and self._saved["drawn"] and self._saved["place"] != self._deal.place:
            self.set_epoch(self._saved["epoch"] + 1)
            self._saved = None
            logger.warning(
                "the number of workers is not that of the checkpoint: the stream's files are dealt again, beginning "
                "with pass %d; a stream that is not shuffled begins with the same data",
                self.epoch,
            )
        self._trained = (self.epoch, self._saved["drawn"] if self._saved else 0)
        if _is_of("streaming", "StreamingDataset", self._deal.stream):
            self._deal.stream.next_epoch = self.epoch
        elif hasattr(self._deal.stream, "set_epoch"):
            self._deal.stream.set_epoch(self.epoch)

    def _from_position(self) -> Iterator[Any]:
        """Return an iterator from where the checkpoint was, if there is one, else from the beginning."""
        saved, self._saved = self._saved, None
        source: Iterator[Any]
        if saved is None or not saved["drawn"]:
            source = iter(self._deal.stream)
            return source
        if saved["stream"] is not None:
            self._deal.stream.load_state_dict(saved["stream"])
            source = iter(self._deal.stream)
        else:
            logger.info("a stream without state_dict(): reads %d elements again, to its place", saved["drawn"])
            source = iter(self._deal.stream)
            next(islice(source, saved["drawn"], saved["drawn"]), None)
        self._drawn = saved["drawn"]
        return source

    def _takes(self, index: int) -> bool:
        """Whether an element is this process's."""
        size = 1 if self._deal.place else self._readers
        rank = self.place[0] % size
        info = get_worker_info()
        if info is not None and not isinstance(self.stream, IterableDataset):  # others divide themselves, as torch asks
            rank, size = rank * info.num_workers + info.id, size * info.num_workers
        return index % size == rank

    def _next_epoch(self) -> None:
        """Count a pass, unless this is one of several processes that make it."""
        if get_worker_info() is None:
            self.set_epoch(self.epoch + 1)

    def __getstate__(self) -> dict[str, Any]:
        asks = {"over", "_place"}  # a DataLoader's process asks nobody
        return {**{name: value for name, value in self.__dict__.items() if name not in asks}, "_place": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream: its own ``state_dict()`` if it has one, and the number of elements drawn."""
        if self._saved is not None:
            return self._saved
        stream = self._deal.stream
        inner = _state_of(stream, self._drawn * self._deal.processes) if self._drawn else None
        return {"epoch": self.epoch, "drawn": self._drawn, "place": self._deal.place, "stream": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`: the next pass is the rest of that one."""
        self.set_epoch(state["epoch"])
        self._saved = state
        self._drawn = 0

    def consume(self, elements: int) -> None:
        """Count elements that were trained on, for a Trainer's loader, which reads ahead; follow the members."""
        self.follow()
        if self._trained is not None:
            epoch, place = self._trained
            self._trained = epoch, place + elements * (1 if self._deal.place else self._readers)

    def trained(self) -> dict[str, Any] | None:
        """Return as :meth:`state_dict` how far the stream is trained on; None: other processes read it, or nobody."""
        if self._saved is not None or self._trained is None:
            return self._saved
        epoch, drawn = self._trained
        return {"epoch": epoch, "drawn": drawn, "place": self._deal.place, "stream": None}

    @property
    def _readers(self) -> int:
        """How many take every n-th element of the stream, which is as many as the workers, or as their processes."""
        return max(1, self.place[1] // self._deal.processes)

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"place": list(self.place), "length": STREAM, "state": self.state_dict()}

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in a stream without a loader."""
        return saved["length"] == STREAM and "drawn" in saved["state"]

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.load_state_dict(saved["state"])


class StreamLoader(EndingLoader):
    """A DataLoader of this worker's part of a stream, made by ``Worker.loader``; a yielded batch counts as consumed.

    Args:
        part: source of the samples.
        agree: function that returns whether all processes of this worker have a batch, given whether this one has:
            their passes end together.
        options: DataLoader's.
    """

    is_sharded = True

    def __init__(self, part: Part, agree: Callable[[bool], bool], options: dict[str, Any]) -> None:
        if taken := {"sampler", "batch_sampler"} & options.keys():
            raise ConfigError(f"a stream has no {taken.pop()}: leave it out, and shuffle the stream itself")
        super().__init__(part, **{**options, "generator": None})  # it would give all workers' processes the same seeds
        self.part = part
        self._agree = agree
        self._batches = self._start = self._skip = 0  # of this pass: consumed; before it began here; to read again

    def __iter__(self) -> Any:
        skip, self._skip = self._skip, 0
        resumed = self._start > 0
        if self._batches > self._start and self.num_workers:  # else the part does so itself
            self.part.set_epoch(self.part.epoch + 1)
        self._batches, self._start = self._start, 0
        batches = DataLoader.__iter__(self)
        return self._until_over(self._rest(batches, skip) if resumed else self._counted(batches, skip))

    def _rest(self, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        """Yield the rest of a pass that has been resumed, or if nothing is left of it, the next pass."""
        came = False
        for batch in self._counted(batches, skip):
            came = True
            yield batch
        if not came:
            yield from self._counted(DataLoader.__iter__(self), 0)

    def _counted(self, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        if skip:
            logger.info("a loader reads %d batches of its stream again, to its place", skip)
        left = islice(batches, skip, None)
        batch = next(left, self)
        while self._agree(batch is not self):
            self._batches += 1
            yield batch
            batch = next(left, self)
        self._batches = 0
        if self.num_workers:
            self.part.set_epoch(self.part.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the pass, its consumed samples, and the place in the stream if no process reads ahead."""
        part = None if self.num_workers else self.part.state_dict()
        samples = self._batches * (self.batch_size or 1)
        return {"epoch": self.part.epoch, "samples": samples, "size": self.part.place[1], "part": part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; without its place in the stream, by skipping samples."""
        samples_of_all = state["samples"] * state["size"]
        self._batches = self._start = samples_of_all // (self.part.place[1] * (self.batch_size or 1))
        self._skip = 0
        if state["part"] is not None and not self.num_workers:
            self.part.load_state_dict(state["part"])
        else:
            self.part.set_epoch(state["epoch"])
            self._skip = self._start

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"place": list(self.part.place), "length": STREAM, "state": self.state_dict()}

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether a saved position is one in a stream with a loader."""
        return saved["length"] == STREAM and "samples" in saved["state"]

    def take_position(self, saved: dict[str, Any]) -> None:
        """Continue at a saved position."""
        self.load_state_dict(saved["state"])


def _state_of(stream: Any, drawn: int) -> dict[str, Any] | None:
    """Return a stream's own state, of which all its processes have drawn so many elements; None: it has none."""
    if _is_of("streaming", "StreamingDataset", stream):
        return dict(stream.state_dict(drawn, from_beginning=True))
    return stream.state_dict() if hasattr(stream, "load_state_dict") else None


# -- how streams are divided -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deal:
    """How a stream is divided.

    Attributes:
        stream: the worker's files, or all.
        place: the rank and the world size that the library divides by; empty: the worker takes every n-th element.
        processes: how many processes of this worker's island have a part of the stream by themselves.
    """

    stream: Any
    place: list[int] = field(default_factory=list)
    processes: int = 1


def deal(stream: Any, rank: int, size: int) -> Deal:
    """Return a worker's part of a stream.

    Streams of ``datasets`` and webdataset are divided by their libraries, if possible by files, which only one worker
    reads. webdataset's resampled streams stay whole: they draw at random. Of any other stream, each worker reads all,
    and takes every n-th element. mosaicml-streaming divides its own among the processes that torchrun's variables name:
    those of an island.
    """
    if _is_of("streaming", "StreamingDataset", stream):
        return Deal(stream, processes=int(os.environ.get("WORLD_SIZE", 1)))
    if _is_of("datasets", "IterableDataset", stream):
        from datasets.distributed import split_dataset_by_node

        return Deal(split_dataset_by_node(stream, rank, size), [rank, size])
    if _is_of("webdataset", "DataPipeline", stream):
        return _deal_webdataset(stream, rank, size)
    return Deal(stream)


def _is_of(module: str, name: str, stream: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(stream, kind)


def _deal_webdataset(stream: Any, rank: int, size: int) -> Deal:
    """Put our split by files in the place of webdataset's, if there are enough."""
    import webdataset

    info = get_worker_info()
    source, splitters = stream.pipeline[0], (webdataset.single_node_only, webdataset.split_by_node)
    if isinstance(source, webdataset.ResampledShards):
        return Deal(stream, [rank, size])
    readers = size * (info.num_workers if info else 1)
    files = len(source.urls) if hasattr(source, "urls") else readers
    by_files = files >= readers
    ours = partial(_every, rank=rank, size=size) if by_files else iter
    stages = [ours if stage in splitters else stage for stage in stream.pipeline]
    if by_files and ours in stages:
        return Deal(_with(stream, stages), [rank, size])
    if not by_files and size > 1:
        _warn_of_few(files, readers)
    return Deal(_with(stream, stages))


@cache
def _warn_of_few(files: int, readers: int) -> None:
    logger.warning(
        "this webdataset has %d files for %d readers (workers, times the processes of their loaders): each worker "
        "reads all files, and takes its share of the samples; more files would be read once only",
        *(files, readers),
    )


def _every(source: Iterable[Any], rank: int, size: int) -> Iterator[Any]:
    return islice(source, rank, None, size)


def _with(stream: Any, stages: list[Any]) -> Any:
    copied = copy.copy(stream)
    copied.pipeline = stages
    return copied
