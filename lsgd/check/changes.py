"""Point 4: what changes weights beside optimizer steps and rounds."""

from collections.abc import Iterator

from lsgd.check.facts import Life, Run
from lsgd.check.verdicts import Finding, Verdict, distinct

EACH_STEP = 0.8
"""A line that was carried out in at least this share of the steps is a part of the step."""


def judge_changes(run: Run) -> Verdict:
    """Judge what has changed the weights between the join and the end of the run."""
    verdict = Verdict(4)
    lives = [life for life in run.lives if life.made]
    if not lives:
        verdict.unjudged = "no worker has made a step"
        return verdict
    for life in lives:
        verdict.findings += _outside(life, verdict.notes)
    verdict.findings = distinct(verdict.findings)
    verdict.notes = sorted(set(verdict.notes))
    return verdict


def _outside(life: Life, notes: list[str]) -> Iterator[Finding]:
    for fact in life.of("foreign"):
        if not fact["over"]:
            what = f"{fact['optimizer']}, which has not joined, steps the model"
            yield Finding(fact["where"], what, "join with all of them: [optimizer, second]")
    if life.of("foreign"):
        return
    moved = [fact for fact in life.of("moved") if not fact["over"] and fact["before"] != "end"]
    seen = [fact for fact in moved if fact["by"]] or moved  # of the first one nothing may be known but that it was
    for fact in seen:
        often = [line for line, steps in fact["by"].items() if steps >= EACH_STEP * fact["made"]]
        lines = [line for line in fact["by"] if line not in often]
        if often and not lines:
            notes.append(f"{often[0]} changes weights, and runs in each step: it counts as a part of the step")
            continue
        tensors = fact["names"][0] + (f" and {fact['tensors'] - 1} more" if fact["tensors"] > 1 else "")
        what = f"it changes weights between two steps, and they stay changed: {tensors}"
        change = "put the trained weights back before, or do it before the join or after worker.finish()"
        yield Finding(lines[-1] if lines else fact["where"], what, change)
