"""Runs a program: alone, and with two workers, as ``lsgd check`` does or by ``lsgd launch`` with options of its own."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.programs.environment import FOLDER
from benchmarks.programs.program import Program
from benchmarks.testbed.launch import RunFailedError

WORKERS = 2
PLAN: Mapping[str, str] = {"LSGD_ALGORITHM": "local", "LSGD_PERIOD": "4"}
ALL = "1,2,3,4,5,6,7,8,9"
APART = ("1234589", "6", "7")
"""Points that share no start of the script: each has a check of its own, and these run side by side."""

DEADLINE_S = 600.0
SHOWN_LINES = 40
_FIGURE = re.compile(r"(?:^|\] )(?P<name>[a-z][\w -]*): (?P<value>-?[\d.]+(?:e[-+]\d+)?)$", re.M)


def alone(program: Program, python: str, folder: Path) -> dict[str, Any]:
    """Run it without lsgd's lines, and return its figure."""
    script = folder / f"{program.name}_plain.py"
    script.write_text(program.plain, encoding="utf-8")
    began = time.monotonic()
    command = [python, *shlex.split(program.says("Alone")), str(script), *_arguments(program, 1)]
    (said,) = _run({folder: command}, {}, DEADLINE_S)
    return {"figure": figure(program, said), "seconds": round(time.monotonic() - began, 1)}


def two(program: Program, python: str, folder: Path) -> dict[str, Any]:
    """Run it with two workers that make half of the steps each; return its figure, and the bytes of a round.

    For programs with options of the launch, which a check does not have.
    """
    launch = [python, "-m", "lsgd.client", "launch", "--plain", "--workers", str(WORKERS), "--device", "cpu"]
    launch += ["--run-dir", str(folder / "run"), "--log-to", "csv", *shlex.split(program.says("Launch")), "--"]
    began = time.monotonic()
    command = [python, str(program.path), *_arguments(program, WORKERS)]
    whole = [*([] if starts_itself(program) else launch), *command]
    (said,) = _run({folder: whole}, variables(program), DEADLINE_S)
    found = {"figure": figure(program, said), "seconds": round(time.monotonic() - began, 1)}
    if starts_itself(program):
        return {**found, "round_nbytes": None}
    result = json.loads((folder / "run" / "result.json").read_text())
    rounds = {"round_nbytes": round_nbytes(folder / "run" / "curves.csv"), "rounds": result["rounds_global"]}
    return {**found, "iterations": result["count"], **rounds}


def starts_itself(program: Program) -> bool:
    """Whether another library starts the workers, so that there is nothing to launch, and nothing to check."""
    return program.says("Launch") == "none"


def _arguments(program: Program, workers: int) -> list[str]:
    """Return a program's arguments: the steps of each worker, and the number of workers if it starts them itself."""
    return [str(program.steps // workers), *([str(workers)] if starts_itself(program) else [])]


def check(program: Program, python: str, folder: Path, points: str = ALL) -> dict[str, Any]:
    """Return what ``lsgd check`` says of each of these points; and, as :func:`two`, of its run with two workers."""
    steps = str(program.steps // WORKERS)
    wanted = [",".join(point for point in apart if point in points.split(",")) for apart in APART]
    commands = {}
    for only in filter(None, wanted):
        (own := folder / f"check-{only}").mkdir()
        command = [python, "-m", "lsgd.client", "check", "--device", "cpu", "--json", "check.json", "--keep"]
        commands[own] = [*command, "--steps", steps, "--only", only, "--", python, str(program.path), steps]
    began = time.monotonic()
    _run(commands, variables(program) | {"TMPDIR": str(folder)}, 2 * DEADLINE_S, (0, 1))
    seconds = round(time.monotonic() - began, 1)
    for own in commands:
        if not (own / "check.json").exists():
            raise RunFailedError(f"lsgd check has judged nothing:\n{_last(_said(own))}")
    judged = [each for own in commands for each in json.loads((own / "check.json").read_text())]
    judged.sort(key=lambda each: int(each["point"]))
    return {
        "seconds": seconds,
        **({} if program.says("Launch") else _straight(program, folder)),
        "points": {str(each["point"]): each["status"] for each in judged},
        "unjudged": {str(each["point"]): each["unjudged"] for each in judged if each["status"] == "unjudged"},
        "findings": [
            {**finding, "point": each["point"], "where": finding["where"].rpartition("/")[2]}
            for each in judged
            for finding in each["findings"]
        ],
    }


def _straight(program: Program, folder: Path) -> dict[str, Any]:
    """Return what the run with two workers has left that a check has kept."""
    (kept,) = folder.glob("lsgd-check-*/straight/check")
    said = "\n".join(path.read_text(errors="replace") for path in sorted((kept / "run").glob("*.log")))
    result = json.loads((kept / "run" / "result.json").read_text())
    lives = [[json.loads(line) for line in path.read_text().splitlines()] for path in kept.glob("facts-*/*.jsonl")]
    ends = [fact["timings"]["sent_nbytes"] for facts in lives for fact in facts if fact["kind"] == "exit"]
    sent = sum(ends) / WORKERS / result["rounds_global"] if result["rounds_global"] else None
    rounds = {"round_nbytes": sent, "rounds": result["rounds_global"]}
    return {"figure": figure(program, said), "iterations": result["count"], **rounds}


PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {"alone": alone, "two": two, "check": check}


def variables(program: Program) -> dict[str, str]:
    """Return the variables of a program's runs with lsgd."""
    own = dict(pair.split("=", 1) for pair in shlex.split(program.says("Variables")))
    return {**(PLAN if "LSGD_ALGORITHM" not in own else {}), **own}


def figure(program: Program, said: str) -> float:
    """Return the figure that a program has printed last.

    Raises:
        RunFailedError: it has printed none.
    """
    name = program.says("Figure", "held-out loss")
    found = [float(each["value"]) for each in _FIGURE.finditer(said) if each["name"] == name]
    if not found:
        raise RunFailedError(f"{program.name} does not print '{name}: NUMBER':\n{_last(said)}")
    return found[-1]


def round_nbytes(path: Path) -> float | None:
    """Return the bytes that a worker sends in a round, the mean over rounds; None: the run had none."""
    with path.open(newline="", encoding="utf-8") as file:
        sent = [float(row["value"]) for row in csv.DictReader(file) if row["name"] == "round/sent_bytes"]
    return sum(sent) / len(sent) / WORKERS if sent else None


def _run(
    commands: Mapping[Path, Sequence[str]], own: Mapping[str, str], deadline_s: float, right: Sequence[int] = (0,)
) -> list[str]:
    """Run commands side by side, each in its folder and as a session of its own, and return what each has said.

    Raises:
        RunFailedError: one ends with another exit code, or not in time.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
    environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "TOKENIZERS_PARALLELISM": "false"}
    environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "0"}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(FOLDER.with_name("compiled"))}  # what one run compiles, the others have
    until_s = time.monotonic() + deadline_s
    with ExitStack() as stack:
        processes = {}
        for folder, command in commands.items():
            homes = {"HF_HOME": str(folder / "hub"), "YOLO_CONFIG_DIR": str(folder / "yolo")}
            output = stack.enter_context((folder / "output.txt").open("w", encoding="utf-8"))
            processes[folder] = subprocess.Popen(
                command,
                cwd=folder,
                env={**environ, **homes, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_end, processes[folder])
        for folder, process in processes.items():
            how = ""
            try:
                if (code := process.wait(max(0.0, until_s - time.monotonic()))) not in right:
                    how = f"ended with {code}"
            except subprocess.TimeoutExpired:
                how = f"has not ended after {deadline_s:g} s"
            if how:
                raise RunFailedError(f"{shlex.join(commands[folder])} {how}:\n{_last(_said(folder))}")
    return [_said(folder) for folder in commands]


def _said(folder: Path) -> str:
    return (folder / "output.txt").read_text(encoding="utf-8", errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs; lsgd check and lsgd launch then end what they have started."""
    for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def _last(said: str) -> str:
    return "\n".join(said.splitlines()[-SHOWN_LINES:])
