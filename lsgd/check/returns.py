"""Points 6 and 7: whether a script that is resumed, or a worker that is killed, goes on where it was."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lsgd.check.endings import crash_of
from lsgd.check.facts import Fact, Life, Run, Taught
from lsgd.check.rates import FOLLOW, differing
from lsgd.check.verdicts import Finding, Verdict, distinct

CLOSE = 1e-3
"""Sums of weights this close, as a share of their length, are equal: a round's rounding stands between them."""

SOON = 6
"""In so many steps weights are compared: what rounding has changed grows."""

CHANGES: Mapping[str, str] = {
    "learning rate": f"{FOLLOW}; a rate of your own from worker.step",
    "weights": "save what the script keeps beside the optimizer, such as an EMA: extra={'ema': ema}",
}
"""What to change, by what differs in a resumed run."""

DATA: Mapping[str, str] = {
    "loader": "loader = worker.shard(loader); a loader of your own: worker.attend('data', loader)",
    "stream": "loader = worker.loader(stream, batch_size=n); one that knows its place: worker.attend('data', stream)",
    "by hand": "draw by worker.step, as x[(worker.step * n) % len(x):][:n] of this worker's part; or save where you "
    "are: worker.attend('data', place), which has state_dict and load_state_dict",
}
"""What to change if batches differ, by what they come from."""


# -- 6 ---------------------------------------------------------------------------------------------------------


def judge_resume(
    alone: Run, half: Run, resumed: Run, files: Mapping[str, Mapping[str, str]], others: Mapping[str, Mapping[str, str]]
) -> Verdict:
    """Judge whether a resumed run makes the steps of one that was not stopped.

    Args:
        alone: one worker, from the beginning to the end.
        half: the same, stopped in the middle.
        resumed: what follows.
        files: digests of what ``alone`` has saved by file names.
        others: of what ``half`` and ``resumed`` have, together.
    """
    verdict = Verdict(6)
    for run in (alone, half):
        if not run.firsts or not run.firsts[0].made:
            verdict.unjudged = f"with one worker, it makes no step: {crash_of(run)[1]}"
            return verdict
    expected = {taught.step["place"]: taught for taught in alone.firsts[0].taught}
    if apart := _first_apart(expected, list(half.firsts[0].taught)):
        verdict.unjudged = (
            f"two runs from its beginning differ in their {apart[0]} from step {apart[1].step['place']} on"
        )
        return verdict
    if not resumed.firsts:
        where, why = crash_of(resumed)
        verdict.findings.append(Finding(where, f"it does not resume: {resumed.waits or why}"))
        return verdict
    life, stopped_at = resumed.firsts[0], half.firsts[0].made
    if not life.made:
        where, why = crash_of(resumed)
        if resumed.status == 0 and not resumed.waits and half.firsts[0].made >= alone.firsts[0].made:
            verdict.unjudged = "it was over before it could be stopped half way"
        else:
            verdict.findings.append(Finding(where, f"resumed, it makes no step: {resumed.waits or why}"))
        return verdict
    verdict.findings += _resumed_wrong(expected, life, stopped_at)
    if not verdict.findings:
        verdict.findings += _begins_anew(life, "resumed")
    if not verdict.findings:
        verdict.findings += _noise_apart(expected, life, verdict)
    if not verdict.findings and _same_end(alone, resumed):
        verdict.findings += _other_files(alone, files, others)
    verdict.findings = distinct(verdict.findings)
    return verdict


def _resumed_wrong(expected: Mapping[int, Taught], life: Life, stopped_at: int) -> Iterator[Finding]:
    taught = list(life.taught)
    if not any(each.step["place"] in expected for each in taught):
        place = taught[0].step["place"]
        yield Finding(
            taught[0].step["where"], f"resumed, it begins at step {place}, and it was stopped at {stopped_at}"
        )
        return
    if apart := _first_apart(expected, taught):
        kind, step = apart
        place = step.step["place"]
        what = f"resumed, its {kind} differ from step {place} on: it was stopped at step {stopped_at}"
        if kind == "learning rate":
            own, other = step.step["lrs"], expected[place].step["lrs"]
            what = f"resumed, its learning rate at step {place} is {_number(own)} in place of {_number(other)}"
        where = step.batches[0]["where"] if kind == "batches" and step.batches else step.step["where"]
        yield Finding(where, what, DATA[_source(step)] if kind == "batches" else CHANGES[kind])


def _source(step: Taught) -> str:
    """Return what a step's batches come from, as in :data:`DATA`."""
    if not step.batches:
        return "by hand"
    return "stream" if all(batch["stream"] for batch in step.batches) else "loader"


def _number(rates: Sequence[float]) -> str:
    return f"{rates[0]:.4g}" if rates else "none"


def _first_apart(expected: Mapping[int, Taught], taught: Sequence[Taught]) -> tuple[str, Taught] | None:
    """Return what differs first, and in which step; None: nothing does at the places that both have.

    Where the plan ends the run, rates follow its progress, which a worker hears a step sooner or later.
    """
    alike = True  # until rates or random numbers have made the weights others
    for number, each in enumerate(taught):
        place = each.step["place"]
        if (other := expected.get(place)) is None:
            continue
        by_progress = other.step["progress"] is not None
        near = range(place - 2 * by_progress, place + 2 * by_progress + 1)
        rates = [expected[at].step["lrs"] for at in near if at in expected]
        if not _inside(each.step["lrs"], rates):
            return "learning rate", each
        if alike and not _same_data(each, other, ahead=number == 0):
            return "batches", each
        alike = alike and not by_progress and each.step["noise"] == other.step["noise"]
        if alike and number < SOON and _apart(each.step["weights"], other.step["weights"]):
            return "weights", each
    return None


def _same_data(one: Taught, other: Taught, *, ahead: bool) -> bool:
    """Return whether two steps have learned from the same; ``ahead``: one may have drawn its loader's first batches."""
    mine, theirs = list(one.data), list(other.data)
    shorter = min(len(mine), len(theirs))
    return mine == theirs or (ahead and shorter > 0 and mine[-shorter:] == theirs[-shorter:])


def _inside(own: Sequence[float], rates: Sequence[Sequence[float]]) -> bool:
    """Return whether rates are between the lowest and the highest of others, or as far beyond as these are apart."""
    columns = list(zip(*rates, strict=True))
    if len(own) != len(columns):
        return False
    spans = [max(column) - min(column) + CLOSE * max(map(abs, column)) + 1e-12 for column in columns]
    return all(
        min(column) - span <= rate <= max(column) + span for rate, column, span in zip(own, columns, spans, strict=True)
    )


def _noise_apart(expected: Mapping[int, Taught], life: Life, verdict: Verdict) -> Iterator[Finding]:
    """Yield a finding if a resumed worker draws again what it has drawn; note other numbers than without a stop."""
    first, *taught = life.taught  # the first one's numbers may be restored within the step, if it is a closure's
    apart = [each for each in taught if _other_noise(each, expected.get(each.step["place"]))]
    if not taught or not apart:
        return
    begun = {tuple(each.step["noise"]) for place, each in expected.items() if place < first.step["place"]}
    if len(begun & {tuple(each.step["noise"]) for each in taught}) > 1:
        seeds = [fact for fact in life.of("seed") if fact["where"]]
        where = seeds[-1]["where"] if seeds else taught[0].step["where"]
        yield Finding(where, "resumed, it draws the random numbers of its first steps again", "seed before the join")
        return
    verdict.notes.append(
        f"resumed, its random numbers differ from step {apart[0].step['place']} on, so weights were not compared from "
        f"there: it draws between two steps"
    )


def _other_noise(one: Taught, other: Taught | None) -> bool:
    return other is not None and one.step["noise"] != other.step["noise"]


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    if len(one) != len(other):
        return True
    far = math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))
    return not far <= CLOSE * math.sqrt(sum(a * a for a in other)) + 1e-12


def _same_end(one: Run, other: Run) -> bool:
    ends = [run.firsts[0].last("exit") for run in (one, other)]
    return all(end is not None and end["consensus"] for end in ends) and len({end["step"] for end in ends if end}) == 1


def _other_files(
    alone: Run, files: Mapping[str, Mapping[str, str]], others: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    final = [fact for fact in alone.firsts[0].of("file") if fact["over"]]
    model = set((alone.firsts[0].last("exit") or {"tensors": {}})["tensors"].values())
    for fact in final:
        name = fact["path"].rpartition("/")[2]
        own, resumed = files.get(name), others.get(name)
        if not own or not resumed or set(own.values()) <= model:
            continue  # the model itself: that its weights are equal up to rounding is judged above
        if own.keys() != resumed.keys() or not set(own.values()) & set(resumed.values()):
            what = f"resumed, {name} is another file than without a stop: what it holds has begun anew"
            yield Finding(fact["where"], what, "pass what it holds to the join: extra={'ema': ema}")


# -- 7 ---------------------------------------------------------------------------------------------------------


def judge_return(run: Run) -> Verdict:
    """Judge how a worker comes back that was killed."""
    verdict = Verdict(7)
    lives = run.by_worker.get(run.killed, [])
    if not any(life.made for life in run.lives):
        verdict.unjudged = f"it makes no step: {crash_of(run)[1]}"
        return verdict
    if not run.killed or len(run.firsts) < run.workers:
        verdict.unjudged = "it was over before a worker could be killed"
        return verdict
    if len(lives) < 2:
        where, why = crash_of(run)
        verdict.findings.append(Finding(where, f"{run.killed} does not come back: {run.waits or why}"))
        return verdict
    back = lives[-1]
    others = [life for life in run.firsts if life.worker != run.killed]
    errors = [fact for fact in back.of("raised") if "SystemExit" not in fact["error"]]
    if not back.made:
        where, why = crash_of(run)
        failed = run.status not in (0, None) or errors
        if failed:
            verdict.findings.append(
                Finding(where, f"{run.killed} comes back and fails: {why}", FOLLOW * ("rate" in why))
            )
        else:
            verdict.unjudged = "the others had ended when it came back"
        return verdict
    verdict.findings += _begins_anew(back, "started again")
    verdict.findings += [
        Finding(each.where, f"killed and started again, {each.what}", each.change)
        for each in differing([*others, back])
        if each.what.startswith(back.worker)
    ]
    if run.waits:
        verdict.findings.append(Finding("", f"after {run.killed} was killed, nothing moves any more: {run.waits}"))
    verdict.findings = distinct(verdict.findings)
    return verdict


def _begins_anew(life: Life, how: str) -> Iterator[Finding]:
    """Yield a finding if a loop of the script's own cannot know where it is to begin."""
    joined: Fact = life.joined or {}
    read = {fact["name"] for fact in life.of("read")}
    if joined.get("step", 0) > 0 and life.loop and joined["door"] == "loop" and not read & {"step", "stopped"}:
        what = f"{how}, its loop begins at 0, though the worker is at step {joined['step']} of {life.loop}"
        yield Finding(life.of("step")[0]["where"], what, "for step in range(worker.step, max_steps)")
