"""Chooses the devices of this machine's workers, and says why torch cannot use the GPUs if it cannot.

Importing torch takes seconds, so a separate process does it, and only if there may be GPUs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lsgd.errors import ConfigError

CPU_WORKERS = 2
"""Workers on a machine without GPUs."""

PROBE_WITHIN_S = 180
"""How long torch may take to look for GPUs."""

_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([count, torch.__version__, torch.version.cuda]))
"""
# Oldest driver that runs a CUDA version (CUDA release notes), and torch's builds for it, newest first.
_BUILDS = ((580, "cu130"), (525, "cu126"))


@dataclass(frozen=True)
class Devices:
    """Devices of the workers (``cpu``, ``cuda:0``, ...), and a warning to print."""

    names: tuple[str, ...]
    warning: str = ""


def choose(wanted: str, workers: int | None, processes: int = 1) -> Devices:
    """Return the device of each process, grouped by worker.

    Args:
        wanted: ``auto`` (GPUs if torch can use them), ``cpu``, ``cuda`` (the workers take turns over all GPUs),
            or ``cuda:1`` (all workers on this one).
        workers: number of workers; None: one for each ``processes`` GPUs, or :data:`CPU_WORKERS`.
        processes: number of processes per worker.

    Raises:
        ConfigError: ``wanted`` is something else, or torch cannot use it; the message says what to install.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", wanted):
        raise ConfigError(f"the device {wanted!r} is unknown; it is auto, cpu, cuda, or one GPU: cuda:0")
    on_cpu = ("cpu",) * ((workers or CPU_WORKERS) * processes)
    drivers = _drivers()
    if wanted == "cpu" or (wanted == "auto" and (not (drivers or _has_device_files()) or _hidden())):
        return Devices(on_cpu)
    count, problem = _usable(drivers)
    if problem and wanted == "auto":
        return Devices(on_cpu, f"training on the CPU: {problem}")
    if problem:
        raise ConfigError(f"the device {wanted} cannot be used: {problem}")
    if processes > (1 if ":" in wanted else count):
        raise ConfigError(
            f"a worker of {processes} processes needs as many GPUs, and has {1 if ':' in wanted else count} with the "
            f"device {wanted}; lower --processes-per-worker, or train on the CPU with --device cpu"
        )
    if ":" in wanted:
        if int(wanted.partition(":")[2]) >= count:
            raise ConfigError(f"the device {wanted} does not exist: torch sees {count} GPUs, numbered from 0")
        return Devices((wanted,) * (workers or 1))
    return Devices(tuple(f"cuda:{n % count}" for n in range((workers or count // processes) * processes)))


def own(devices: Sequence[str], visible: str) -> tuple[tuple[str, ...], str]:
    """Return a worker's devices, renumbered as if no others were visible, and the ``CUDA_VISIBLE_DEVICES`` for that.

    Args:
        devices: devices of its processes.
        visible: ``CUDA_VISIBLE_DEVICES`` of this process; empty: not set.
    """
    if not devices[0].startswith("cuda"):
        return tuple(devices), visible
    numbers = [int(device.partition(":")[2]) for device in devices]
    names = visible.split(",") if visible else []
    shown = ",".join(names[number] if names else str(number) for number in numbers)
    return tuple(f"cuda:{place}" for place in range(len(devices))), shown


def _hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")  # the last is Slurm's


def _has_device_files() -> bool:
    """Whether the system has a GPU of NVIDIA: containers without nvidia-smi use it, too."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _drivers() -> list[str]:
    """Return the driver version, once for each GPU that the driver finds."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _usable(drivers: list[str]) -> tuple[int, str]:
    """Return how many GPUs torch can use; if none, also why and what to do."""
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_WITHIN_S)
    except subprocess.TimeoutExpired:
        return 0, f"torch has looked for GPUs for {PROBE_WITHIN_S} s: does the driver hang (nvidia-smi)?"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"torch cannot be imported by {sys.executable}: {' '.join(last)}")
    count, version, cuda = json.loads(done.stdout.splitlines()[-1])
    if count:
        return count, ""
    if not drivers:
        return 0, "nvidia-smi finds no GPU here"
    if _hidden():
        return 0, "CUDA_VISIBLE_DEVICES hides all GPUs"
    reason = f" ({said.group(1)})" if (said := re.search(r"UserWarning: ([^.(]+)", done.stderr)) else ""
    return 0, (
        f"torch {version} cannot use the GPUs of this machine{reason}: driver {drivers[0]}, "
        f"torch.version.cuda {cuda}; {_remedy(drivers[0], version)}"
    )


def _remedy(driver: str, version: str) -> str:
    number = int(driver.partition(".")[0])
    build = next((name for oldest, name in _BUILDS if number >= oldest), None)
    if build is None:
        return f"update the driver to {_BUILDS[-1][0]} or newer"
    release = version.partition("+")[0]
    return (
        f"install a build for this driver: {sys.executable} -m pip install torch=={release}+{build} "
        f"--index-url https://download.pytorch.org/whl/{build}"
    )
