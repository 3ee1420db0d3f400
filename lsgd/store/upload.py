"""The process that uploads a node's files during a run: one object at a time, the newest first, until the run's end.

It reads the run folder only, so nothing that trains waits for it. Its standard input says when the run has ended
(:data:`END`), and, by its own end, that the launcher is gone.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lsgd.output import show_any_text
from lsgd.protocol.keys import is_secret
from lsgd.run_folder import CHECKPOINTS, JOURNAL
from lsgd.store import manifest as manifests
from lsgd.store.manifest import Manifest, is_checkpoint, manifest_of
from lsgd.store.objects import Store, StoreError

ROUNDING_S = 1e-3
"""How much later than its manifest says a file may seem to be written."""

KEPT = 2
"""How many checkpoints of each process a store keeps, per run; as many as the run folder."""

LOOK_EVERY_S = 1.0
"""How often the process looks for new files, in seconds."""

RESULTS_EVERY_S = 30.0
"""How often a result that changes is uploaded during the run, in seconds."""

LONGEST_PAUSE_S, SAY_AGAIN_S = 60.0, 600.0
"""Longest pause before another try, and time between two lines about the same trouble, in seconds."""

STALLED_S = 300.0
"""How long an operation may move no data, in seconds: then the process ends, and is started again."""

STALLED_CODE = 75
"""Exit code of a process whose connection has stalled."""

SMALL_NBYTES = 1 << 20
"""Results up to this size go before checkpoints."""

END = b"end\n"
"""What standard input says when the run has ended, and all its files are written."""

PRIVATE = (".log", ".lock", ".tmp", "join.txt", JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm")
"""Endings of names that stay on this machine, as keys do: output, locks, lines with tokens, and the journal."""


class Uploads:
    """What of a run folder has to be uploaded, and does it.

    Args:
        node: this node's index. Its checkpoints are uploaded, and of node 0 also the results.
        say: function that prints a line.
        clock: function that returns a time in seconds.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        node: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._folder, self._node, self._say, self._clock = store, folder, node, say, clock
        self._there: dict[str, Manifest] | None = None  # complete checkpoints of this node; None: not asked yet
        self._sent: dict[str, tuple[int, int]] = {}  # change time and size of the results that were uploaded
        self._due_s: dict[str, float] = {}  # when each of them may go again
        self._failed: set[str] = set()  # results that the store did not take: they hold up no checkpoint

    def upload_next(self, *, final: bool = False) -> bool:
        """Upload the most important file, if there is any; return whether there was.

        Args:
            final: whether the run has ended: all results go, whenever the last ones went.

        Raises:
            StoreError: the store does not take it.
        """
        if self._there is None:
            self._there = {m.name: m for m in manifests.read_all(self._store, self._node)}
        name = next(self._wanted(final), None)
        if name is None:
            return False
        try:
            if is_checkpoint(name):
                self._upload_checkpoint(name)
            else:
                self._upload_result(name)
        except FileNotFoundError:  # deleted meanwhile: the worker has written newer ones
            pass
        except StoreError:
            self._failed.add(name)
            raise
        self._failed.discard(name)
        return True

    def _wanted(self, final: bool) -> Iterator[str]:
        """Yield the names of the files to upload, the most important first."""
        results = self._results(final)
        first = [name for name, nbytes in results if nbytes <= SMALL_NBYTES and name not in self._failed]
        yield from first
        yield from self._checkpoints()
        yield from (name for name, _ in results if name not in first)

    def _checkpoints(self) -> list[str]:
        """Return this node's newest checkpoint files that are not in the store, the one that waits longest first.

        Neither is one that was written anew since: of a run that has gone back, or that a worker saves at its end.
        A process whose checkpoint the store has in part, of the other processes of its island, gets that one there
        first: only all files together are of use.
        """
        assert self._there is not None
        begun = {m.whole for m in self._there.values()}
        newest: dict[str, tuple[bool, float, str]] = {}
        for path in self._folder.glob(f"{CHECKPOINTS}/run-*/*/node{self._node}-*.safetensors"):
            try:
                written, name = path.stat().st_mtime, path.relative_to(self._folder).as_posix()
            except FileNotFoundError:
                continue
            if is_checkpoint(name):
                lacking = name not in self._there and Manifest(name, written, ()).whole in begun
                newest[path.name] = max(newest.get(path.name, (False, 0.0, "")), (lacking, written, name))
        order = sorted(newest.values(), key=lambda each: (not each[0], *each[1:]))
        return [name for _, at, name in order if name not in self._there or at > self._there[name].written + ROUNDING_S]

    def _results(self, final: bool) -> list[tuple[str, int]]:
        """Return the names and sizes of the results that have changed since they were uploaded, and may go again."""
        if self._node:
            return []
        found = []
        for path in sorted(self._folder.rglob("*") if final else self._folder.glob("*")):
            name = path.relative_to(self._folder).as_posix()
            due = final or self._clock() >= self._due_s.get(name, 0.0)
            if due and not _stays(name) and path.is_file() and (now := _version(path)) != self._sent.get(name):
                found.append((name, now[1]))
        return found

    def _upload_checkpoint(self, name: str) -> None:
        assert self._there is not None
        began_s, path = self._clock(), self._folder / name
        manifest = manifest_of(name, path)
        if name in self._there:  # what its island wrote before does not go together with it
            for old in [m for m in self._there.values() if m.whole == manifest.whole]:
                self._remove(old)
        self._store.upload(name, path)
        manifests.write(self._store, manifest)
        self._there[name] = manifest
        self._say(
            f"the checkpoint of {manifest.count} iterations of {path.stem} is in {self._store.url} "
            f"({manifest.nbytes / 1e6:.1f} MB in {self._clock() - began_s:.1f} s)"
        )
        self._retire(manifest)

    def _retire(self, newest: Manifest) -> None:
        """Delete earlier checkpoints of this worker and run from the store, but for the last complete ones."""
        assert self._there is not None
        own = [m for m in self._there.values() if (m.run, m.worker) == (newest.run, newest.worker)]
        earlier = [m for m in own if m.count <= newest.count]  # those beyond it are from before the run went back
        files = Counter(m.count for m in earlier)
        kept = sorted(count for count in files if files[count] == newest.processes)[-KEPT:]
        for old in earlier:
            if old.count not in (*kept, newest.count):
                self._remove(old)

    def _remove(self, old: Manifest) -> None:
        assert self._there is not None
        self._store.remove(old.name + manifests.SUFFIX)  # first: without it, the file does not count
        self._store.remove(old.name)
        del self._there[old.name]

    def _upload_result(self, name: str) -> None:
        version = _version(self._folder / name)
        self._store.upload(name, self._folder / name)
        self._sent[name], self._due_s[name] = version, self._clock() + RESULTS_EVERY_S


def _stays(name: str) -> bool:
    """Return whether a file of a run folder is no result: private, half written, or a checkpoint."""
    checkpoint = name.startswith(f"{CHECKPOINTS}/")
    return checkpoint or name.endswith(PRIVATE) or ".tmp/" in name or is_secret(PurePosixPath(name))


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def serve(
    uploads: Uploads,
    ended: Callable[[], bool],
    wait: Callable[[float], object],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Upload until the run has ended and everything is there; after a failure, try again ever more slowly."""
    failures, said_s = 0, -SAY_AGAIN_S
    while True:
        final, pause_s = ended(), LOOK_EVERY_S
        try:
            if uploads.upload_next(final=final):
                pause_s = 0.0
            elif final:
                return
            if failures:
                say(f"the store works again after {failures} tries")
            failures, said_s = 0, -SAY_AGAIN_S
        except StoreError as error:
            pause_s, failures = min(2.0**failures, LONGEST_PAUSE_S), failures + 1
            if clock() - said_s >= SAY_AGAIN_S:
                said_s = clock()
                say(f"{error}; training continues, and the newest files are tried again in {pause_s:g} s and later")
        if pause_s:
            wait(pause_s)


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser(prog="lsgd.store")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--stalled-s", type=float, default=STALLED_S)
    options = parser.parse_args()
    show_any_text()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a scheduler sends them to all: see standard input
        signal.signal(number, signal.SIG_IGN)
    store, ended = Store(options.url, connects=False), threading.Event()
    threading.Thread(target=_listen, args=(ended,), name="lsgd-store-end", daemon=True).start()
    threading.Thread(target=_watch, args=(store, options.stalled_s), name="lsgd-store-watch", daemon=True).start()
    serve(Uploads(store, options.folder, options.node, _say), ended.is_set, _wait_for(ended), _say)
    sys.stdout.flush()
    os._exit(0)  # a library's threads may still wait for a name server


def _wait_for(ended: threading.Event) -> Callable[[float], object]:
    """Return a function that waits, but not beyond the end of the run."""
    never = threading.Event()
    return lambda seconds: (never if ended.is_set() else ended).wait(seconds)


def _listen(ended: threading.Event) -> None:
    for line in sys.stdin.buffer:
        if line == END:
            ended.set()
    os._exit(1)  # the launcher is gone


def _watch(store: Store, stalled_s: float) -> None:
    """End this process, whose connection no library gives up, if no data moves."""
    pause = threading.Event()
    while not pause.wait(stalled_s / 10):
        moved_s = store.moved_s
        if moved_s is not None and time.monotonic() - moved_s > stalled_s:
            _say(f"no data has moved to {store.url} for {stalled_s:g} s: the upload begins again")
            os._exit(STALLED_CODE)


def _say(text: str) -> None:
    print(text, flush=True)
