"""Whole simulated runs of the coordinator, over networks and with workers that misbehave."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, example, given
from hypothesis import strategies as st

from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings

from ..search import examples
from .helpers import Lockstep, make_plan
from .invariants import KeptState
from .simulated_run import Faults, SimulatedRun

queues = st.lists(st.integers(1, 4), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) <= 17)
periods = st.sampled_from([(1, 1), (2, 1), (8, 8), (8, 2), (12, 4), (16, 4)])
lookaheads = st.sampled_from([0, 1, 1, 2, 5, 40])
seeds = st.integers(0, 2**32)
probability = st.sampled_from([0.0, 0.02, 0.1])
# A seed does not shrink: a failing run is small enough to read, and says its story.
simulated = examples(
    30,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


def plan_for(sizes: list[int], periods: tuple[int, int], limit: int, **run: object) -> Plan:
    return make_plan(period=periods[0], local_period=periods[1], workers=sum(sizes), iterations=limit, **run)


@simulated
@given(queues, periods, lookaheads, seeds, st.integers(1, 400), st.sampled_from([0.0, 0.5]), st.booleans())
def test_clean_run_makes_exactly_its_iterations(
    sizes: list[int],
    periods: tuple[int, int],
    lookahead: int,
    seed: int,
    limit: int,
    delay_s: float,
    double: bool,
) -> None:
    faults = Faults(delay_s=delay_s, double=0.2 * double)
    run = SimulatedRun(plan_for(sizes, periods, limit, lookahead=lookahead), sizes, seed, faults).go()
    assert run.state.ledger.count == run.steps == run.learned == limit
    assert sum(w.done for w in run.workers) == limit
    assert not run.failed
    assert {len(answers) for answers in run.answered.values()} == {1}
    assert run.held <= set(run.answered) <= run.requests
    (final,) = {w.stopped_with.id for w in run.workers if w.stopped_with}
    assert all(w.stopped_with == run.rounds[final] for w in run.workers)
    assert run.rounds[final].final and len(run.rounds) == final


anything = st.builds(
    Faults,
    lose=probability,
    double=probability,
    delay_s=st.sampled_from([0.0, 0.1, 3.0]),
    pause=probability,
    unused_pause=probability,
    leave=st.sampled_from([0.0, 0.01]),
    last=st.sampled_from([0.0, 0.02]),
    crash=st.sampled_from([0.0, 0.01]),
    exchange=st.sampled_from([0.0, 0.01, 0.05]),
    links=st.sampled_from([0.0, 0.3]),
    slow=st.sampled_from([0.0, 0.02]),
)


GONE_BEFORE_THE_REST = Faults(lose=0.02, double=0.1, pause=0.02, unused_pause=0.1, leave=0.01, last=0.02, crash=0.01)
"""What two that left have made is in no model, and the rest is too small for a round of all."""


@simulated
@given(queues, periods, lookaheads, seeds, anything, st.integers(0, 5))
@example([3, 2, 3, 3, 3], (16, 4), 1, 1, GONE_BEFORE_THE_REST, 2)
def test_anything_may_go_wrong(
    sizes: list[int], periods: tuple[int, int], lookahead: int, seed: int, faults: Faults, latecomers: int
) -> None:
    limit = 200
    plan = plan_for(sizes, periods, limit, patience_s=5.0, lookahead=lookahead)
    run = SimulatedRun(plan, sizes, seed, faults, latecomers).go()
    assert run.state.ledger.count <= limit
    unclean = sum((w.name, w.incarnation) not in run.clean_leaves for w in run.workers)
    # What was made since the last request that has arrived is lost with its worker.
    assert 0 <= run.steps - run.reported <= unclean * (1 + 2 * lookahead)
    assert run.state.ledger.count <= run.learned or not run.learned or "no_holder" in run.codes


@simulated
@given(
    queues,
    periods,
    lookaheads,
    seeds,
    st.integers(1, 400),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    probability,
)
def test_a_global_server_that_is_killed_and_started_again_makes_exactly_its_iterations(
    sizes: list[int],
    periods: tuple[int, int],
    lookahead: int,
    seed: int,
    limit: int,
    delay_s: float,
    double: bool,
    pause: float,
) -> None:
    faults = Faults(0, 0.2 * double, delay_s, pause, pause, kill=0.1, exchange_timeout_s=10.0)
    run = SimulatedRun(plan_for(sizes, periods, limit, lookahead=lookahead), sizes, seed, faults).go()
    assume(run.kills)
    assert run.state.run == "run"
    assert run.reported == run.steps == sum(w.done for w in run.workers)
    assert run.state.ledger.count == limit <= run.learned
    if not pause:  # nobody but the server fails: so does no round, and the generation stays the first
        assert run.steps == limit and not run.failed and not run.unfinished()
        assert {r.generation.number for r in run.rounds.values() if not r.final} <= {1}
        (final,) = {w.stopped_with.id for w in run.workers if w.stopped_with}
        assert run.rounds[final].final and len(run.rounds) == final


@simulated
@given(queues, periods, lookaheads, seeds, anything, st.integers(0, 5))
def test_anything_may_go_wrong_while_the_global_server_is_killed_too(
    sizes: list[int], periods: tuple[int, int], lookahead: int, seed: int, faults: Faults, latecomers: int
) -> None:
    """What a worker has reported since the journal was last written is lost only if it dies as well."""
    limit = 200
    plan = plan_for(sizes, periods, limit, patience_s=5.0, lookahead=lookahead)
    run = SimulatedRun(plan, sizes, seed, replace(faults, kill=0.05), latecomers).go()
    assert run.state.ledger.count <= limit
    unclean = [w for w in run.workers if (w.name, w.incarnation) not in run.clean_leaves]
    most = sum(1 + 2 * lookahead + run.forgotten[w.name, w.incarnation] for w in unclean)
    assert 0 <= run.steps - run.reported <= most
    assert run.state.ledger.count <= run.learned or not run.learned or "no_holder" in run.codes
    assert run.unfinished() <= run.failed


class KeptRun(SimulatedRun):
    """Compares what a server that is killed now continues from with the live state, after every message and tick."""

    def __init__(self, *args: Any) -> None:
        self._checked = KeptState(restores=True)
        super().__init__(*args)

    def _keep(self) -> None:
        super()._keep()
        self._checked.check(self.state)


@examples(8, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(queues, periods, lookaheads, seeds, anything, st.integers(0, 5))
def test_whenever_the_server_is_killed_the_journal_has_all_that_nobody_tells_again(
    sizes: list[int], periods: tuple[int, int], lookahead: int, seed: int, faults: Faults, latecomers: int
) -> None:
    KeptRun(plan_for(sizes, periods, 60, patience_s=5.0, lookahead=lookahead), sizes, seed, faults, latecomers).go()


@simulated
@given(queues.filter(lambda sizes: sum(sizes) > 1), periods, lookaheads, seeds, probability)
@example(sizes=[4], periods=(1, 1), lookahead=1, seed=4887, lose=0.0)  # one goes on alone, and has no links
@example(sizes=[2, 2, 2, 1, 2], periods=(2, 1), lookahead=5, seed=7424, lose=0.02)  # local is no probe
def test_broken_links_end_no_run_and_cost_no_iteration(
    sizes: list[int], periods: tuple[int, int], lookahead: int, seed: int, lose: float
) -> None:
    faults = Faults(lose=lose, exchange=0.05, links=0.5)
    plan = plan_for(sizes, periods, 200, lookahead=lookahead, exchange_timeout_s=2.0)
    run = SimulatedRun(plan, sizes, seed, faults).go()
    assume(run.cuts)
    assert run.state.ledger.count <= 200 and not run.state.in_vain
    unclean = sum((w.name, w.incarnation) not in run.clean_leaves for w in run.workers)
    assert 0 <= run.steps - run.reported <= unclean * (1 + 2 * lookahead)


@simulated
@given(queues.filter(lambda sizes: sum(sizes) > 1), periods, lookaheads, seeds, st.booleans())
def test_a_slow_worker_costs_the_others_no_more_than_their_patience(
    sizes: list[int], periods: tuple[int, int], lookahead: int, seed: int, lockstep: bool
) -> None:
    plan = plan_for(sizes, periods, 300, patience_s=5.0, lookahead=lookahead)
    if lockstep:
        plan = replace(plan, phases=(PlanPhase(Lockstep()),))
    run = SimulatedRun(plan, sizes, seed)
    run.workers[0].slow = 0.1
    run.go()
    assume(run.stragglers)
    # What it was granted may be out when the run ends.
    out = 1 + (0 if lockstep else lookahead)
    assert run.reported <= run.steps <= run.reported + out
    assert run.state.ledger.count <= run.learned
    assert 0 <= 300 - run.state.ledger.count <= out + lockstep * (sum(sizes) - 1)
    # Each slow step costs the others their patience once at most; the rest is what they train and exchange.
    assert run.now <= 300 * (0.75 + 0.3) + run.slow_steps * (5.0 + 1.0) + 30.0
    assert not run.failed


@simulated
@given(
    *(queues, st.integers(1, 12), lookaheads, seeds, st.integers(50, 400)),
    *(st.sampled_from([0.0, 0.05, 0.2]), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.01]), st.booleans()),
)
def test_the_count_is_what_the_consensus_has_learned_from(
    sizes: list[int],
    period: int,
    lookahead: int,
    seed: int,
    limit: int,
    pause: float,
    slow: float,
    crash: float,
    common: bool,
) -> None:
    """Workers miss rounds, because they evaluate, are slow or die; what they lose, the run makes again."""
    algorithm = LocalSettings(period=period) if common else LeaderSettings(period=period, local_period=period)
    plan = make_plan(algorithm=algorithm, workers=sum(sizes), iterations=limit, lookahead=lookahead, patience_s=5.0)
    run = SimulatedRun(plan, sizes, seed, Faults(double=0.1, pause=pause, slow=slow, crash=crash)).go()
    assert run.learned == run.state.ledger.count or not run.learned or "no_holder" in run.codes
    lost = run.reported - run.state.ledger.count
    assert lost == 0 or pause or slow or crash
    if not (slow or crash):  # nobody's iterations are out when the run ends
        assert run.state.ledger.count == limit and (lost == 0 or not common)


def test_what_a_worker_loses_by_missing_rounds_is_made_again() -> None:
    """With a model that all know it loses nothing."""
    lost = {}
    for algorithm in (LeaderSettings(period=4, local_period=4), LocalSettings(period=4)):
        plan = make_plan(algorithm=algorithm, workers=2, iterations=200)
        run = SimulatedRun(plan, [2], 1)
        run.workers[0].pauses = 0.1
        run.go()
        lost[algorithm.name] = run.steps - 200
        assert run.state.ledger.count == run.learned == 200
        assert ("loses" in run.codes) == bool(lost[algorithm.name])
    assert lost["leader"] > 0 and lost["local"] == 0


@simulated
@given(queues, seeds, st.integers(1, 60))
def test_lockstep_every_iteration_is_a_round(sizes: list[int], seed: int, limit: int) -> None:
    plan = make_plan(algorithm=Lockstep(), workers=sum(sizes), iterations=limit)
    run = SimulatedRun(plan, sizes, seed).go()
    n = sum(sizes)
    assert run.state.ledger.count == run.steps == limit // n * n
    assert len(run.rounds) == limit // n + 1
    assert len({w.done for w in run.workers}) == 1


@simulated
@given(queues.filter(lambda sizes: len(sizes) > 1), st.sampled_from([(8, 4), (12, 4), (16, 2)]), seeds)
def test_rounds_come_as_often_as_the_periods_say(sizes: list[int], periods: tuple[int, int], seed: int) -> None:
    """Of the period x members iterations of a global round, each local round stands for local_period x group."""
    period, local_period = periods
    n, globals_wanted = sum(sizes), 5
    run = SimulatedRun(plan_for(sizes, periods, globals_wanted * period * n), sizes, seed).go()
    assert run.state.book.ordered["global"] >= globals_wanted + 1
    # An early global round gives up at most what did not cover the smallest held group.
    assert run.state.book.ordered["global"] <= globals_wanted * (1 + max(sizes) / (period * n)) + 2
    standing_for = [len(run.members_of(r)) * local_period for r in run.rounds.values() if not r.final]
    most_unused = run.state.book.ordered["global"] * n * local_period
    # The last iterations, fewer than there are members, come without a round.
    assert -n < sum(standing_for) - run.steps <= most_unused


@simulated
@given(st.integers(2, 5), st.integers(1, 3), seeds)
def test_equal_groups_have_period_over_local_period_local_rounds(nodes: int, size: int, seed: int) -> None:
    """On average, the one that each global round begins with included.

    A little more often, since steps differ in length: the group that is ahead when the global round is near begins
    another local period, which is cut short. Never less often.
    """
    period, local_period, globals_wanted = 12, 4, 10
    sizes = [size] * nodes
    limit = globals_wanted * period * nodes * size
    run = SimulatedRun(plan_for(sizes, (period, local_period), limit), sizes, seed)
    for worker in run.workers:
        worker.step_s = 0.1
    run.go()
    global_rounds = sum(not r.final for r in run.rounds.values() if r.scope == "global")
    local_rounds = run.state.book.ordered["local"] / nodes + global_rounds
    assert period / local_period - 0.05 <= local_rounds / global_rounds <= period / local_period + 0.5


def test_a_worker_twice_as_slow_makes_half_the_iterations() -> None:
    run = SimulatedRun(plan_for([2, 2], (64, 16), 6400), [2, 2], 1)
    for worker in run.workers:
        worker.step_s = 0.2 if worker.name == "node1/worker1" else 0.1
    run.go()
    slow = run.workers[3].done
    others = sum(w.done for w in run.workers[:3]) / 3
    assert slow / others == pytest.approx(0.5, abs=0.05)


@simulated
@given(queues, st.integers(1, 150), st.integers(1, 150), seeds)
def test_a_phase_ends_exactly_where_it_is_to(sizes: list[int], first: int, second: int, seed: int) -> None:
    phases = (
        PlanPhase(LeaderSettings(period=8, local_period=4), first),
        PlanPhase(LeaderSettings(period=6, local_period=3)),
    )
    plan = Plan(RunSettings(workers=sum(sizes), iterations=first + second), phases)
    run = SimulatedRun(plan, sizes, seed).go()
    assert run.state.ledger.count == run.steps == first + second
    counts = {e.round: e.count for e in run.state.book.elections}
    for round in run.rounds.values():
        if round.scope == "global" and not round.final:
            period = json.loads(round.algorithm)["period"]
            assert period == (8 if counts[round.id] < first else 6)
        assert (round.algorithm == "") == (round.scope == "local")
