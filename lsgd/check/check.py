"""Runs a script as each point needs it, and lets the judges judge."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from lsgd.check.changes import judge_changes
from lsgd.check.costs import judge_cost
from lsgd.check.data import judge_data
from lsgd.check.endings import judge_calls, judge_ends, judge_model
from lsgd.check.facts import Run
from lsgd.check.rates import judge_rates
from lsgd.check.returns import judge_resume, judge_return
from lsgd.check.runs import Script, Watched
from lsgd.check.saved import loaded
from lsgd.check.verdicts import POINTS, Status, Verdict
from lsgd.plan.estimate import Link

STRAIGHT = {1, 2, 3, 4, 5, 8, 9}
"""The points for which a run from the beginning to the end is needed."""


class Check:
    """One check of a script.

    Args:
        say: prints a line.
        link: for point 9.
    """

    def __init__(self, script: Script, say: Callable[[str], object], link: Link | None = None) -> None:
        self._script, self._say, self._link = script, say, link
        self._watched: list[Watched] = []
        self._alone: Run | None = None  # one worker's run, if it was made

    def close(self) -> None:
        """End everything that was started."""
        for each in self._watched:
            each.terminate()

    def judge(self, points: Collection[int]) -> list[Verdict]:
        """Run the script as these points need it, and return what is said of each."""
        try:
            return self._judge(points)
        finally:
            self.close()

    def _judge(self, points: Collection[int]) -> list[Verdict]:
        wanted, verdicts, runs = set(points), dict[int, Verdict](), True
        straight = self._straight() if wanted & STRAIGHT else None
        if straight is not None:
            runs = any(life.made for life in straight.lives)
            verdicts |= self._of_straight(straight)
            if 1 in wanted:
                verdicts[1] = judge_ends(straight, self._stopped() if runs else None)
        for point, judge in ((7, self._killed), (6, self._resumed)):
            if point in wanted:
                verdicts[point] = judge() if runs else Verdict(point, unjudged="it does not run at all")
        if straight is not None and 9 in wanted:
            verdicts[9] = judge_cost(straight, self._link, self._alone)
        return [verdicts[point] for point in sorted(wanted)]

    def _of_straight(self, run: Run) -> Mapping[int, Verdict]:
        if not run.lives:
            return {point: Verdict(point, unjudged="no worker has joined") for point in (2, 3, 4, 5, 8)}
        found = {2: judge_data(run), 3: judge_rates(run), 4: judge_changes(run), 5: judge_calls(run)}
        return found | {8: judge_model(run, saved_in(run))}

    # -- the runs ----------------------------------------------------------------------------------------------

    def _watch(self, name: str, workers: int, resumes: str = "") -> Watched:
        found = Watched(self._script, name, workers, resumes=resumes)
        self._watched.append(found)
        return found

    def _straight(self) -> Run:
        self._say(f"{self._script.workers} workers train, for at most {self._script.steps} steps each")
        watched = self._watch("straight", self._script.workers)
        if watched.at(self._script.steps) and not watched.ends_by_itself:
            watched.stop()
        run = watched.finish()
        if any(life.goes_on for life in run.lives):
            self._say("the script trains more than once: its first training is judged, and the run is ended after that")
        return run

    def _stopped(self) -> Run:
        self._say("the same, stopped in the middle, as by lsgd stop")
        watched = self._watch("stopped", self._script.workers)
        if watched.at_share(0.4):
            watched.stop()
        return watched.finish()

    def _killed(self) -> Verdict:
        self._say("the same, and one worker is killed with -9")
        watched = self._watch("killed", self._script.workers)
        if watched.at_share(0.25):
            watched.kill_worker()
            if watched.until_back():
                watched.stop()
        return judge_return(watched.finish())

    def _resumed(self) -> Verdict:
        self._say("one worker trains")
        whole = self._watch("alone", 1)
        if whole.at(self._script.steps) and not whole.ends_by_itself:
            whole.stop()
        self._alone = alone = whole.finish()
        self._say("the same, stopped half way")
        part = self._watch("half", 1)
        if part.at_share(0.5):
            part.stop()
        half = part.finish()
        self._say("the same, resumed")
        rest = self._watch("resumed", 1, resumes="half")
        if rest.at_place(self._script.steps) and not rest.ends_by_itself:
            rest.stop()
        resumed = rest.finish()
        return judge_resume(alone, half, resumed, by_name(alone), by_name(half) | by_name(resumed))


def saved_in(run: Run) -> dict[str, dict[str, str]]:
    """Return the digests of the tensors in each file that the workers of a run have written, by its path."""
    paths = {fact["path"] for life in run.lives for fact in life.of("file")}
    return {path: tensors for path in sorted(paths) if (tensors := loaded(Path(path)))}


def by_name(run: Run) -> dict[str, dict[str, str]]:
    """Return the same by the files' names."""
    return {Path(path).name: tensors for path, tensors in saved_in(run).items()}


def table(verdicts: list[Verdict], shorten: Callable[[str], str]) -> list[str]:
    """Return the lines of the report."""
    lines = []
    for verdict in verdicts:
        says = POINTS[verdict.point]
        lines.append(f"{verdict.status.value} {verdict.point}. {says}")
        for finding in verdict.findings:
            lines.append(f"      {shorten(finding.where) + ': ' if finding.where else ''}{shorten(finding.what)}")
            if finding.change:
                lines.append(f"      write: {finding.change}")
        if verdict.unjudged and verdict.status is Status.UNJUDGED:
            lines.append(f"      not judged: {verdict.unjudged}")
        lines += [f"      {shorten(note)}" for note in verdict.notes]
    return lines
