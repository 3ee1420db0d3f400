"""Point 2: who has learned from which samples, and with whose random numbers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lsgd.check.facts import Fact, Life, Run
from lsgd.check.verdicts import Finding, Verdict, distinct

SHARD = "loader = worker.shard(loader)"
SEVERAL = 3
"""So many equal batches or numbers are no chance."""

ENDLESS = "Endless"
"""What draws in a Trainer's loader: one deal after the other, so that a pass keeps the length that it has alone."""

FEWEST, SHARE = 2, 0.05
"""So many samples, and such a share of a pass, that two workers have drawn are no chance: data may repeat itself."""


MORE_THAN_REPEATS, MOST = 3, 0.9
"""So many times as many samples as one draws twice must two workers share: else all draw some of them often. But such a
share of a pass is no chance."""


def judge_data(run: Run) -> Verdict:
    """Judge samples and noise of the workers' first lives."""
    verdict, lives = Verdict(2), run.firsts
    if len(lives) < 2:
        verdict.unjudged = "it takes two workers to compare"
        return verdict
    shown = [life for life in lives if life.made]
    if len(shown) < 2:
        verdict.unjudged = "two workers have made no step"
        return verdict
    passes = _passes(lives)
    for whose in passes.values():
        verdict.findings += _shared(whose) or _left_out(whose)
    if not passes or not verdict.findings:
        verdict.findings += _equal(shown)
    verdict.findings += _noise(shown)
    verdict.findings += _refused(run)
    if not passes and not verdict.findings:
        verdict.notes.append("it draws from no DataLoader: only batches that are equal bit by bit were looked for")
    verdict.findings = distinct(verdict.findings)
    return verdict


class Pass:
    """One worker's pass over the data that it trains on.

    Args:
        worker: who.
        begins: the fact of its beginning.
        batches: those that it has trained on.
        whole: whether it came to its end.
    """

    def __init__(self, worker: str, begins: Fact, batches: Sequence[Fact], *, whole: bool) -> None:
        self.worker, self.begins, self.whole = worker, begins, whole
        self.rows: list[int] = [row for fact in batches for row in fact["rows"] or ()]
        self.samples: list[str] = [sample for fact in batches for sample in fact["samples"]]


def _passes(lives: Sequence[Life]) -> dict[tuple[int, int], list[Pass]]:
    """Return the workers' passes with the same number over the loader that each makes as the same one."""
    found: dict[tuple[int, int], list[Pass]] = {}
    for life in lives:
        order = {loader: place for place, loader in enumerate(sorted(life.trains_on))}
        counts = Counter[int]()
        for begins in life.of("pass"):
            if (loader := begins["loader"]) not in order:
                continue
            if begins["sampler"] == ENDLESS:
                for deal, dealt in _deals(life, begins).items():
                    found.setdefault((order[loader], deal), []).append(Pass(life.worker, begins, dealt, whole=False))
                continue
            batches = [fact for fact in life.of("batch") if fact["number"] == begins["number"] and not fact["over"]]
            if not batches:
                continue
            whole = any(fact["number"] == begins["number"] and not fact["over"] for fact in life.of("pass_ends"))
            number = begins["epoch"] if begins["epoch"] is not None and begins["divided"] else counts[loader]
            counts[loader] += 1
            found.setdefault((order[loader], number), []).append(Pass(life.worker, begins, batches, whole=whole))
    return {key: whose for key, whose in found.items() if len({each.worker for each in whose}) > 1}


def _deals(life: Life, begins: Fact) -> dict[int, list[Fact]]:
    """Return the batches of a Trainer's pass by the deal of the data that they are from: its length is its own."""
    found: dict[int, list[Fact]] = {}
    for fact in life.of("batch"):
        if fact["number"] == begins["number"] and not fact["over"] and fact["deal"] is not None:
            found.setdefault(fact["deal"], []).append(fact)
    return found


def _shared(whose: Sequence[Pass]) -> list[Finding]:
    """Return what several workers have drawn: by row numbers where lsgd deals them, else by what the samples hold."""
    begins = whose[0].begins
    by_rows = begins["divided"] and all(each.rows for each in whose)
    sets: dict[str, set[Any]] = {}
    for each in whose:  # a deal may last for several passes
        sets.setdefault(each.worker, set()).update(each.rows if by_rows else each.samples)
    (one, mine), *others = sets.items()
    repeats = max(_repeats(each.rows if by_rows else each.samples) for each in whose)
    chance = min(MOST, SHARE + MORE_THAN_REPEATS * repeats)
    for other, theirs in others:
        both = mine & theirs
        if len(both) >= FEWEST and len(both) >= chance * min(len(mine), len(theirs)):
            share = 100 * len(both) / min(len(mine), len(theirs))
            what = f"{one} and {other} draw the same samples: {share:.0f} % of a pass"
            change = SHARD if not begins["divided"] else "let no sampler draw what another worker has drawn"
            return [Finding(begins["where"], what, change)]
    return []


def _repeats(drawn: Sequence[Any]) -> float:
    """Return the share that a worker has drawn again within a pass: with replacement, or data that repeats itself."""
    return 1 - len(set(drawn)) / len(drawn) if drawn else 0.0


def _left_out(whose: Sequence[Pass]) -> list[Finding]:
    """Return what nobody has drawn, if all have drawn to the end of the pass."""
    begins = whose[0].begins
    if begins["length"] is None or not begins["divided"] or begins["sampler"] != "ShardSampler":
        return []  # another sampler leaves out what it wants
    if not all(each.whole for each in whose) or any(each.begins["length"] != begins["length"] for each in whose):
        return []
    drawn = set[int]().union(*(each.rows for each in whose))
    missing = [row for row in range(begins["length"]) if row not in drawn]
    allowed = len(whose) * (begins["batch_size"] or 1) if begins["drop_last"] else 0
    if len(missing) <= allowed:
        return []
    what = f"nobody draws {len(missing)} of {begins['length']} samples in a pass, such as row {missing[0]}"
    return [Finding(begins["where"], what, SHARD)]


def _equal(lives: Sequence[Life]) -> Iterator[Finding]:
    """Yield a finding if two workers have learned from equal batches, where these have no rows."""
    steps = [[taught for taught in life.taught if taught.data] for life in lives]
    for mine, life in zip(steps[1:], lives[1:], strict=True):
        same = sum(a.data == b.data for a, b in zip(steps[0], mine, strict=False))
        compared = min(len(steps[0]), len(mine))
        if same >= min(SEVERAL, compared) > 0 and same > compared // 2:
            where = _drawn_at(mine[0].batches) or mine[0].step["where"]
            what = f"{lives[0].worker} and {life.worker} learn from the same batches, in {same} of {compared} steps"
            yield Finding(where, what, f"{SHARD}; or draw from worker.rows(len(data))")


def _drawn_at(batches: Sequence[Fact]) -> str:
    return str(batches[0]["where"]) if batches else ""


def _noise(lives: Sequence[Life]) -> Iterator[Finding]:
    """Yield a finding if two workers draw the same random numbers, one after the other."""
    noises = [[fact["noise"] for fact in life.of("step") if not fact["over"]] for life in lives]
    for mine, life in zip(noises[1:], lives[1:], strict=True):
        for number, generator in enumerate(("torch", "NumPy", "Python")):
            if len({a[number] for a, b in zip(noises[0], mine, strict=False) if a[number] == b[number]}) < 2:
                continue
            joined = life.joined or {"t": 0, "where": ""}
            seeds = [fact for fact in life.of("seed") if fact["t"] > joined["t"]]
            where = seeds[0]["where"] if seeds else joined["where"]
            what = f"{lives[0].worker} and {life.worker} draw the same random numbers from {generator}'s generator"
            yield Finding(
                where, what, f"{seeds[0]['what']} before the join" if seeds else "own_noise = true in the plan"
            )


def _refused(run: Run) -> Iterator[Finding]:
    """Yield what lsgd itself has refused or warned of."""
    for life in run.lives:
        for fact in life.of("warning"):
            if fact["module"] == "first" and "not sharded" in fact["text"]:
                yield Finding(fact["where"], fact["text"], SHARD)
