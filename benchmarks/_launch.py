"""Starts processes that belong together, on the laboratory's hosts with lsgd's servers or alone, and waits for them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lab import Host

ROOT = Path(__file__).parents[1]
PORT = 47400
POLL_PERIOD_S = 0.05
LAST_WORDS_S = 2.0
SHOWN_CHARACTERS = 3000  # of what a process said last


class RunFailedError(RuntimeError):
    """Processes have failed; the message has what they said."""


def launch(
    host: Host, hosts: Sequence[Host], plan: Path, folder: Path, command: Sequence[str]
) -> "subprocess.Popen[str]":
    """Start the servers and the worker of one host, whose run folder is that of its name in ``folder``.

    Without keys: nobody else is on the laboratory's wire.
    """
    options = {
        "node": host.index,
        "nodes": len(hosts),
        "address": hosts[0].address,
        "port": PORT,
        "workers": 1,
        "device": "cpu",
        "plan": plan,
        "run-dir": folder / host.name,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return start(host, [sys.executable, "-m", "lsgd.client", "launch", "--insecure", *flags, "--", *command])


def start(host: Host, command: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a process of one thread on a host, with its output in a pipe."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
    return host.popen(
        command,
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_all(
    processes: Sequence["subprocess.Popen[str]"],
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
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes or time.monotonic() > deadline:
            break
        meanwhile()
        time.sleep(POLL_PERIOD_S)
    for process in processes:
        process.kill()
    said = [_last_words(process) for process in processes]
    if any(codes):
        raise RunFailedError(f"{what} failed:\n" + "\n".join(text[-SHOWN_CHARACTERS:] for text in said))
    if None in codes:
        raise RunFailedError(f"{what} has not ended after {timeout_s:g} s")
    return said


def _last_words(process: "subprocess.Popen[str]") -> str:
    """Return what a process that has ended has said; one that it has left behind may still have its pipe."""
    try:
        return process.communicate(timeout=LAST_WORDS_S)[0]
    except subprocess.TimeoutExpired as late:
        return (late.output or b"").decode()
