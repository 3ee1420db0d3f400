"""Point 3: learning rates at equal places, and how long schedules are."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from lsgd.check.facts import Fact, Life, Run
from lsgd.check.verdicts import Finding, Verdict, distinct

EQUAL = 1e-4
"""Rates this close, as a share, are one rate."""

FITS = 0.9
"""A schedule whose length is at least this share of the loop's, or of which the loop covers as much, fits."""

FOLLOW = "scheduler = worker.follow(scheduler)"


def judge_rates(run: Run) -> Verdict:
    """Judge the rates of all workers, and of each one's later lives."""
    verdict, lives = Verdict(3), [life for life in run.lives if life.made]
    if not lives:
        verdict.unjudged = "no worker has made a step"
        return verdict
    for life in lives:
        verdict.findings += _untold(life)
        verdict.findings += _too_long(life)
    if not verdict.findings:
        verdict.findings += differing(lives)
    if len({life.worker for life in lives}) < 2 and not verdict.findings:
        verdict.unjudged = "it takes two workers to compare"
    verdict.findings = distinct(verdict.findings)
    return verdict


def _untold(life: Life) -> Iterator[Finding]:
    """Yield what lsgd says of schedulers that nobody follows, and of others that do not fit."""
    for fact in life.of("warning"):
        if fact["module"] == "schedulers" and "is made for" not in fact["text"]:  # which is judged by itself
            yield Finding(_stepped_at(life, fact), fact["text"].removeprefix(f"{life.worker}: "), FOLLOW)


def _stepped_at(life: Life, fact: Fact) -> str:
    return str(fact["where"] or (life.of("step")[0]["where"] if life.of("step") else ""))


def _too_long(life: Life) -> Iterator[Finding]:
    """Yield a finding for each scheduler that the loop does not go through, or goes through too early."""
    loop = life.loop
    for fact in life.of("scheduler")[:1]:
        length, count, made = fact["length"], fact["count"], fact["made"]
        if not loop or length is None or not made or fact["over"]:
            continue
        if not FITS <= count / made <= 1.2:  # it is not stepped in each iteration
            continue
        if not FITS <= loop / length <= 1 / FITS:
            covers = "covers {:.0f} % of it" if loop < length else "goes {:.0f} % of its length"
            words = covers.format(100 * loop / length)
            what = f"{fact['name']} is made for {length} steps, and the loop of {loop} {words}"
            where = next((call["where"] for call in life.of("call") if call["name"] == "follow"), "")
            yield Finding(where or life.of("step")[0]["where"], what, f"make it for worker.steps = {loop}")


def differing(lives: Sequence[Life]) -> Iterator[Finding]:
    """Yield a finding for a worker whose rates differ from another's where both are at the same place."""
    base = [fact for fact in lives[0].of("step") if not fact["over"]]
    for life in lives[1:]:
        for fact in life.of("step"):
            if fact["over"]:
                continue
            expected = _between(base, fact)
            if expected is None or _inside(fact["lrs"], *expected):
                continue
            low, high = expected
            there = f"{low[0]:.4g}" if low[0] == high[0] else f"{low[0]:.4g} to {high[0]:.4g}"
            place = (
                f"step {fact['place']}" if fact["progress"] is None else f"{100 * fact['progress']:.0f} % of the run"
            )
            what = f"{life.worker} has the learning rate {fact['lrs'][0]:.4g} at {place}, {lives[0].worker} {there}"
            yield Finding(fact["where"], what, f"{FOLLOW}, or worker.schedule")
            break


def _between(base: Sequence[Fact], fact: Fact) -> tuple[list[float], list[float]] | None:
    """Return the lowest and the highest rates of the first worker around a place; None: it was not there."""
    own = [each for each in base if each["optimizer"] == fact["optimizer"]]
    if fact["progress"] is None:
        near = [each for each in own if each["place"] == fact["place"]]
    else:
        places = [each["progress"] for each in own]
        at = bisect_left(places, fact["progress"])
        near = own[max(0, at - 2) : at + 2] if 0 < at < len(own) else []
    near = [each for each in near if len(each["lrs"]) == len(fact["lrs"])]
    if not near or not fact["lrs"]:
        return None
    rows = list(zip(*(each["lrs"] for each in near), strict=True))
    return [min(row) for row in rows], [max(row) for row in rows]


def _inside(rates: Sequence[float], low: Sequence[float], high: Sequence[float]) -> bool:
    return all(a - EQUAL * abs(a) <= rate <= b + EQUAL * abs(b) for rate, a, b in zip(rates, low, high, strict=True))
