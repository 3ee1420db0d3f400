"""What the processes of a test wait for, when it fails: the stacks of their threads, and how their runs stand."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ..speed import scaled

STACKS_WITHIN_S = scaled(1.0)
STATUS_WITHIN_S = scaled(10.0)
MOST = 20
"""So many processes are shown; a test that left more of them behind has the same story in most."""


def processes() -> list[psutil.Process]:
    """Return what this process has started that still runs, but for servers of forks, which wait for this one."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if each.status() != psutil.STATUS_ZOMBIE and not any("forkserver.py" in word for word in each.cmdline()):
                found.append(each)
    return found


def story() -> str:
    """Return what each of them waits for; empty if there is none."""
    told = []
    for process in processes()[:MOST]:
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            told.append(f"process {process.pid}, {process.status()}: {shlex.join(command)}\n{stacks(process.pid)}")
            if "launch" in command and "--run-dir" in command:
                told.append(status(process.pid, Path(process.cwd()) / command[command.index("--run-dir") + 1]))
    return "\n\n".join(told)


def stacks(pid: int) -> str:
    """Return the stacks of a fork's threads; empty for another process, which would end by the signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    if not int(caught.split()[1], 16) >> (signal.SIGRTMAX - 1) & 1:
        return ""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:stacks" in os.readlink(link):
            os.kill(pid, signal.SIGRTMAX)
            return written(link)
    return ""


def written(file: Path) -> str:
    """Return what is in a file that is being written, when no more comes."""
    end = time.monotonic() + STACKS_WITHIN_S
    text = ""
    while time.monotonic() < end:
        time.sleep(0.05)
        before, text = text, file.read_text()
        if text and text == before:
            return text
    return text or f"it has not shown its stacks within {STACKS_WITHIN_S:g} s"


def status(pid: int, run_dir: Path) -> str:
    """Return what ``lsgd status`` says about a launcher's run, on the launcher's own network."""
    command = [sys.executable, "-m", "lsgd.client", "status", "--run", str(run_dir)]
    if os.geteuid() == 0:
        command = ["nsenter", f"--target={pid}", "--net", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STATUS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return f"lsgd status --run {run_dir}: no answer within {STATUS_WITHIN_S:g} s"
    return f"lsgd status --run {run_dir}:\n{done.stdout}{done.stderr}"
