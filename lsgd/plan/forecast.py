"""How many global rounds a run will have, by its plan."""

import math
from dataclasses import replace

from lsgd.algorithms.common import Periodic
from lsgd.errors import ConfigError
from lsgd.plan.plan import Phase, Plan, variable
from lsgd.settings import AlgorithmSettings, fields

FEW_ROUNDS = 20
"""With fewer exchanges of models than this, workers have mostly trained alone."""

_PERIODS = ("period", "interval")
"""Names of the setting for the iterations between two rounds."""


def planned_rounds(plan: Plan, workers: int) -> int | None:
    """Return how many global rounds the run has if all workers stay; None: its number of iterations is not set.

    One begins each phase, one follows whenever its period is over, and the last one makes the consensus.
    """
    if not plan.run.iterations:
        return None
    left = plan.run.iterations
    rounds = 1 + _rounds_by_ramps(plan, workers)
    for phase in plan.phases:
        iterations = min(left, phase.iterations or left)
        rounds += _rounds(phase.algorithm, iterations, workers)
        left -= iterations
    return rounds


def forecast(plan: Plan, workers: int) -> list[str]:
    """Return lines for the start of the run: how many global rounds it will have, and whether that is few."""
    run, rounds = plan.run, planned_rounds(plan, workers)
    if any(phase.algorithm.period_is_auto for phase in plan.phases):
        return [
            "how many global rounds this run makes depends on its network: with period = auto the servers weigh how "
            "long an exchange takes against what workers learn from it"
        ]
    if rounds is None:
        return [f"how many global rounds this run makes depends on its speed: {_often(plan)}"] if run.seconds else []
    most = f" at most, fewer if {run.seconds:g} s are over first" if run.seconds else ""
    lines = [f"by its plan this run makes about {rounds} global rounds{most}: {_often(plan)}"]
    exchanges_models = not all(phase.algorithm.schedule().identical for phase in plan.phases)
    if rounds < FEW_ROUNDS and exchanges_models and workers > 1:
        lines.append(
            f"that is few: workers that exchange their models so rarely learn little from one another; "
            f"{_advice(plan, workers)}"
        )
    return lines


def _rounds(algorithm: AlgorithmSettings, iterations: int, workers: int) -> int:
    """Return how many rounds of all workers begin in ``iterations``."""
    schedule = algorithm.schedule()
    if schedule.lockstep:
        return iterations // workers
    return -(-iterations // (schedule.period * workers))


def _ramps(plan: Plan) -> float:
    """Return the share of the run with shorter periods; plans with several phases have none."""
    (algorithm, *others) = [phase.algorithm for phase in plan.phases]
    return 0.0 if others or not isinstance(algorithm, Periodic) else algorithm.warm_share + algorithm.closing_share


def _rounds_by_ramps(plan: Plan, workers: int) -> int:
    """Return about how many rounds more ramps bring: on one, each power of two up to the period has as many."""
    period = plan.algorithm.schedule().period
    return round(_ramps(plan) * math.log2(period) * plan.run.iterations / (period * workers))


def _often(plan: Plan) -> str:
    periods = [phase.algorithm.schedule().period for phase in plan.phases]
    if len(periods) > 1:
        return f"in its phases one for every {', '.join(map(str, periods))} iterations of each worker"
    if periods == [1]:
        return "one for every iteration"
    return f"one for every {periods[0]} iterations of each worker{', more on its ramps' if _ramps(plan) else ''}"


def _advice(plan: Plan, workers: int) -> str:
    """Return which settings to change, and to what, for enough rounds."""
    run, (phase, *others) = plan.run, plan.phases
    longer = f"{variable('iterations')}={_enough_iterations(plan, workers)}"
    shorter = None if others else _shorter(phase, run.iterations, workers)
    if shorter is None:
        return f"type {longer} before the command to train longer"
    return f"type {shorter} before the command to exchange more often, or {longer} to train longer"


def _enough_iterations(plan: Plan, workers: int) -> int:
    """Return a round number of iterations for enough rounds, all added to the last phase."""
    last = plan.phases[-1].algorithm.schedule().period
    missing = (FEW_ROUNDS - (planned_rounds(plan, workers) or 0)) * last * workers
    step: int = 10 ** max(0, len(str(plan.run.iterations + missing)) - 2)
    return -(-(plan.run.iterations + missing) // step) * step


def _shorter(phase: Phase, iterations: int, workers: int) -> str | None:
    """Return the variables that make the period short enough; None: none does, or the algorithm has no period."""
    algorithm = phase.algorithm
    names = [name for name in _PERIODS if name in fields(type(algorithm))]
    period, local_period = iterations // (workers * (FEW_ROUNDS - 1)), algorithm.schedule().local_period
    if not names or not 1 <= period < algorithm.schedule().period:
        return None
    changes = {names[0]: period}
    if "local_period" in fields(type(algorithm)):  # which divides the period
        changes |= {"period": period - period % local_period} if period >= local_period else {"local_period": period}
    try:
        replace(algorithm, **changes)
    except ConfigError:
        return None
    return " ".join(f"{variable(name)}={value}" for name, value in changes.items())
