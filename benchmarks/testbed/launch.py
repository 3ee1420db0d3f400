"""Starts processes that belong together, with lsgd's servers or alone, and waits for them."""

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.testbed.hosts import Host
from lsgd.plan.plan import Plan
from lsgd.protocol.ports import DEFAULT_PORT, everywhere, hold, hold_or_any, port_of

ROOT = Path(__file__).parents[2]
PORT = DEFAULT_PORT
MAX_HELD = 256  # ports, by this process
POLL_PERIOD_S = 0.05
LAST_WORDS_S = 2.0
SHOWN_CHARACTERS = 3000  # of what a process said last

Process = subprocess.Popen[str]
_held: deque[socket.socket] = deque()


class RunFailedError(RuntimeError):
    """Processes have failed; the message has what they said."""


def launch_command(
    node: int,
    nodes: int,
    address: str,
    workers: int,
    plan: Path,
    run_dir: Path,
    *,
    port: int = PORT,
    device: str = "cpu",
) -> list[str]:
    """Return the command that starts the servers and the workers of one node; ``--`` and a script are to follow."""
    options = {
        "node": node,
        "nodes": nodes,
        "address": address,
        "port": port,
        "workers": workers,
        "device": device,
        "plan": plan,
        "run-dir": run_dir,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "lsgd.client", "launch", *flags]


def launch_all(
    hosts: Sequence[Host], plan: Plan, folder: Path, script: Callable[[Host], Sequence[str]]
) -> list[Process]:
    """Start the servers and one worker on each host; the folder of a host's run is that of its name in ``folder``.

    Without keys: nobody else is on the testbed's network.
    """
    path = folder / "plan.toml"
    path.write_text(plan.to_toml())
    processes = []
    for host in hosts:
        command = launch_command(host.index, len(hosts), hosts[0].address, 1, path, folder / host.name)
        processes.append(start([*command, "--insecure", "--", *script(host)], host))
    return processes


def start(command: Sequence[str], host: Host | None = None) -> Process:
    """Start a process of one thread on a host, or beside this one, with all its output in a pipe."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
    if host is not None:
        environ["GLOO_SOCKET_IFNAME"] = "eth0"
    process: Process = (host.popen if host is not None else subprocess.Popen)(
        command,
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # closes when this process ends, however it does
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process


def free_port() -> int:
    """Return a port for a process that is still to start; the next one is free too, for a relay.

    This process holds both until the 100th call after this one.
    """
    while True:
        first = hold(everywhere())
        second = hold_or_any(everywhere(), port_of(first) + 1)
        _held.extend((first, second))
        while len(_held) > MAX_HELD:
            _held.popleft().close()
        if port_of(second) == port_of(first) + 1:
            return port_of(first)


def await_all(
    processes: Sequence[Process],
    what: str,
    timeout_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[str]:
    """Wait for the end of processes whose output goes to pipes, and return what each has said.

    ``meanwhile`` is called every now and then.

    Raises:
        RunFailedError: one failed, or the time is over; all have been ended.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes or time.monotonic() > deadline:
                break
            meanwhile()
            time.sleep(POLL_PERIOD_S)
    finally:  # also when this process is interrupted
        for process in processes:
            process.kill()
    said = [_last_words(process) for process in processes]
    if any(codes):
        raise RunFailedError(f"{what} failed:\n" + "\n".join(text[-SHOWN_CHARACTERS:] for text in said))
    if None in codes:
        raise RunFailedError(f"{what} has not ended after {timeout_s:g} s")
    return said


def _last_words(process: Process) -> str:
    """Return what a process that has ended has said; one that it has left behind may still have its pipe."""
    try:
        return process.communicate(timeout=LAST_WORDS_S)[0]
    except subprocess.TimeoutExpired as late:
        return (late.output or b"").decode()
