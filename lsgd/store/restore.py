"""Brings a run's checkpoints from a store to this machine's disk, each checked by its digest."""

import os
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.store import manifest as manifests
from lsgd.store.manifest import DamagedObjectError, Manifest, digest_of
from lsgd.store.objects import Store, StoreError

RESULTS = ("plan.toml", "metrics.jsonl")
"""What a resumed run continues, besides checkpoints."""


def restore(store: Store, folder: Path, node: int, say: Callable[[str], None]) -> bool:
    """Download this node's newest intact checkpoints into a run folder; return whether there are any.

    Each worker's checkpoints are tried from the newest on. Files that are there already, and intact, are kept.

    Raises:
        StoreError: the store cannot be read.
    """
    complete = manifests.read_all(store, node, lambda name: say(f"{name} is incomplete in {store.url}: left out"))
    found = manifests.by_age(complete)
    workers = sorted({m.worker for m in found})
    restored = [_restore_worker(store, folder, [m for m in found if m.worker == worker], say) for worker in workers]
    if any(restored) and node == 0:
        _restore_results(store, folder)
    return any(restored)


def has_checkpoints(store: Store) -> bool:
    """Whether any node has a complete checkpoint in the store."""
    return bool(manifests.read_all(store))


def check_writable(store: Store) -> None:
    """Write a small object, so that a wrong address or key is noticed before the run.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        store.write("lsgd.json", b'{"written by": "lsgd launch --store"}\n')
    except StoreError as error:
        raise ConfigError(f"{error}; check the URL, the keys and the network, or launch without --store") from None


def _restore_worker(store: Store, folder: Path, found: list[Manifest], say: Callable[[str], None]) -> bool:
    """Download the worker's newest intact checkpoint; return whether it has any."""
    for (run, count, processes), group in groupby(found, lambda m: (m.run, m.count, m.processes)):
        files = list(group)
        try:
            if len(files) < processes:
                raise DamagedObjectError(f"{len(files)} of its {processes} files are complete")
            for each in files:
                _download(store, folder, each)
        except DamagedObjectError as error:
            say(
                f"the checkpoint of {count} iterations of {files[0].worker} (run {run}) in {store.url} is damaged: "
                f"{error}; trying the one before it, if there is one"
            )
            continue
        nbytes = sum(each.nbytes for each in files)
        say(f"{files[0].worker}: {count} iterations, {nbytes / 1e6:.1f} MB from {store.url}, checked")
        return True
    return False


def _download(store: Store, folder: Path, wanted: Manifest) -> None:
    """Download a file, check it, and put it into its place.

    Raises:
        DamagedObjectError: the object is missing, or not what the manifest says.
        StoreError: the store cannot be read.
    """
    path = folder / wanted.name
    if path.is_file() and digest_of(path) == wanted.digest:
        return
    temporary = path.with_name(f"{path.name}.download.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.download(wanted.name, temporary)
        if (nbytes := temporary.stat().st_size) != wanted.nbytes:
            raise DamagedObjectError(f"{wanted.name} has {nbytes} bytes instead of {wanted.nbytes}")
        if digest_of(temporary) != wanted.digest:
            raise DamagedObjectError(f"{wanted.name} has changed since it was written")
        os.utime(temporary, (wanted.written, wanted.written))  # resuming tries the run that was written to last first
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _restore_results(store: Store, folder: Path) -> None:
    there = set(store.names(""))
    for name in RESULTS:
        if name in there and not (folder / name).exists():
            store.download(name, folder / name)
