"""Where checkpoints are: ``<run folder>/checkpoints/run-<run>/<count>/node0-worker1.safetensors``.

After a resume, a folder has checkpoints of several runs: the new run has its own identity and its own folder of files.
So does each stage of a run, which is a training of the same processes after others: ``f00d``, ``f00d-stage2``, ...
The layout without ``run-<run>`` is from an earlier lsgd.
"""

import errno
import fcntl
import json
import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.protocol.messages import Endpoint

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, in the run folder."""

JOURNAL = "journal.sqlite"
"""Journal of the global server, in the run folder of its node."""

INPUTS = ("inputs.bin", "inputs-before.bin")
"""The last inputs of the run's coordinator, the newer ones first: see :mod:`lsgd.server.inputs`."""

METRICS, RESULT, CURVE, CURVES = "metrics.jsonl", "result.json", "curve.png", "curves.csv"
"""What a run leaves in its folder: its rounds and its end (the global server writes both), a picture, and curves."""

ENDED = ("finished", "stopped", "failed")
"""The states that a launcher writes into the result at the end of a run."""

LOOK_S = 1.0
"""How long to retry a taken lock, in seconds: :func:`find_live` briefly takes it to check it."""

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""What a lock that somebody else holds answers; any other error is that of a file system without locks."""

MOST_NBYTES = 1 << 16
"""How much of a lock is read."""

EARLIER = ""
"""Stands for the run of files in the earlier layout."""


_STAGE = re.compile(r"-stage(\d+)$")


def stage_of(run: str) -> int:
    """Return which stage of its launch a run is, from 1."""
    found = _STAGE.search(run)
    return int(found[1]) if found else 1


def stage_name(run: str, stage: int) -> str:
    """Return the identity of a stage, from that of any stage of the same launch."""
    return _STAGE.sub("", run) + (f"-stage{stage}" if stage > 1 else "")


def checkpoint_path(folder: Path, run: str, count: int, worker: str) -> Path:
    """Return a worker's file in a folder of checkpoints, for a run's state after ``count`` iterations."""
    return _run_path(folder, run) / str(count) / file_name(worker)


def process_name(worker: str, rank: int, size: int) -> str:
    """Return the name of a process's files: the worker's, plus the rank in an island of several processes."""
    return worker if size == 1 else f"{worker}.{rank}-of-{size}"


def island_sizes(folder: Path, worker: str) -> set[int]:
    """Return the numbers of processes with which a worker has checkpoints in a folder, of any run."""
    paths = [path for name in (worker, f"{worker}.0-of-*") for _, path in _files(folder, name)]
    return {int(path.stem.rpartition("-of-")[2]) if "-of-" in path.stem else 1 for path in paths}


def counts(folder: Path, run: str, worker: str = "*") -> list[int]:
    """Return the counts of a run's checkpoints, of this worker (a pattern) or of any, in increasing order."""
    paths = inside(_run_path(folder, run), f"*/{file_name(worker)}")
    return sorted({int(path.parent.name) for path in paths if path.parent.name.isdecimal()})


def runs(folder: Path, worker: str = "*") -> list[str]:
    """Return the runs with checkpoints in a folder, of this worker (a pattern) or of any; the newest first."""
    written = _written(folder, worker)
    return sorted(written, key=lambda run: written[run], reverse=True)


def newest(folder: Path) -> list[str]:
    """Return the workers with the highest count of the newest run in a folder; an island's processes are left out."""
    for run in runs(folder)[:1]:
        files = (_run_path(folder, run) / str(counts(folder, run)[-1])).glob("node*-worker*.safetensors")
        return sorted(path.stem.replace("-", "/", 1) for path in files if "." not in path.stem)
    return []


def find_run(folder: Path, node: int, nodes: int = 1) -> Path:
    """Return ``folder`` if this node can resume it, else the newest such run folder in it.

    A node can resume a run folder with checkpoints of its own. Of several ``nodes``, node 0 can also resume one whose
    journal has an unfinished run. Raises ConfigError if there is none.
    """
    written = {}
    for run in (folder, *inside(folder, "*/")):
        times_s = [*_written(run / CHECKPOINTS, f"node{node}/*").values()]
        if nodes > 1 and node == 0 and is_unfinished(run):
            times_s.append((run / JOURNAL).stat().st_mtime)
        if times_s:
            written[run] = max(times_s)
    if not written:
        raise ConfigError(
            f"there is nothing to resume: no checkpoint of node {node} lies in {folder} or in a run folder in it; name "
            f"the run's folder (--run-dir, RUN_NAME), or start without --resume (RESUME): a node that is new in a "
            f"resumed run takes over the model of the others"
        )
    return folder if folder in written else max(written, key=lambda run: written[run])


def inside(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield what a folder has of this pattern; nothing of one that this user may not look into."""
    with suppress(OSError):
        yield from folder.glob(pattern)


@contextmanager
def claimed(folder: Path, node: int, address: str) -> Iterator[None]:
    """Lock a run folder for one node's launcher inside the context; create it if necessary.

    Each node has its own lock, because several may share the folder. The lock ends with this process. It contains
    the address of the run's global server, for :func:`find_live`, and where an earlier launcher has known it. Raises
    ConfigError if another launcher of this node holds it, or it cannot be created or written.
    """
    path = folder / f"node{node}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be made or written: {error.strerror}") from None
    try:
        _lock(descriptor, folder, node, address)
        yield
    finally:
        os.close(descriptor)


def find_live(folder: Path) -> tuple[Path, str, bytes]:
    """Return the folder of this user's newest running run in a folder, and its global server's address and public key.

    If the key is empty, it is the one in the node's token. Raises ConfigError if none is running.
    """
    live = []
    for path in (*inside(folder, "node*.lock"), *inside(folder, "*/node*.lock")):
        with suppress(OSError, ValueError, IndexError), path.open() as file:
            status = os.fstat(file.fileno())
            held = status.st_uid == os.getuid() and _flock(file.fileno(), fcntl.LOCK_SH)
            if held and not _has_ended(path.parent, status.st_mtime_ns):
                place = _places(file.read())[0]
                live.append((status.st_mtime_ns, path.parent, place.address, place.key))
    if not live:
        raise ConfigError(
            f"none of the runs that you launched is running in {folder}: name its folder (--run DIR), or the "
            f"address of its global server (--connect HOST:PORT)"
        )
    return max(live)[1:]


def _has_ended(folder: Path, launched_ns: int) -> bool:
    """Whether the run that was launched in a folder then has ended; its launcher may still wait for a store."""
    with suppress(OSError, ValueError, LookupError, TypeError), (folder / RESULT).open() as file:
        return os.fstat(file.fileno()).st_mtime_ns >= launched_ns and json.load(file)["state"] in ENDED
    return False


def is_live(folder: Path) -> bool:
    """Whether a launcher of any user and node holds this run folder's lock, and its run has not ended."""
    for path in inside(folder, "node*.lock"):
        with suppress(OSError), path.open() as file:
            launched_ns = os.fstat(file.fileno()).st_mtime_ns
            if _flock(file.fileno(), fcntl.LOCK_SH) in _HELD and not _has_ended(folder, launched_ns):
                return True
    return False


def _flock(descriptor: int, kind: int) -> int:
    """Try to take a lock; return 0, or the error number if it is held or locks are not supported."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.EWOULDBLOCK
    return 0


def _lock(descriptor: int, folder: Path, node: int, address: str) -> None:
    deadline = time.monotonic() + LOOK_S
    while (held := _flock(descriptor, fcntl.LOCK_EX) in _HELD) and time.monotonic() < deadline:
        time.sleep(LOOK_S / 20)
    if held:
        pid, host, *_ = [*os.pread(descriptor, 200, 0).decode(errors="replace").split(), "", ""]
        raise ConfigError(
            f"the run folder {folder} is in use: another lsgd launch of node {node} (process {pid or '?'} on "
            f"{host or '?'}) runs in it; end that one (kill {pid or 'PID'} there), or name another folder with "
            f"--run-dir (RUN_NAME)"
        )
    with suppress(OSError):  # a full disk
        before = [
            each for each in _places(os.pread(descriptor, MOST_NBYTES, 0).decode(errors="replace")) if each.node >= 0
        ]
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _words([Endpoint(-1, address), *before]).encode(), 0)


def moved(folder: Path, node: int, places: Sequence[Endpoint]) -> None:
    """Write into the lock of a node where the run's global server is now, and then where it may be later.

    Its time stays that of the launch.
    """
    path = folder / f"node{node}.lock"
    with suppress(OSError):
        launched = path.stat()
        path.write_text(_words(places))
        os.utime(path, ns=(launched.st_atime_ns, launched.st_mtime_ns))


def followed(folder: Path, node: int) -> Endpoint | None:
    """Return where the global server was that the last launcher of a node followed; None: it followed none."""
    places = known(folder, node)
    return places[0] if places and places[0].node >= 0 else None


def known(folder: Path, node: int) -> list[Endpoint]:
    """Return the places in a node's lock: the global server's (node -1: as launched), and where it may be later."""
    with suppress(OSError, UnicodeDecodeError):
        return _places((folder / f"node{node}.lock").read_text())
    return []


def _words(places: Sequence[Endpoint]) -> str:
    """Return the content of a lock: its process and host, and places."""
    lines = [f"{place.address} {place.node} {place.key.hex()}" for place in places]
    return f"{os.getpid()} {socket.gethostname()} " + "\n".join(lines) + "\n"


def _places(lock: str) -> list[Endpoint]:
    """Return the places in the content of a lock; those before the first that is damaged."""
    places = list[Endpoint]()
    with suppress(ValueError):
        for line in lock.splitlines():
            address, node, key = [*line.split(), ""][0 if places else 2 :][:3]
            places.append(Endpoint(int(node), address, bytes.fromhex(key)))
    return places


def is_unfinished(folder: Path) -> bool:
    """Whether the journal in a run folder has a run that has not ended, and that no global server serves now."""
    if not os.path.exists(folder / JOURNAL):
        return False
    with suppress(sqlite3.Error), closing(sqlite3.connect(folder / JOURNAL, timeout=LOOK_S)) as connection:
        return bool(connection.execute("SELECT COUNT(*) FROM state").fetchone()[0])
    return False


def file_name(worker: str) -> str:
    """Return the name of a worker's file."""
    return f"{worker.replace('/', '-')}.safetensors"


def _written(folder: Path, worker: str) -> dict[str, float]:
    """Return the time of each run's last checkpoint."""
    times: dict[str, float] = {}
    for run, path in _files(folder, worker):
        with suppress(OSError):  # deleted meanwhile
            times[run] = max(times.get(run, 0.0), path.stat().st_mtime)
    return times


def _files(folder: Path, worker: str) -> Iterator[tuple[str, Path]]:
    """Yield the checkpoints in a folder, each with its run."""
    name = file_name(worker)
    for path in inside(folder, f"run-*/*/{name}"):
        if path.parent.name.isdecimal():
            yield path.parent.parent.name.removeprefix("run-"), path
    for path in inside(folder, f"*/{name}"):
        if path.parent.name.isdecimal():
            yield EARLIER, path


def _run_path(folder: Path, run: str) -> Path:
    return folder / f"run-{run.replace('/', '-')}" if run else folder
