"""The period of each stretch: the plan's, its ramps at both ends of a run, and one that measured times ask for."""

import json
import math
from typing import Any

import pytest
from torch import nn, optim

from lsgd.algorithms.common import (
    LONGEST_HALF,
    Exchange,
    Periodic,
    best_schedule,
    half_period,
    period_cost,
    ramp,
)
from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.errors import ConfigError
from lsgd.plan.plan import Phase as PlanPhase
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.server.coordinator import Coordinator
from lsgd.server.journal import capture, restore
from lsgd.server.phases import Pace
from lsgd.server.reasons import Why
from lsgd.server.report import report
from lsgd.testing.simulation import SimulatedGroup, SimulatedWorker, simulate
from tests import golden

from .helpers import Bench, make_plan, started

PAIR = ("00", "10")


class Timed:
    """A run of two workers on two nodes, whose steps and rounds take as long as the test says.

    Args:
        loop: place in their own loops where the workers begin, and how many iterations those have; 0: no loops.
        muon: whether that is each worker's optimizer.

    Attributes:
        step_s, round_s, transfer_s: a step, what members wait for in a round, and what a delay can hide of it.
        periods: of all stretches, the one that has begun included.
    """

    def __init__(
        self,
        settings: Periodic,
        *,
        loop: tuple[int, int] = (0, 0),
        resumed: int = 0,
        muon: tuple[bool, bool] = (False, False),
        **run: Any,
    ) -> None:
        self.bench, self.steps = Bench(plan=make_plan(algorithm=settings, workers=2, **run)), loop[1]
        for place, has in zip(PAIR, muon, strict=True):
            self.bench.join(place, step=loop[0], resumed=resumed, bears_delay=has)
        self.ask_all()
        self.bench.complete_all(*PAIR)
        self.step_s, self.round_s, self.transfer_s = 0.01, 0.1, 0.0
        self.periods = [self.bench.state.phases.schedule.period]
        self.said: list[str] = []

    def ask_all(self) -> None:
        for place in PAIR:
            self.bench.ask(place, steps=self.steps)

    def stretch(self) -> int:
        """Make the steps up to the next global round, and that round; return the period from there."""
        bench, delay = self.bench, self.bench.state.phases.schedule.delay
        for step in range(self.periods[-1]):
            bench.now += self.step_s
            if step + 1 == delay and math.isfinite(self.transfer_s):  # the result is due
                bench.now += max(0.0, self.transfer_s - delay * self.step_s)
            self.ask_all()
            self.said += [str(note) for note in bench.notes if note.code.startswith("period")]
            while (order := bench.member("00").round) is not None and order.round.scope == "local":
                for place in PAIR:
                    bench.complete_all(place)
        assert bench.round(*PAIR).scope == "global"
        waits = not bench.state.phases.schedule.delay and 0.0 < self.transfer_s < math.inf
        bench.now += self.round_s + (self.transfer_s if waits else 0.0)
        bench.complete_all(*PAIR, transfer_s=self.transfer_s)
        settings = json.loads(bench.book.elections and bench.state.phases.text)
        assert settings["period"] == bench.state.phases.schedule.period
        self.periods.append(settings["period"])
        return self.periods[-1]

    def stretches(self, number: int) -> int:
        for _ in range(number):
            self.stretch()
        return self.periods[-1]


# -- the ramps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "shares", "period"),
    [
        (None, (0.5, 0.5), 48),
        (0.0, (0.0, 0.0), 48),
        (0.0, (0.1, 0.0), 1),
        (0.05, (0.1, 0.0), 16),  # half of 48, down to a power of two
        (0.0999, (0.1, 0.0), 32),
        (0.1, (0.1, 0.0), 48),
        (0.89, (0.1, 0.1), 48),
        (0.95, (0.0, 0.1), 16),
        (1.0, (0.0, 0.1), 1),
    ],
)
def test_the_ramps(progress: float | None, shares: tuple[float, float], period: int) -> None:
    assert ramp(48, progress, *shares) == period
    assert LocalSettings(period=48, warm_share=shares[0], closing_share=shares[1]).at(progress).period == period


def test_a_ramp_gives_each_power_of_two_as_many_rounds() -> None:
    steps, periods, step = 10_000, [], 0
    while step < steps:
        periods.append(ramp(64, step / steps, 0.1, 0.0))
        step += periods[-1]
    counts = [periods.count(p) for p in (1, 2, 4, 8, 16, 32)]
    assert counts == pytest.approx([32, 16, 16, 16, 16, 16], abs=1)  # below 2 there is nothing but 1
    assert periods == sorted(periods)


@pytest.mark.no_cover
def test_servers_and_simulated_workers_follow_the_same_ramps() -> None:
    settings = LocalSettings(period=16, warm_share=0.2, closing_share=0.2)
    timed = Timed(settings, iterations=2 * 200)
    while sum(timed.periods) < 200:
        timed.stretch()

    def member(group: SimulatedGroup) -> list[int]:
        model = nn.Linear(2, 1)
        worker = SimulatedWorker.of_model(group, settings, model, optim.SGD(model.parameters()), steps=200)
        rounds = []
        average = worker.algorithm.before_forward

        def noted(parameters: Any, members: Any, order: Any) -> None:
            rounds.extend([worker.steps] * (order is not None))
            average(parameters, members, order)

        worker.algorithm.before_forward = noted  # type: ignore[method-assign]
        for _ in range(200):
            worker.step(lambda: sum(p.square().sum() for p in model.parameters()))
        return rounds

    begins = [sum(timed.periods[:n]) for n in range(len(timed.periods))]
    assert simulate((1, 1), member) == [begins, begins]
    assert timed.periods[0] == timed.periods[-1] == 1 and max(timed.periods) == 16
    assert timed.said[0] == Why.PERIOD(period=2, delay="", reason=Why.WARM())
    assert "period 16: as planned" in timed.said
    assert Why.PERIOD(period=8, delay="", reason=Why.CLOSING()) in timed.said


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(algorithm=LocalSettings(period=8, warm_share=0.5, closing_share=0.5), workers=2),
        Plan(
            RunSettings(workers=2, iterations=100),
            (PlanPhase(LocalSettings(period=8, warm_share=0.5), 50), PlanPhase(LocalSettings(period=8))),
        ),
    ],
    ids=["no end", "phases"],
)
def test_a_run_without_an_end_or_with_phases_has_no_ramps(plan: Plan) -> None:
    bench = started(*PAIR, plan=plan)
    assert bench.state.phases.schedule.period == 8


@pytest.mark.parametrize("delay", [0, 3])
def test_the_leaders_periods_are_always_valid(delay: int) -> None:
    settings = LeaderSettings(period=60, local_period=20, delay=delay, warm_share=0.5)
    for step in range(100):
        schedule = settings.at(step / 100).schedule()  # its constructor refuses what is not valid
        assert delay < schedule.local_period <= 20
    assert [settings.at(x).schedule()[:2] for x in (0.3, 0.5)] == [(40, 20), (60, 20)]
    assert settings.at(0.0).schedule()[:2] == (delay + 1, delay + 1)  # and no local rounds


# -- auto ----------------------------------------------------------------------------------------------------------


def test_a_period_costs_what_exchanges_take_and_what_rare_ones_lose() -> None:
    exchange = Exchange(10.0)
    assert period_cost(60, exchange, 2, 10_000) == pytest.approx(
        (1 + 10 / 60) * (1 + 0.7) / (1 + 0.7 / 2)
    )  # half of the gain is lost
    assert period_cost(1 << 30, exchange, 3) == pytest.approx(1 + 0.7 * 2, rel=1e-4)  # rare enough: one machine is left
    assert period_cost(8, Exchange(1.0), 1) == period_cost(8, Exchange(1.0), 2)  # a second worker may join
    assert period_cost(15, Exchange(10.0, parts=4), 2, 10_000) == pytest.approx(
        (1 + 10 / 15) * (1 + 0.7) / (1 + 0.7 / 2)
    )  # each number is exchanged every 60 steps
    for exchange_steps, workers, steps in ((0.1, 2, 512), (3.0, 4, math.inf), (10.0, 8, 9000)):
        period, _ = best_schedule(Exchange(exchange_steps), workers, steps)
        costs = [period_cost(period + off, Exchange(exchange_steps), workers, steps) for off in (-1, 0, 1)]
        assert min(costs) == costs[1] < min(costs[0], costs[2])


@pytest.mark.parametrize(
    ("exchange_steps", "workers", "steps", "period"),
    [
        (0.0, 2, math.inf, 1),
        (10.0, 2, math.inf, 98),
        (10.0, 8, math.inf, 58),  # more to lose
        (0.1, 2, 1024, 2),
        (1e6, 2, math.inf, 512),
        (1e6, 2, 1000, 37),  # at least 26 rounds
        (1e6, 2, 7, 3),
    ],
)
def test_the_best_period(exchange_steps: float, workers: int, steps: float, period: int) -> None:
    assert best_schedule(Exchange(exchange_steps), workers, steps) == (period, 0)


@pytest.mark.no_cover
def test_auto_follows_a_link_that_changes_and_says_why() -> None:
    timed = Timed(ElasticSettings(period=0))
    assert timed.periods == [1]
    assert timed.stretch() == 1 and timed.bench.state.phases.why.code == "unmeasured"  # the first is not timed
    assert timed.stretch() == 98  # 0.1 s, beside steps of 0.01 s
    assert timed.said == [Why.PERIOD(period=98, delay="", reason=Why.MEASURED(round_s=0.1, step_s=0.01))]
    timed.stretches(4)

    timed.round_s *= 10.0
    assert timed.stretches(2) == 98  # two late rounds change nothing
    assert timed.stretches(2) == 512
    assert timed.said[1:] == [Why.PERIOD(period=512, delay="", reason=Why.MEASURED(round_s=1, step_s=0.01))]

    timed.round_s *= 0.001
    assert timed.stretches(4) == 8
    shown = json.loads(report(timed.bench.state, timed.bench.now))
    assert (shown["period"], shown["period_reason"]) == (8, Why.MEASURED(round_s=0.001, step_s=0.01))


@pytest.mark.parametrize(
    ("rounds_s", "steps_s"), [((0.1, 9.0), (0.01,)), ((9.0, 0.1), (0.01,)), ((0.1,), (0.01, 1e-4))]
)
def test_of_two_times_that_counts_with_which_the_period_is_shorter(rounds_s, steps_s) -> None:
    pace = Pace(1, rounds_s, steps_s)
    pace.choose(2, math.inf, None, 0)
    assert (pace.period, 0) == best_schedule(Exchange(10.0), 2)


@pytest.mark.no_cover
@pytest.mark.parametrize(("delay", "period"), [(0, 98), (2, 90), (10, 50), (300, 301)])
def test_a_delay_hides_what_members_say_of_transfers(delay: int, period: int) -> None:
    """A transfer of ten steps costs what the delay does not hide; only then is it no part of the round's time."""
    timed = Timed(LocalSettings(period=0, delay=delay))
    timed.round_s, timed.transfer_s = 0.0, 0.1
    assert timed.periods == [delay + 1]
    assert timed.stretches(4) == period == best_schedule(Exchange(0.0, 10.0), 2, delay=delay)[0]
    assert str(timed.bench.state.phases.why) == Why.MEASURED(round_s=0.1, step_s=0.01)
    if delay:
        timed.transfer_s = 0.0  # as in a generation's second round, if the first had newcomers
        assert timed.stretches(4) == period


@pytest.mark.parametrize("transfer", [0.3, 4.0, 17.5, 400.0])
@pytest.mark.parametrize(("waiting", "workers", "steps"), [(0.0, 2, 1000), (5.0, 4, math.inf)])
@pytest.mark.parametrize("period", [None, 1, 16])
def test_no_delay_between_is_better_than_none_and_the_longest(transfer, waiting, workers, steps, period) -> None:
    exchange = Exchange(waiting, transfer)
    chosen = best_schedule(exchange, workers, steps, period=period, delay=None)
    all_ = ((p, d) for p in (range(1, 513) if period is None else [period]) for d in range(p // 2 + 1))
    least = min(period_cost(p, exchange, workers, steps, delay=d) for p, d in all_ if p <= 2 * half_period(steps))
    assert period_cost(chosen[0], exchange, workers, steps, delay=chosen[1]) == pytest.approx(least)
    assert chosen[1] <= chosen[0] // 2


def test_with_muon_the_servers_choose_a_delay() -> None:
    """It hides the transfer, and goes again where the link is so fast that it costs more than it brings."""
    timed = Timed(LocalSettings(period=0, delay=-1), muon=(True, True))
    timed.round_s, timed.transfer_s = 0.02, 0.1
    phases = timed.bench.state.phases
    assert timed.stretches(4) == 67 and phases.schedule.delay == 10
    assert timed.said == [
        Why.PERIOD(period=67, delay=" with a delay of 10", reason=Why.MEASURED(round_s=0.12, step_s=0.01))
    ]
    shown = json.loads(report(timed.bench.state, timed.bench.now))
    assert (shown["period"], shown["delay"]) == (67, 10)
    assert json.loads(phases.text)["delay"] == 10
    timed.transfer_s = 0.001
    assert timed.stretches(4) == best_schedule(Exchange(2.0, 0.1), 2)[0] and phases.schedule.delay == 0


@pytest.mark.parametrize("muon", [(False, False), (True, False)])
def test_there_is_no_delay_where_a_workers_optimizer_bears_none(muon) -> None:
    timed = Timed(LocalSettings(period=0, delay=-1), muon=muon)
    timed.round_s, timed.transfer_s = 0.0, 0.1
    assert timed.stretches(4) == 98 and timed.bench.state.phases.schedule.delay == 0


def test_a_delay_beside_a_period_of_the_plan_and_one_of_an_operator() -> None:
    timed = Timed(LocalSettings(period=16, delay=-1), muon=(True, True))
    timed.round_s, timed.transfer_s = 0.0, 1.0
    phases = timed.bench.state.phases
    assert timed.stretches(4) == 16 and phases.schedule.delay == 8  # half the period, at most
    timed.bench.coordinator.change({"delay": "3"})
    assert timed.stretch() == 16 and (phases.schedule.delay, phases.why.code) == (3, "planned")
    timed.bench.coordinator.change({"delay": "auto", "period": "4"})
    assert timed.stretch() == 4 and phases.schedule.delay == 2
    timed.bench.coordinator.change({"delay": "0"})
    assert timed.stretch() == 4 and phases.schedule.delay == 0


def test_at_the_ends_of_a_run_the_delay_is_as_short_as_the_period_asks() -> None:
    timed = Timed(LocalSettings(period=16, closing_share=0.5, delay=-1), muon=(True, True), iterations=2 * 400)
    timed.round_s, timed.transfer_s = 0.0, 0.2
    seen = []
    while sum(timed.periods) < 400:
        timed.stretch()
        seen.append((timed.bench.state.phases.schedule.period, timed.bench.state.phases.schedule.delay))
    assert {(16, 8), (8, 4), (4, 2), (2, 1), (1, 0)} <= {*seen}
    assert all(delay <= period // 2 for period, delay in seen)


def test_there_is_no_delay_while_a_newcomer_downloads() -> None:
    """With one it could not follow the rounds, so all would wait for it."""
    timed = Timed(LocalSettings(period=16, delay=-1), muon=(True, True))
    timed.round_s, timed.transfer_s = 0.0, 0.05
    bench, schedule = timed.bench, lambda: timed.bench.state.phases.schedule
    timed.stretches(3)
    assert schedule().delay == 5
    bench.join("20", bears_delay=True)
    bench.ask("20")
    places = (*PAIR, "20")

    def stretch(*, lacking: bool) -> int:
        while bench.member("00").round is None:
            bench.now += 0.01
            for place in places:
                if bench.member(place).round is None and not bench.member(place).held:
                    bench.ask(place)
        bench.complete_all(*PAIR)
        newcomer = bench.member("20").round
        assert newcomer is not None
        bench.complete("20", newcomer.round.id, lacking=lacking)
        steps_s = bench.state.phases.pace.to_json()["steps_s"]
        assert steps_s == pytest.approx([0.01] * len(steps_s), rel=0.05), "whoever makes the iterations"
        return schedule().delay

    assert [stretch(lacking=lacking) for lacking in (True, True, False, False)] == [0, 0, 0, 5]


def test_with_a_delay_nothing_is_known_before_a_transfer_is_over() -> None:
    timed = Timed(LocalSettings(period=0, delay=2))
    assert timed.stretches(3) == 3 and timed.bench.state.phases.why.code == "unmeasured"
    timed.transfer_s = 0.1
    assert timed.stretches(2) > 3


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_what_is_no_time_of_a_transfer_does_not_count(seconds: float) -> None:
    timed = Timed(LocalSettings(period=0))
    timed.transfer_s = seconds
    assert timed.stretches(4) == 98


def test_what_is_hidden_costs_a_share_and_what_is_late_counts_as_rare() -> None:
    assert [Exchange(2.0, 10.0).cost(delay) for delay in (0, 4, 10, 100)] == pytest.approx([12.0, 9.2, 5.0, 5.0])
    assert period_cost(30, Exchange(2.0, 10.0), 2, 10_000, delay=20) == pytest.approx(
        (1 + 5 / 30) * (1 + 0.7) / (1 + 0.7 / 2)
    )


@pytest.mark.no_cover
def test_auto_stays_where_it_is_while_times_scatter() -> None:
    timed = Timed(LocalSettings(period=0))
    timed.stretches(8)
    for n in range(20):
        timed.round_s = 0.1 * (0.7, 1.4, 1.0, 8.0)[n % 4]  # each fourth is out of line
        timed.stretch()
    assert set(timed.periods[-20:]) == {98} and len(timed.said) == 1


def test_auto_is_bounded_and_has_the_ramps_of_the_run() -> None:
    timed = Timed(LocalSettings(period=0))
    timed.round_s, timed.step_s = 600.0, 0.0
    timed.bench.coordinator.change({"period": "auto"})
    assert timed.stretches(5) == 2 * LONGEST_HALF
    ramped = Timed(LocalSettings(period=0, closing_share=0.5), iterations=2 * 3200)
    while sum(ramped.periods) < 3200:
        ramped.stretch()
    assert max(ramped.periods) == 67 and ramped.periods[-1] == 1


@pytest.mark.parametrize("length", [{"iterations": 2 * 512}, {"seconds": 512 * 0.01 + 10 * 1.0}])
def test_a_short_run_has_rounds_that_are_worth_something(length) -> None:
    timed = Timed(LocalSettings(period=0), **length)
    timed.round_s = 1.0  # an endless run would have 512
    while sum(timed.periods) < 500:
        timed.stretch()
    assert 20 <= max(timed.periods) <= 28 and len(timed.periods) >= 20


def test_a_period_that_a_run_has_become_too_short_for_does_not_stay() -> None:
    timed = Timed(LocalSettings(period=0), iterations=2 * 10_000)
    timed.round_s = 1.0
    assert timed.stretches(3) == 120
    timed.bench.coordinator.change({"iterations": "2000"})
    assert timed.stretch() == 37


def test_with_fragments_what_counts_is_how_often_each_number_is_exchanged() -> None:
    pace = Pace(1, [1e4], [0.01])
    pace.choose(2, 1000, None, 0, LocalSettings(fragments=4).schedule().parts)
    assert pace.period == 9, "so each every 36 steps"


@pytest.mark.parametrize("place", [0, 900])
def test_a_run_of_own_loops_is_as_long_as_those_wherever_it_begins(place: int) -> None:
    timed = Timed(LocalSettings(period=0), loop=(place, 1000))
    timed.round_s = 1e4
    assert timed.stretches(2) == 37


def test_a_run_that_ends_by_time_counts_nothing_from_before_it_was_resumed() -> None:
    periods = []
    for resumed in (0, 200_000):
        timed = Timed(LocalSettings(period=0), seconds=100.0, resumed=resumed)
        timed.round_s = 1.0
        periods.append(timed.stretches(4))
    assert periods[0] == periods[1]


def test_a_plan_that_changes_to_auto_and_back() -> None:
    timed = Timed(LeaderSettings(period=4, local_period=2))
    timed.stretch()
    timed.bench.coordinator.change({"period": "auto"})
    assert timed.stretches(3) == 98  # in whole local periods
    timed.bench.coordinator.change({"period": "4"})
    assert timed.stretch() == 4


def test_rounds_that_are_made_again_and_first_ones_are_not_timed() -> None:
    timed = Timed(LocalSettings(period=0))
    bench = timed.bench
    for _ in range(3):
        bench.ask_all(*PAIR)
        order = bench.round(*PAIR)
        bench.now += 50.0
        bench.fail("00", order.id)
        for place in PAIR:
            bench.ask(place, same=True, dropped=order.id)
        bench.now += 70.0
        bench.complete_all(*PAIR)
    assert bench.state.phases.pace.to_json()["rounds_s"] == []
    assert timed.stretches(9) == 98


def test_another_phase_is_timed_anew() -> None:
    phases = (PlanPhase(LocalSettings(period=0), 200), PlanPhase(ElasticSettings(period=0)))
    bench = started(*PAIR, plan=Plan(RunSettings(workers=2), phases))
    for _ in range(100):
        bench.now += 0.01
        bench.ask_all(*PAIR)
        if bench.member("00").round is not None:
            bench.now += 0.1
            bench.complete_all(*PAIR)
    phases = bench.state.phases
    assert (phases.algorithm.name, phases.schedule.period, phases.why.code) == ("elastic", 1, "unmeasured")


def test_a_server_that_is_started_again_goes_on_with_what_was_measured() -> None:
    timed = Timed(LocalSettings(period=0))
    timed.stretches(8)
    bench: Bench = timed.bench
    saved = json.loads(json.dumps(capture(bench.state, bench.now)))
    bench.coordinator = Coordinator(restore(saved, 5000.0))
    bench.now = 5000.0
    phases = bench.state.phases
    assert (phases.schedule.period, phases.why) == (98, Why.MEASURED(round_s=0.1, step_s=0.01))
    bench.ask_all(*PAIR)  # nothing was granted: the next global round comes at once
    bench.complete_all(*PAIR)
    assert phases.schedule.period == 98
    timed.round_s = 0.4
    assert timed.stretches(4) == best_schedule(Exchange(40.0), 2)[0]


# -- the setting ---------------------------------------------------------------------------------------------------


def test_simulated_workers_refuse_auto() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=golden.pattern("reasons.no_network")):
        simulate(
            (1,), lambda g: SimulatedWorker.of_model(g, LocalSettings(period=0), model, optim.SGD(model.parameters()))
        )
