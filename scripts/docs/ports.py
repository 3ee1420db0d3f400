"""The table of ports in docs/start/from-ddp.md: what scripts of common shapes change, and what they learn.

``python -m scripts.docs.ports`` counts the lines, trains each script alone and its port by two workers, with equally
many steps of each worker, and writes the table. The scripts are in tests/integration/ports.
"""

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "tests" / "integration" / "ports"
PAGE = ROOT / "docs" / "start" / "from-ddp.md"
ALGORITHM = {"LSGD_ALGORITHM": "local", "LSGD_PERIOD": "4"}
TABLE = re.compile(r"^\| script \|.*?\n\n", re.M | re.S)


@dataclass(frozen=True)
class Port:
    """A script and its port.

    Args:
        like: what it is like.
        epochs: how many the script trains alone; its port as many times two, because an epoch of a shard is shorter. 0:
            the script has its own length.
        processes: of torchrun, for the script; 0: it needs none.
        launched: options of lsgd launch.
        iterations: of the run; 0: as many as the script's loops make.
    """

    like: str
    epochs: int = 0
    processes: int = 0
    launched: tuple[str, ...] = ()
    iterations: int = 0

    def arguments(self, folder: Path, *, shared: bool) -> list[str]:
        """Return the script's arguments."""
        if not self.epochs:
            return [f"out_dir={folder}"]
        return [str(folder), str(self.epochs * (1 + (shared and not self.iterations)))]


ALL = {
    "flat": Port("nanoGPT's train.py: flat, with its own evaluation, schedule and saves"),
    "classes": Port("minGPT-ddp: a Trainer class for torchrun", 3, 1, ("--torchrun",)),
    "accelerated": Port("run_clm_no_trainer.py, with accelerate", 3),
    "clm": Port("run_clm.py, with transformers' Trainer", 3, iterations=204),
    "reference": Port("torchvision's reference: functions, averaged weights", 3),
    "machine": Port("a script for torchrun, with DDP inside a machine", 3, 2, ("--processes-per-worker", "2")),
}


def changes(name: str) -> tuple[int, int]:
    """Return how many lines a port adds and removes, white space aside."""
    before, after = ([line.strip() for line in source(name, port=port).splitlines()] for port in (False, True))
    lines = [line for line in difflib.ndiff([x for x in before if x], [x for x in after if x]) if line[2:].strip()]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def source(name: str, *, port: bool) -> str:
    """Return a script, or its port."""
    return _path(name, port=port).read_text(encoding="utf-8")


def _path(name: str, *, port: bool) -> Path:
    return PORTS / f"{name}{'_lsgd' if port else ''}.py"


def losses(name: str, port: Port) -> tuple[float, float]:
    """Return the losses on other data: of the script alone, and of its port."""
    with tempfile.TemporaryDirectory() as folder:
        alone, shared, run = (Path(folder, each) for each in ("alone", "shared", "run"))
        for made in (alone, shared):
            made.mkdir()
        started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={port.processes}"]
        command = [*(started if port.processes else ()), str(_path(name, port=False))]
        _run([*command, *port.arguments(alone, shared=False)], {})
        launch = ["-m", "lsgd.client", "launch", "--device", "cpu", "--workers", "2", "--run-dir", str(run)]
        ported = [*launch, *port.launched, "--", sys.executable, str(_path(name, port=True))]
        length = {"LSGD_ITERATIONS": str(port.iterations)} if port.iterations else {}
        _run([*ported, *port.arguments(shared, shared=True)], ALGORITHM | length)
        one, other = (json.loads((made / "final.json").read_text())["val"] for made in (alone, shared))
        return one, other


def _run(command: list[str], variables: dict[str, str]) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def row(name: str) -> str:
    """Return the beginning of a port's row: what it is like, and the lines that it adds and removes."""
    where = f"../../{PORTS.relative_to(ROOT)}"
    added, removed = changes(name)
    link = f"[{name}.py]({where}/{name}.py), [{name}_lsgd.py]({where}/{name}_lsgd.py)"
    return f"| {link} | {ALL[name].like} | +{added} -{removed} |"


def main() -> None:
    """Train, and write the table."""
    lines = ["| script | like | lines | loss alone | with two workers |", "|---|---|---:|---:|---:|"]
    for name, port in ALL.items():
        one, other = losses(name, port)
        lines.append(f"{row(name)} {one:.3f} | {other:.3f} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n\n"
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
