"""Starts the script as lsgd launch does, watches what its workers note, and ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from lsgd.check.facts import Life, Reader, Run
from lsgd.check.settings import variables
from lsgd.node.screen import LAUNCHER
from lsgd.observer import FOLDER_VARIABLE

POLL_S = 0.1
END_WITHIN_S = 20.0
"""How long what was told to end may take before it is killed."""

STEPS_AFTER_END = 40
"""After how many steps that change nothing a loop does not end with its run."""

STEPS_BACK = 6
"""So many steps show where a worker that comes back is."""

STAND_STILL_S = 30.0
"""How long the others wait for a worker that is started again, so that it finds them in the training."""

MOST_LINKS = 1000
"""Most files of a folder that are linked one by one."""

LOG_NBYTES = 20_000
KEPT = "check"
"""Folder in the scratch folder that has facts and logs, and is not the script's."""


class Started(Protocol):
    """A launcher that was started."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, once it has ended."""
        ...


Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], Started]
"""Starts a command with variables in a folder, with its output in a file."""


def start(command: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> Started:
    """Start a command in a session of its own: Ctrl-C is for the check, which then ends it."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@dataclass(frozen=True)
class Script:
    """What is checked, and how.

    Args:
        command: of the script.
        scratch: folder for all runs.
        workers: how many, but for the runs of point 6.
        steps: of each worker, before its run is stopped.
        patience_s: how long nothing may move.
        plan: the user's plan; None: the defaults.
        device: as for ``lsgd launch``.
        start: starts a launcher.
        source: folder from which the script is started.
        environ: the user's variables.
    """

    command: tuple[str, ...]
    scratch: Path
    workers: int = 2
    steps: int = 40
    patience_s: float = 120.0
    plan: Path | None = None
    device: str = "auto"
    start: Start = start
    source: Path = Path()
    environ: Mapping[str, str] = field(default_factory=dict)


class Watched:
    """A run under way."""

    def __init__(self, script: Script, name: str, workers: int, *, resumes: str = "") -> None:
        self._script, self._name, self._workers = script, name, workers
        folder = script.scratch / (resumes or name)
        self._run, self._own = folder / KEPT / "run", folder / "folder"
        facts, self._log = folder / KEPT / f"facts-{name}", folder / KEPT / f"{name}.log"
        facts.mkdir(parents=True)
        self._reader = Reader(facts)
        if not resumes:
            link_all(script.source, self._own, script.scratch)
        command = [sys.executable, "-m", "lsgd.client", "launch", "--plain", "--workers", str(workers)]
        command += ["--run-dir", str(self._run), "--device", script.device]
        command += ["--plan", str(script.plan.absolute())] if script.plan is not None and not resumes else []
        command += ["--resume"] if resumes else []
        environ = variables({**os.environ, **script.environ}, script.plan, workers, script.steps)
        environ |= {FOLDER_VARIABLE: str(facts)}
        self._process = script.start([*command, "--", *script.command], environ, self._own, self._log)
        self._stopped, self._killed, self._waits = False, "", ""

    def lives(self) -> list[Life]:
        """Return what was noted so far."""
        return self._reader.lives()

    def target(self, share: float) -> int:
        """Return the step at a share of what a worker makes here: of ``--steps``, or of its own loop if that ends."""
        loop = max((life.loop for life in self.lives()), default=0)
        steps = min(self._script.steps, loop or self._script.steps)
        return max(1, int(share * steps))

    def until(self, condition: Callable[[list[Life]], bool]) -> bool:
        """Wait for a condition; return whether it came before the run's end, and before nothing moved any more."""
        moved_at, seen = time.monotonic(), 0
        while self._process.poll() is None:
            lives = self.lives()
            if condition(lives):
                return True
            if _train_again(lives):
                return False
            if sum(len(life.moving) for life in lives) != seen:
                moved_at, seen = time.monotonic(), sum(len(life.moving) for life in lives)
            if time.monotonic() - moved_at > self._script.patience_s:
                self._waits = where_they_are(lives) or f"no worker has joined within {self._script.patience_s:g} s"
                self.terminate()
                return False
            time.sleep(POLL_S)
        return False

    def at(self, step: int) -> bool:
        """Wait until all have made so many steps; return whether they have: their own loops may end before."""
        return self.until(lambda lives: _all_have(lives, self._workers, step))

    @property
    def ends_by_itself(self) -> bool:
        """Whether all have loops of their own that end here."""
        lives = self.lives()
        return bool(lives) and all(0 < life.loop <= self._script.steps for life in lives)

    def at_share(self, share: float) -> bool:
        """Wait until all have made a share of what they make here; return whether they have, with some steps left."""
        return self.until(lambda lives: _all_have(lives, self._workers, self.target(share)))

    def at_place(self, place: int) -> bool:
        """Wait until all are at a place of their loops; return whether they are."""
        return self.until(lambda lives: _all_are_at(lives, self._workers, place))

    def until_back(self) -> bool:
        """Wait until the killed worker has made some steps of a new life; meanwhile the others stand still."""
        lives = self.lives()
        others = [int(life.joined["pid"]) for life in lives if life.joined and life.worker != self._killed]
        before = self._reader.processes
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            until_s = time.monotonic() + STAND_STILL_S
            self.until(lambda _: self._reader.processes > before or self._is_given_up() or time.monotonic() > until_s)
        finally:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        return self.until(lambda now: len(now) > len(lives) and now[-1].made >= STEPS_BACK)

    def _is_given_up(self) -> bool:
        """Whether the launcher has said of the killed worker that it has ended, and not that it starts again."""
        lines = self._log.read_text(errors="replace").splitlines()
        return any("restarting" not in line for line in lines if line.startswith(f"{LAUNCHER}{self._killed} "))

    def stop(self) -> None:
        """Stop the run, as lsgd stop or Ctrl-C do."""
        if self._process.poll() is None:
            self._stopped = True
            os.kill(self._process.pid, signal.SIGINT)

    def kill_worker(self) -> None:
        """Kill the last worker's process with -9."""
        life = self.lives()[-1]
        assert life.joined is not None
        self._killed = life.worker
        os.kill(int(life.joined["pid"]), signal.SIGKILL)

    def finish(self) -> Run:
        """Wait for the end of the run, unless its scripts go on after it or past their length; return its facts."""
        goes_on = self.until(lambda lives: any(after_end(life) >= STEPS_AFTER_END or life.is_endless for life in lives))
        lives, status = self.lives(), self._process.poll()
        again = status is None and _train_again(lives)
        if goes_on or again:
            self.terminate()
        logs = {path.stem: tail(path) for path in sorted(self._run.glob("*.log"))} | {"launcher": tail(self._log)}
        ended = None if goes_on or self._waits else 0 if again else status
        run = Run(self._name, self._workers, lives, ended, self._stopped, self._killed, self._waits, logs, self._own)
        return run

    def terminate(self) -> None:
        """End everything, at once if need be."""
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            os.kill(self._process.pid, number)
            deadline_s = time.monotonic() + (1.0 if number == signal.SIGINT else END_WITHIN_S)
            while self._process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(POLL_S)


def _train_again(lives: Sequence[Life]) -> bool:
    """Whether all workers have ended their first training, and some go on to another."""
    last = {life.worker: life for life in lives}.values()
    return any(life.goes_on for life in last) and all(life.goes_on or life.last("exit") for life in last)


def _all_have(lives: Sequence[Life], workers: int, steps: int) -> bool:
    return len(lives) >= workers and all(life.made >= steps for life in lives)


def _all_are_at(lives: Sequence[Life], workers: int, place: int) -> bool:
    steps = [life.last("step") for life in lives]
    return len(lives) >= workers and all(step is not None and step["place"] >= place for step in steps)


def after_end(life: Life) -> int:
    """Return how many steps a worker's script has made after the end of its run."""
    return sum(fact["over"] for fact in life.of("step"))


def where_they_are(lives: Sequence[Life]) -> str:
    """Return where each worker's script is, in words."""
    words = []
    for life in lives:
        at = life.last("at")
        if life.last("exit") is not None:
            words.append(f"{life.worker} has ended")
        elif at is not None:
            waits = f"waits in {at['call']}() at" if at["call"] else "is at"
            words.append(f"{life.worker} {waits} {at['where'] or 'no line of the script'}")
    return "; ".join(words)


def link_all(source: Path, folder: Path, scratch: Path, most: int = MOST_LINKS) -> None:
    """Make a folder with links to all files of another, so that relative paths lead there, and new files come here.

    A folder in it that has too many files, or is hidden, is a link itself. The scratch folder may be in it, too.
    """
    folder.mkdir(parents=True)
    for path in [*source.absolute().iterdir()]:
        if path == scratch.absolute() or path.name == "runs":
            continue
        if path.is_symlink() or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
            (folder / path.name).symlink_to(path)
        elif path.name.startswith(".") or _has_more(path, most):
            (folder / path.name).symlink_to(path)
        else:
            link_all(path, folder / path.name, scratch, most)


def _has_more(folder: Path, most: int) -> bool:
    files = (name for _, _, names in os.walk(folder) for name in names)
    return next(islice(files, most, None), None) is not None


def tail(path: Path) -> str:
    """Return the last lines of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_NBYTES))
        return file.read().decode(errors="replace")
