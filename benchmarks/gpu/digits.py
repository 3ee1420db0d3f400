"""Part 3: two workers on one device, over TCP, by every algorithm and in the ways in which users train."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.cases import Case, Finding, NotHereError, Part, Setup, in_folder, judged
from benchmarks.testbed.launch import await_all, free_port, launch_command, start
from lsgd.algorithms import ALGORITHMS
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings

WORKERS, PROCESSES = 2, 2
ITERATIONS = 800
LEAST = 0.97
SCRIPT = "benchmarks.gpu.digits_worker"


@dataclass(frozen=True)
class Way:
    """How the script trains.

    Args:
        what: the table calls it.
        algorithm: the plan's, with its defaults.
        flags: of the script.
        island: whether a worker has several processes.
    """

    what: str
    algorithm: str = "local"
    flags: Sequence[str] = ()
    island: bool = False


def part(setup: Setup) -> Part:
    """Return part 3."""
    cases = [Case(way.what, partial(_train, setup, way)) for way in ways(setup)]
    if setup.small:
        cases.append(Case("all of these on one GPU", partial(_train, setup, Way("")), needs_gpu=True))
    return Part(3, "two workers on one device learn digits over TCP", 120.0, cases, at_once=1 if setup.small else 4)


def ways(setup: Setup) -> list[Way]:
    """Return all ways."""
    compiled = "aot_eager" if setup.small else "inductor"
    backend = "nccl" if _apart(setup) else "gloo"
    return [
        *(Way(f"`{name}`", name) for name, cls in ALGORITHMS.items() if cls.__module__.startswith("lsgd.")),
        Way(f"`local`, torch.compile with {compiled}", flags=["--compile", compiled]),
        Way("`local`, bfloat16 by autocast", flags=["--bf16"]),
        Way("`local`, GradScaler", flags=["--scaler"]),
        Way("`local`, Muon", flags=["--muon"]),
        Way(
            f"`local`, islands of {PROCESSES} processes, {backend} in them", "local", ["--island", backend], island=True
        ),
    ]


def _apart(setup: Setup) -> bool:
    """Return whether each process of the islands has a GPU of its own."""
    return not setup.small and torch.cuda.device_count() >= WORKERS * PROCESSES


def _train(setup: Setup, way: Way, left_s: float) -> list[Finding]:
    """Train, and judge the accuracy of the consensus."""
    if "--muon" in way.flags and not hasattr(torch.optim, "Muon"):
        raise NotHereError(f"torch {torch.__version__} has no Muon, which came with 2.9")
    with in_folder(setup, way.what) as folder:
        await_all([start(_command(setup, way, folder))], way.what, left_s)
        found = json.loads((folder / "run" / "accuracy.json").read_text())
        return [judged(way.what, f"{found['accuracy']:.4f} of the test data", found, "accuracy", LEAST)]


def _command(setup: Setup, way: Way, folder: Path) -> list[str]:
    """Return what starts the run. The launcher gives no two processes of an island one GPU; torchrun below it does."""
    plan = folder / "plan.toml"
    phases = (Phase(ALGORITHMS[way.algorithm]()),)
    plan.write_text(Plan(RunSettings(workers=WORKERS, iterations=ITERATIONS), phases).to_toml())
    own = way.island and (setup.small or _apart(setup))
    device = setup.device if own else setup.gpu
    launch = launch_command(0, 1, "127.0.0.1", WORKERS, plan, folder / "run", port=free_port(), device=device)
    several = ["--processes-per-worker", str(PROCESSES)] if own else []
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES), "-m"]
    below = torchrun if way.island and not own else []
    return [*launch, *several, "--", sys.executable, "-m", *below, SCRIPT, *way.flags]
