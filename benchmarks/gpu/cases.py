"""What is tried, how it goes, and until when: parts of cases, each with its findings."""

import contextlib
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.testbed.launch import RunFailedError

Result = Literal["passed", "failed", "needs a GPU", "not run"]


class NotHereError(Exception):
    """This machine lacks what a case needs beside a GPU; the message says what."""


@dataclass(frozen=True)
class Setup:
    """Where everything runs.

    Args:
        device: of the workers, ``cuda`` or ``cpu``; on a CPU everything is small.
        folder: for what the runs leave.
    """

    device: str
    folder: Path

    @property
    def small(self) -> bool:
        """Whether sizes are small, and times not those of a GPU."""
        return self.device == "cpu"

    @property
    def gpu(self) -> str:
        """The device that all workers share: the first GPU, or the CPU."""
        return "cpu" if self.small else "cuda:0"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Args:
        what: was tried.
        result: how it went.
        measured: the figures in words.
        wanted: what they had to be.
        why: it failed, or was not run.
        figures: by name, with units in the names.
    """

    what: str
    result: Result
    measured: str = ""
    wanted: str = ""
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def judged(what: str, measured: str, figures: Mapping[str, float], name: str, least: float | None) -> Finding:
    """Return the finding of a figure that must be at least so large, or of one that is only measured (None)."""
    if least is None:
        return Finding(what, "passed", measured, figures=figures)
    enough = figures[name] >= least
    why = "" if enough else f"{figures[name]:.3g} is less than {least:g}"
    return Finding(what, "passed" if enough else "failed", measured, f"≥ {least:g}", why, figures)


@dataclass(frozen=True)
class Case:
    """What is tried at a time.

    Args:
        what: it is.
        run: returns the findings; gets the seconds that it has.
        needs_gpu: it cannot run without one.
    """

    what: str
    run: Callable[[float], Sequence[Finding]]
    needs_gpu: bool = False


@dataclass(frozen=True)
class Part:
    """Cases that belong together.

    Args:
        number: of the part.
        name: of it.
        limit_s: all of them together have so long.
        cases: in the order in which they begin.
        at_once: how many run at a time.
    """

    number: int
    name: str
    limit_s: float
    cases: Sequence[Case]
    at_once: int = 1


@dataclass(frozen=True)
class Done:
    """A finding with its part, and the seconds that its case took, with the first finding of a case only."""

    part: int
    finding: Finding
    seconds: float


def carry_out(part: Part, setup: Setup, note: Callable[[Done], None], log: Callable[[str], None]) -> None:
    """Run the cases of a part, whatever becomes of them, and note each finding as it is there.

    Args:
        part: to run.
        setup: where.
        note: is called by one thread at a time.
        log: gets the whole story of what failed.
    """
    deadline, lock = time.monotonic() + part.limit_s, threading.Lock()

    def run(case: Case) -> None:
        began = time.monotonic()
        found, story = _findings(case, setup, deadline - began, part.limit_s)
        with lock:
            if story:
                log(f"---- part {part.number}, {case.what}\n{story}")
            for index, finding in enumerate(found):
                note(Done(part.number, finding, 0.0 if index else time.monotonic() - began))

    if part.at_once == 1:
        for case in part.cases:
            run(case)
        return
    with ThreadPoolExecutor(part.at_once) as pool:
        list(pool.map(run, part.cases))


def _findings(case: Case, setup: Setup, left_s: float, limit_s: float) -> tuple[Sequence[Finding], str]:
    """Return the findings of a case, and the story of a failure."""
    if case.needs_gpu and setup.small:
        return [Finding(case.what, "needs a GPU")], ""
    if left_s <= 0:
        return [Finding(case.what, "failed", why=f"the {limit_s:g} s of its part were over before")], ""
    try:
        return case.run(left_s), ""
    except NotHereError as error:
        return [Finding(case.what, "not run", why=str(error))], ""
    except RunFailedError as error:
        return [Finding(case.what, "failed", why=_reason(str(error)))], str(error)
    except Exception as error:  # one case must not keep the others from running
        return [Finding(case.what, "failed", why=f"{type(error).__name__}: {error}")], traceback.format_exc()


def _reason(story: str) -> str:
    """Return the last line that names an error, or else the last one."""
    lines = [line.strip() for line in story.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\w(Error|Exception): ", line)]
    return (named or lines)[-1]


@contextlib.contextmanager
def in_folder(setup: Setup, name: str) -> Iterator[Path]:
    """Make a folder for one run."""
    folder = setup.folder / "".join(each if each.isalnum() else "-" for each in name)
    folder.mkdir(parents=True)
    yield folder
