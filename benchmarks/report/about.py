"""What all benchmarks have: a command line, a heading about the machine that they ran on, and a file of results."""

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from lsgd import processors


def about(module: str) -> dict[str, str]:
    """Return what runs the benchmark ``module``, and when; ``load`` is that of the whole machine before it began."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": f"{processors.usable()} cores of {names[0].partition(':')[2].strip() if names else '?'}",
        "load": f"{os.getloadavg()[0]:.1f} processes in the last minute",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def argument_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the benchmark ``module``'s command line; its description is shown as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def write_json(path: Path | None, machine: Mapping[str, Any], results: Iterable[Any], **settings: Any) -> None:
    """Write all results, dataclasses or dictionaries, to a file, if one is wanted."""
    if path is not None:
        rows = [row if isinstance(row, dict) else dataclasses.asdict(row) for row in results]
        path.write_text(json.dumps({**machine, **settings, "results": rows}, indent=2) + "\n")


def heading(machine: Mapping[str, str]) -> str:
    """Return what :func:`about` says, line by line."""
    return "\n".join(f"{name}: {value}" for name, value in machine.items())
