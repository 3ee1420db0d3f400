"""What a store knows of each checkpoint file: a manifest beside it, written last. A file without one does not count.

A manifest has the digest of each chunk of the file: its header, then each tensor in pieces of up to 1 MiB. So whoever
fetches it can take what the disk has already, whichever file it is in (:mod:`lsgd.store.restore`).
"""

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from lsgd.digests import CHUNK_NBYTES, digest_of
from lsgd.errors import LsgdError
from lsgd.run_folder import CHECKPOINTS
from lsgd.store.objects import Store

SUFFIX = ".json"
"""What a manifest's name has after the file's."""

Chunk = tuple[int, str]
"""Size and digest of a chunk of a file."""

_NAME = re.compile(rf"{CHECKPOINTS}/run-([^/]+)/(\d+)/(node(\d+)-worker\d+)(?:\.(\d+)-of-(\d+))?\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint file in a store.

    Args:
        name: its path in the run folder, and in the store.
        written: time at which the worker wrote it, in seconds since 1970: it orders runs.
        chunks: its bytes, in order.
    """

    name: str
    written: float
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(nbytes for nbytes, _ in self.chunks)

    @property
    def run(self) -> str:
        """The run that wrote it."""
        return self._part(1)

    @property
    def count(self) -> int:
        """Iterations of the run then."""
        return int(self._part(2))

    @property
    def worker(self) -> str:
        """The worker's name in file names: ``node0-worker1``."""
        return self._part(3)

    @property
    def processes(self) -> int:
        """Number of processes of the worker, each of which has a file."""
        return int(self._part(6) or 1)

    @property
    def whole(self) -> tuple[str, int, str]:
        """What all files of this checkpoint have in common: those of the processes of one worker."""
        return self.run, self.count, self.worker

    def _part(self, number: int) -> str:
        matched = _NAME.fullmatch(self.name)
        assert matched is not None
        return str(matched[number] or "")


def is_checkpoint(name: str) -> bool:
    """Whether a path in a run folder is that of a checkpoint file."""
    return _NAME.fullmatch(name) is not None


def manifest_of(name: str, path: Path) -> Manifest:
    """Return the manifest of a file, which is read for it."""
    with path.open("rb") as file:
        written = os.fstat(file.fileno()).st_mtime  # of what is read: it may be written anew meanwhile
        chunks = tuple((len(data), digest(data)) for data in pieces(file))
    return Manifest(name, written, chunks)


def digest(data: bytes) -> str:
    """Return the digest of a chunk of a file."""
    return digest_of(data, "file").hex()


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks of a checkpoint file, in order."""
    lengths = list(_lengths(file))
    file.seek(0)
    for length in lengths:
        while data := file.read(min(length, CHUNK_NBYTES)):
            yield data
            length -= len(data)


def _lengths(file: BinaryIO) -> Iterator[int]:
    """Yield the sizes of the header and of each tensor of a file in safetensors; any other file is one part."""
    size, marks = file.seek(0, os.SEEK_END), list[int]()
    file.seek(0)
    with suppress(struct.error, ValueError, LookupError, TypeError, AttributeError):
        begin = 8 + struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(min(begin, size) - 8))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        marks = [begin, *(begin + int(each["data_offsets"][1]) for each in tensors)]
    yield from (end - start for start, end in pairwise(sorted({0, size, *(min(max(0, m), size) for m in marks)})))


def write(store: Store, manifest: Manifest) -> None:
    """Write a manifest: from now on, the file counts."""
    store.write(manifest.name + SUFFIX, json.dumps(asdict(manifest)).encode())


def read_all(store: Store, node: int | None = None, cut: Callable[[str], object] = lambda name: None) -> list[Manifest]:
    """Return a node's manifests in a store, or those of all; ``cut`` gets the names of files without an intact one.

    Raises:
        StoreError: the store cannot be read.
    """
    names, found = set(store.names(CHECKPOINTS)), []
    for name in sorted(names):
        matched = _NAME.fullmatch(name)
        if matched and node in (None, int(matched[4])):
            manifest = _parsed(name, store.read(name + SUFFIX)) if name + SUFFIX in names else None
            if manifest is None:
                cut(name)
            else:
                found.append(manifest)
    return found


def _parsed(name: str, content: bytes) -> Manifest | None:
    try:
        values = json.loads(content)
        chunks = tuple((int(nbytes), str(found)) for nbytes, found in values["chunks"])
        return Manifest(name, float(values["written"]), chunks) if values["name"] == name else None
    except (ValueError, KeyError, TypeError):
        return None


def by_age(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return manifests in the order to try: those of the run that was written to last, by count; then other runs'."""
    found = list(manifests)
    last = {m.run: max(other.written for other in found if other.run == m.run) for m in found}
    return sorted(found, key=lambda m: (-last[m.run], m.run, -m.count, m.name))


class DamagedObjectError(LsgdError):
    """An object is not what its manifest says."""
