"""What a store knows of each checkpoint file: a manifest beside it, written last. A file without one does not count."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lsgd.errors import LsgdError
from lsgd.run_folder import CHECKPOINTS
from lsgd.store.objects import Store

SUFFIX = ".json"
"""What a manifest's name has after the file's."""

_NAME = re.compile(rf"{CHECKPOINTS}/run-([^/]+)/(\d+)/(node(\d+)-worker\d+)(?:\.(\d+)-of-(\d+))?\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint file in a store.

    Args:
        name: its path in the run folder, and in the store.
        digest: BLAKE2b of its bytes.
        written: time at which the worker wrote it, in seconds since 1970: it orders runs.
    """

    name: str
    nbytes: int
    digest: str
    written: float

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

    def _part(self, number: int) -> str:
        matched = _NAME.fullmatch(self.name)
        assert matched is not None
        return str(matched[number] or "")


def is_checkpoint(name: str) -> bool:
    """Whether a path in a run folder is that of a checkpoint file."""
    return _NAME.fullmatch(name) is not None


def manifest_of(name: str, path: Path) -> Manifest:
    """Return the manifest of a file, which is read for it."""
    status = path.stat()
    return Manifest(name, status.st_size, digest_of(path), status.st_mtime)


def digest_of(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


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
        found = Manifest(name, int(values["nbytes"]), str(values["digest"]), float(values["written"]))
        return found if values["name"] == name else None
    except (ValueError, KeyError, TypeError):
        return None


def by_age(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Return manifests in the order to try: those of the run that was written to last, by count; then other runs'."""
    found = list(manifests)
    last = {m.run: max(other.written for other in found if other.run == m.run) for m in found}
    return sorted(found, key=lambda m: (-last[m.run], m.run, -m.count, m.name))


class DamagedObjectError(LsgdError):
    """An object is not what its manifest says."""
