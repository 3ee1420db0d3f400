"""Point 9: what a step and a round cost, and what more machines would bring."""

from lsgd.check.facts import Run
from lsgd.check.verdicts import Verdict
from lsgd.plan.estimate import Link, lines

WHOLE_STEPS = 10_000
"""Of one machine, if the script's own loop says nothing."""


def judge_cost(run: Run, link: Link | None) -> Verdict:
    """Return what the straight run has cost, and what more machines bring on a link."""
    verdict = Verdict(9)
    ends = [(life, end) for life in run.firsts if (end := life.last("exit")) is not None and end["timings"]["steps"]]
    if not ends:
        verdict.unjudged = "no worker has made a step and ended"
        return verdict
    life, end = ends[0]
    joined, times = life.joined or {}, end["timings"]
    all_s = times["compute_s"] + times["waiting_s"] + times["exchange_s"]
    step_s = times["compute_s"] / times["steps"]
    verdict.notes += [
        f"{end['peak_nbytes'] / 1e6:,.0f} MB of memory at most, for {joined['nbytes'] / 1e6:,.1f} MB of parameters",
        f"{100 * times['exchange_s'] / max(all_s, 1e-9):.0f} % of the time in rounds here, where all workers share one "
        f"machine; {times['sent_nbytes'] / times['steps']:,.0f} bytes sent per step",
    ]
    if link is not None:
        verdict.notes += lines(joined["parameters"], step_s, link, life.loop or WHOLE_STEPS)
    else:
        verdict.notes.append("what more machines would be worth: give the link, as --link 100mbit,20ms")
    return verdict
