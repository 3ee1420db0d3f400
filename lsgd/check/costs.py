"""Point 9: what a step and a round cost, and what more machines would bring."""

from lsgd.check.facts import Fact, Life, Run
from lsgd.check.verdicts import Verdict
from lsgd.plan.estimate import Link, lines

WHOLE_STEPS = 10_000
"""Of one machine, if the script's own loop says nothing."""


def judge_cost(run: Run, link: Link | None, alone: Run | None = None) -> Verdict:
    """Return what the straight run has cost, and what more machines bring on a link.

    ``alone``: one worker's run, whose steps take as long as they do on a machine of their own.
    """
    verdict = Verdict(9)
    if (found := _ended(run)) is None:
        verdict.unjudged = "no worker has made a step and ended"
        return verdict
    life, end = found
    joined, times = life.joined or {}, end["timings"]
    all_s = times["compute_s"] + times["waiting_s"] + times["exchange_s"]
    verdict.notes += [
        f"{end['peak_nbytes'] / 1e6:,.0f} MB of memory at most, for {_size(joined['nbytes'])} of parameters",
        f"{100 * times['exchange_s'] / max(all_s, 1e-9):.0f} % of the time in rounds here, where all workers share one "
        f"machine; {times['sent_nbytes'] / times['steps']:,.0f} bytes sent per step",
    ]
    if link is None:
        verdict.notes.append("what more machines would be worth: give the link, as --link 100mbit,20ms")
        return verdict
    single = None if alone is None else _ended(alone)
    step_s, steps = _step_s(end if single is None else single[1]), life.loop or WHOLE_STEPS
    verdict.notes += lines(joined["parameters"], step_s, link, steps, muon=joined["muon"])
    if single is None:
        verdict.notes.append("the step's time is that of workers that share this machine; with point 6 it is one's own")
    return verdict


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.1f} kB"


def _ended(run: Run) -> tuple[Life, Fact] | None:
    """Return a worker that has made steps and ended, with the fact of its end; None: there is none."""
    for life in run.firsts:
        if (end := life.last("exit")) is not None and end["timings"]["steps"]:
            return life, end
    return None


def _step_s(end: Fact) -> float:
    """Return how long a step takes where nobody watches."""
    seconds: float = max(end["timings"]["compute_s"] - end["watching_s"], 1e-6) / end["timings"]["steps"]
    return seconds
