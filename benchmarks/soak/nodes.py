"""The nodes of benchmarks/soak: their disks, what runs on them, and what the run says of itself."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed import Host, TestbedError
from benchmarks.testbed.launch import ROOT, launch_command

DISK = "64m"
SOFT_DESCRIPTORS = 1024  # what a user's shell has
CALL_WITHIN_S = 20.0
TORCHS_CACHE = "torchinductor_"  # a folder for each user, which torch keeps
_LISTENS = "0A"  # <net/tcp_states.h>, as in /proc/net/tcp


def call(host: Host, command: Sequence[str], within_s: float = CALL_WITHIN_S, **options: Any) -> str:
    """Run a short command on a host and return all that it says.

    Raises:
        TestbedError: it failed, or the time is over.
    """
    process = host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    try:
        said = str(process.communicate(timeout=within_s)[0])
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise TestbedError(f"{host.name}: {' '.join(command)}: not done after {within_s:g} s") from None
    if process.returncode:
        raise TestbedError(f"{host.name}: {' '.join(command)}: {said.strip()} (exit {process.returncode})")
    return said


class Node:
    """One machine: its run folder is a small disk of its own, and its other files are in ``folder``.

    Args:
        host: where it is.
        folder: for the output of its launcher and the temporary files; on a disk that is never full.
        workers: how many.
    """

    def __init__(self, host: Host, folder: Path, workers: int) -> None:
        self.host = host
        self.name = host.name
        self.output = folder / f"{host.name}.log"
        self.launcher: subprocess.Popen[bytes] | None = None
        self._workers = workers
        self._start: tuple[list[str], dict[str, str], tuple[str, ...]]
        self._folder = folder / host.name
        self.run_dir, self._temporary = self._folder / "run", self._folder / "tmp"
        self.run_dir.mkdir(parents=True)
        self._temporary.mkdir()
        # In the mounts of this host only: it is gone when the host is.
        call(host, ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak", str(self.run_dir)])

    @property
    def disk(self) -> Path:
        """The run folder, as seen from outside the host."""
        return Path(f"/proc/{self.host.pid}/root{self.run_dir}")

    def launch(self, nodes: int, address: str, plan: Path, environ: Mapping[str, str], *script: str) -> None:
        """Start ``lsgd launch`` as a user does, with keys, in a shell with the usual limits."""
        command = launch_command(self.host.index, nodes, address, self._workers, plan, self.run_dir)
        self._start = command, dict(environ), script
        self.launch_again()

    def launch_again(self) -> None:
        """Start it as it was started before; a run that is in its folder goes on."""
        command, environ, script = self._start
        limited = ["sh", "-c", f'ulimit -Sn {SOFT_DESCRIPTORS}; exec "$@"', "sh"]
        with self.output.open("ab") as output:
            self.launcher = self.host.popen(
                [*limited, *command, "--resume-if-any", "--", *script],
                cwd=ROOT,
                env={**environ, "TMPDIR": str(self._temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def lose(self) -> None:
        """Kill the launcher, and with it all that it has started."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
            self.launcher = None
        for path in self._temporary.iterdir():  # what a machine does when it starts
            shutil.rmtree(path, ignore_errors=True)

    def processes(self) -> dict[str, int]:
        """Return the ids of the run's processes by name: ``node0/global``, ``node0/worker1``, ``node0/launcher``."""
        found: dict[str, int] = {}
        own = self.launcher.pid if self.launcher else -1
        for pid in sorted(residents(self.host)):
            with contextlib.suppress(OSError):
                role = _role(pid, own)
                if role:
                    found.setdefault(f"{self.name}/{role}", pid)
        return found

    def fill(self) -> None:
        """Leave no room on the disk of the run folder."""
        with contextlib.suppress(OSError), (self.disk / "filler").open("ab", buffering=0) as filler:
            for nbytes in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while filler.write(bytes(nbytes)):
                        pass

    def clear(self) -> None:
        """Make room again."""
        (self.disk / "filler").unlink(missing_ok=True)

    def ports(self) -> list[str]:
        """Return where something listens that other machines can reach, as ``address:port``."""
        found = set()
        for line in Path(f"/proc/{self.host.pid}/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.partition(":")
            if state == _LISTENS and not address.endswith("7F"):  # the last byte comes first
                found.add(f"{self.host.address}:{int(port, 16)}")
        return sorted(found)

    def left(self) -> list[str]:
        """Return what a node whose launcher has ended should not have any more: processes and files."""
        names = [f"process {pid} ({command_line(pid)[:80]})" for pid in residents(self.host)]
        files = [path for path in self._temporary.iterdir() if not path.name.startswith(TORCHS_CACHE)]
        files += [path for ending in ("tmp", "unfinished") for path in self.disk.rglob(f"*.{ending}")]
        checkpoints = [path.name for path in self.disk.glob("checkpoints/*/*/*.safetensors")]
        names += [f"file {path}" for path in files]
        names += [
            f"{checkpoints.count(name)} checkpoints {name}"
            for name in sorted(set(checkpoints))
            if checkpoints.count(name) > 2
        ]
        return [f"{self.name}: {name}" for name in names]

    def keep(self) -> None:
        """Copy what is on the disk of the run folder to the folder of this node, before the host is gone."""
        shutil.copytree(self.disk, self._folder / "kept", dirs_exist_ok=True, ignore_dangling_symlinks=True)


class Watch:
    """The state of the run, as ``lsgd status`` on a node has it, twice a second."""

    def __init__(self, node: Node, folder: Path, environ: Mapping[str, str]) -> None:
        self._path = folder / f"{node.name}-status.jsonl"
        with self._path.open("wb") as output, (folder / f"{node.name}-watch.log").open("wb") as errors:
            command = [sys.executable, "-m", "benchmarks.soak.watch", str(node.run_dir)]
            self.process = node.host.popen(command, cwd=ROOT, env=dict(environ), stdout=output, stderr=errors)
        self._stream = self._path.open("rb")
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Return the states since the last call; of a server that did not answer there is none."""
        *lines, self._rest = (self._rest + self._stream.read()).split(b"\n")
        return [state for state in map(json.loads, lines) if "error" not in state]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._stream.close()


def residents(host: Host) -> list[int]:
    """Return the ids of the processes on a host, but for its first one; zombies are none."""
    namespace = os.readlink(f"/proc/{host.pid}/ns/pid")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            inside = int(name) != host.pid and os.readlink(f"/proc/{name}/ns/pid") == namespace
            if inside and _stat(int(name))[0] != "Z":
                found.append(int(name))
    return found


def command_line(pid: int) -> str:
    """Return the command of a process, or an empty text if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open, 0 if it has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def started_at(pid: int) -> str:
    """Return when a process was started, which tells it from a later one of the same id."""
    return _stat(pid)[19]


def send(pid: int, number: signal.Signals) -> bool:
    """Send a process a signal; return whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def await_end(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Wait until all have ended, or the time is over."""
    deadline = time.monotonic() + within_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command: state, parent, group, session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _role(pid: int, launcher: int) -> str:
    """Return what a process is in its node, an empty text for one that is nothing of the run's."""
    line = command_line(pid)
    if "lsgd.server --global" in line:
        return "global"
    if pid == launcher:
        return "launcher"
    if "benchmarks.soak.worker" in line:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        index = next((v.partition(b"=")[2].decode() for v in variables if v.startswith(b"LSGD_LOCAL_RANK=")), "")
        return f"worker{index}" if index else ""
    return ""
