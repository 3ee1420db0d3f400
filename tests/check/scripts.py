"""The scripts that are wrong on purpose, and the right ones, and how one is checked."""

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lsgd.check.check import STRAIGHT, Check
from lsgd.check.runs import Script, Started
from lsgd.check.verdicts import Verdict

from ..integration.running import FORKS, LIGHT

HERE = Path(__file__).parent
WRONG = sorted((HERE / "wrong").glob("*.py"))
RIGHT = sorted((HERE / "right").glob("*.py"))
ALL = frozenset(range(1, 10))
ONE_RUN = frozenset(STRAIGHT - {1})
"""The points of which one run of a script is enough."""

MORE: Mapping[str, Collection[int]] = {
    "accumulates": {6},
    "batchnorm": {6},
    "best_of": {1},
    "closure": {6},
    "draws_its_data": {6, 7},
    "folds": {1, 7},
    "ema_put_back": {6},
    "gan": {6},
    "own_loop": ALL,
    "pauses": {1},
    "plan_ends_it": {1},
    "steps_by_hand": {1, 7},
    "stream": {6, 7},
}
"""The points of a right script beyond those of one run: all, or those that it is a case of its own for."""


def points_of(script: Path) -> frozenset[int]:
    """Return the points on which a script is checked."""
    return frozenset({point_of(script)}) if script in WRONG else ONE_RUN.union(MORE.get(script.stem, ()))


def point_of(script: Path) -> int:
    """Return the point of which a wrong script has a mistake."""
    found = re.search(r"^Point (\d)\.$", script.read_text(), re.MULTILINE)
    assert found is not None, script
    return int(found[1])


def wrong_lines(script: Path) -> set[str]:
    """Return where the mistake is; empty: the script has no such line."""
    lines = script.read_text().splitlines()
    return {f"{script}:{number}" for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def variables_of(script: Path) -> dict[str, str]:
    """Return the variables with which a script is to be started."""
    found = re.search(r"^Variables: (\S+)$", script.read_text(), re.MULTILINE)
    return dict([found[1].split("=")]) if found else {}


def start(command: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> Started:
    """Start a launcher as a fork."""
    process = FORKS.popen(command, env={**environ, **LIGHT, "OMP_NUM_THREADS": "1"}, cwd=folder)
    return Logged(process, log)


class Logged:
    """A fork whose output is in a file once it has ended."""

    def __init__(self, fork, log: Path) -> None:
        self.pid, self._fork, self._log = fork.pid, fork, log
        log.touch()
        os.set_blocking(fork.stdout.fileno(), False)

    def poll(self) -> int | None:
        """Return its exit code, once it has ended."""
        code, pipe = self._fork.poll(), self._fork.stdout
        if not pipe.closed:
            with suppress(BlockingIOError), self._log.open("ab") as file:
                while data := os.read(pipe.fileno(), 1 << 16):
                    file.write(data)
            if code is not None:
                pipe.close()
        return code


def check(script: Path, scratch: Path, points: Collection[int] = ALL, steps: int = 70) -> dict[int, Verdict]:
    """Check a script; return what is said of each point."""
    source = scratch / "source"
    source.mkdir(parents=True)
    settings = Script(
        (sys.executable, str(script)),
        scratch / "scratch",
        steps=steps,
        patience_s=60.0,
        start=start,
        source=source,
        environ=variables_of(script),
    )
    return {each.point: each for each in Check(settings, print).judge(points)}
