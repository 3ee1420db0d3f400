"""Brings a run's checkpoints from a store to this machine's disk: only chunks that it lacks, and all are checked."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from lsgd.errors import ConfigError
from lsgd.run_folder import CHECKPOINTS
from lsgd.store import manifest as manifests
from lsgd.store.manifest import Chunk, DamagedObjectError, Manifest, digest, manifest_of
from lsgd.store.objects import Store, StoreError

PART_NBYTES = 16 << 20
"""About as many bytes are read from a store at once."""

SAY_EVERY_S = 10.0
"""How often a download says how far it is, in seconds."""

RESULTS = ("plan.toml", "metrics.jsonl")
"""What a resumed run continues, besides checkpoints."""


class Disk:
    """The chunks of the checkpoints in a run folder: of the newest file of each process."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Path, tuple[Chunk, ...]] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        newest: dict[str, tuple[float, Path]] = {}
        for path in folder.glob(f"{CHECKPOINTS}/run-*/*/*.safetensors"):
            with suppress(OSError):  # deleted meanwhile, if nodes share the folder
                newest[path.name] = max(newest.get(path.name, (0.0, path)), (path.stat().st_mtime, path))
        for _, path in newest.values():
            with suppress(OSError):
                self.chunks_of(path)

    def chunks_of(self, path: Path) -> tuple[Chunk, ...]:
        """Return a file's chunks, which are known from now on."""
        if path not in self._files:
            self.add(path, manifest_of("", path).chunks)
        return self._files[path]

    def add(self, path: Path, chunks: tuple[Chunk, ...]) -> None:
        """Note the chunks of a file."""
        self._files[path], offset = chunks, 0
        for nbytes, name in chunks:
            self._places[name] = path, offset
            offset += nbytes

    def read(self, name: str, nbytes: int) -> bytes:
        """Return the chunk with this digest; empty if it is not here."""
        if name not in self._places:
            return b""
        path, offset = self._places[name]
        with suppress(OSError), path.open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
            return data if digest(data) == name else b""
        return b""


def restore(
    store: Store, folder: Path, node: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> bool:
    """Download this node's newest intact checkpoints into a run folder; return whether there are any.

    Each worker's checkpoints are tried from the newest on. What the disk has of them is not downloaded.

    Args:
        store: the store.
        folder: the run folder.
        node: this node's index.
        say: function that prints a line; every ten seconds one says how far a download is.
        clock: function that returns a time in seconds.

    Raises:
        StoreError: the store cannot be read.
    """
    complete = manifests.read_all(store, node, lambda name: say(f"{name} is incomplete in {store.url}: left out"))
    found = manifests.by_age(complete)
    workers = sorted({m.worker for m in found})
    disk, tell = Disk(folder), _seldom(say, clock)
    restored = [_restore_worker(store, folder, [m for m in found if m.worker == w], disk, say, tell) for w in workers]
    if any(restored) and node == 0:
        _restore_results(store, folder)
    return any(restored)


def has_checkpoints(store: Store, node: int | None = None) -> bool:
    """Whether a node has a complete checkpoint in the store; None: any node."""
    return bool(manifests.read_all(store, node))


def check_writable(store: Store) -> None:
    """Write a small object, so that a wrong address or key is noticed before the run.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        store.write("lsgd.json", b'{"written by": "lsgd launch --store"}\n')
    except StoreError as error:
        raise ConfigError(f"{error}; check the URL, the keys and the network, or launch without --store") from None


def _seldom(say: Callable[[str], None], clock: Callable[[], float]) -> Callable[[str], None]:
    """Return a function that says one line in ten seconds, and drops the others."""
    said_s = clock()

    def tell(line: str) -> None:
        nonlocal said_s
        if (now := clock()) - said_s >= SAY_EVERY_S:
            said_s = now
            say(line)

    return tell


def _restore_worker(
    store: Store,
    folder: Path,
    found: list[Manifest],
    disk: Disk,
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> bool:
    """Download the worker's newest intact checkpoint; return whether it has any."""
    for (run, count, processes), group in groupby(found, lambda m: (m.run, m.count, m.processes)):
        files = list(group)
        try:
            if len(files) < processes:
                raise DamagedObjectError(f"{len(files)} of its {processes} files are complete")
            came = sum(_bring(store, folder, each, disk, tell) for each in files)
        except DamagedObjectError as error:
            say(
                f"the checkpoint of {count} iterations of {files[0].worker} (run {run}) in {store.url} is damaged: "
                f"{error}; trying the one before it, if there is one"
            )
            continue
        here = sum(each.nbytes for each in files) - came
        rest = f" and {here / 1e6:.1f} MB from this disk" if here else ""
        say(f"{files[0].worker}: {count} iterations, {came / 1e6:.1f} MB from {store.url}{rest}, checked")
        return True
    return False


def _bring(store: Store, folder: Path, wanted: Manifest, disk: Disk, tell: Callable[[str], None]) -> int:
    """Bring a file into its place; return how many bytes came from the store.

    What an earlier try has left is continued.

    Raises:
        DamagedObjectError: the object is not what the manifest says.
        StoreError: the store cannot be read.
    """
    path, came = folder / wanted.name, 0
    if not (path.is_file() and disk.chunks_of(path) == wanted.chunks):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.download.tmp")
        temporary.touch()
        try:
            with temporary.open("r+b") as file:
                for part in _parts(_missing(wanted, disk, file)):
                    came += _fetch(store, wanted, part, file)
                    of = f"{came / 1e6:.1f} of at most {wanted.nbytes / 1e6:.1f} MB"
                    tell(f"{wanted.worker}: {of} have come from {store.url}")
                file.truncate(wanted.nbytes)
        except DamagedObjectError:
            temporary.unlink()
            raise
        os.utime(temporary, (wanted.written, wanted.written))  # resuming tries the run that was written to last first
        temporary.replace(path)
        disk.add(path, wanted.chunks)
    return came


def _missing(wanted: Manifest, disk: Disk, file: BinaryIO) -> Iterator[tuple[int, Chunk]]:
    """Yield the chunks, each with its offset, that are neither in the file nor on the disk, and copy the latter."""
    offset = 0
    for nbytes, name in wanted.chunks:
        file.seek(offset)
        if digest(file.read(nbytes)) != name:
            if data := disk.read(name, nbytes):
                file.seek(offset)
                file.write(data)
            else:
                yield offset, (nbytes, name)
        offset += nbytes


def _parts(missing: Iterable[tuple[int, Chunk]]) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield what is read at once: neighbors, with the offset of the first one."""
    begin, end, part = 0, 0, list[Chunk]()
    for offset, chunk in missing:
        if part and (offset != end or end - begin >= PART_NBYTES):
            yield begin, part
            part = []
        begin, end = (begin if part else offset), offset + chunk[0]
        part.append(chunk)
    if part:
        yield begin, part


def _fetch(store: Store, wanted: Manifest, part: tuple[int, list[Chunk]], file: BinaryIO) -> int:
    """Write some chunks that come from the store; return how many bytes came."""
    begin, chunks = part
    if (there := store.nbytes(wanted.name)) != wanted.nbytes:
        raise DamagedObjectError(f"{wanted.name} has {there} bytes instead of {wanted.nbytes}")
    end = begin + sum(nbytes for nbytes, _ in chunks)
    data, offset = store.read(wanted.name, begin, end), 0
    for nbytes, name in chunks:
        if digest(data[offset : offset + nbytes]) != name:
            raise DamagedObjectError(f"{wanted.name} has changed since it was written")
        offset += nbytes
    file.seek(begin)
    file.write(data)
    return end - begin


def _restore_results(store: Store, folder: Path) -> None:
    there = set(store.names(""))
    for name in RESULTS:
        if name in there and not (folder / name).exists():
            temporary = folder / f"{name}.download.tmp"
            store.download(name, temporary)
            temporary.replace(folder / name)
