"""How many global rounds a run makes by its plan, and what is advised where that is few."""

import re

import pytest

from lsgd.plan.forecast import FEW_ROUNDS, forecast, planned_rounds
from lsgd.plan.plan import Plan, assemble
from tests import golden

RAMPS = {"warm_share": 0.2, "closing_share": 0.1}
PHASES = [{"name": "allreduce", "iterations": 100}, {"name": "leader", "period": 16}]


def plan(environ: dict[str, str] | None = None, **table: object) -> Plan:
    return assemble(table, origin="a test", environ=environ).plan


@pytest.mark.parametrize(
    ("table", "rounds"),
    [
        ({"workers": 2, "iterations": 3000, "algorithm": {"period": 64}}, 25),
        ({"workers": 2, "iterations": 128, "algorithm": {"period": 64}}, 2),
        ({"workers": 3, "iterations": 301, "algorithm": {"name": "allreduce"}}, 101),
        ({"workers": 2, "iterations": 8192, "algorithm": {"period": 64} | RAMPS}, 64 + round(0.3 * 6 * 64) + 1),
        ({"workers": 2, "iterations": 420, "phase": PHASES}, 50 + 10 + 1),
        ({"workers": 2, "iterations": 420, "phase": [PHASES[0], PHASES[1] | RAMPS]}, 50 + 10 + 1),
        ({"workers": 2, "iterations": 50, "phase": PHASES}, 25 + 1),
        ({"workers": 2, "seconds": 60}, None),
    ],
)
def test_planned_rounds(table, rounds) -> None:
    assert planned_rounds(plan(**table), table["workers"]) == rounds


@pytest.mark.parametrize(
    "table",
    [
        {"algorithm": {"name": "local", "period": 64}, "iterations": 1000},
        {"algorithm": {"name": "leader", "period": 64, "local_period": 16}, "iterations": 1000},
        {"algorithm": {"name": "leader", "period": 64, "local_period": 16}, "iterations": 100},
        {"algorithm": {"name": "decentralized", "interval": 50}, "iterations": 777},
        {"algorithm": {"name": "decentralized", "interval": 1}, "iterations": 12},
        {"algorithm": {"name": "leader", "period": 64, "local_period": 16, "delay": 10}, "iterations": 200},
        {"phase": PHASES, "iterations": 10},
    ],
)
def test_each_advice_makes_enough_rounds(table) -> None:
    table |= {"workers": 2}
    _, advice = forecast(plan(**table), 2)
    assert advice.startswith("that is few: ")
    variants = (
        re.search(golden.pattern("forecast.type_before"), advice),
        re.search(r"(LSGD_ITERATIONS=\d+)", advice),
    )
    assert variants[1]
    for found in filter(None, variants):
        environ = dict(each.split("=") for each in found[1].split())
        rounds = planned_rounds(plan(environ, **table), 2)
        assert rounds and rounds >= FEW_ROUNDS
        assert len(forecast(plan(environ, **table), 2)) == 1


def test_the_words() -> None:
    assert forecast(plan(workers=2, iterations=1000, algorithm={"name": "leader", "period": 64}), 2) == [
        golden.text("forecast.rounds_9"),
        golden.text("forecast.few_rounds"),
    ]
    (line,) = forecast(plan(workers=2, seconds=60, algorithm={"name": "leader", "period": 64}), 2)
    assert line == (golden.text("forecast.by_speed"))
    (line,) = forecast(plan(workers=1, seconds=60, iterations=100, algorithm={"name": "leader"}), 1)
    assert golden.text("forecast.at_most") in line
    (line,) = forecast(plan(workers=2, iterations=2000, algorithm={"name": "leader", "period": 64} | RAMPS), 2)
    assert line.endswith(golden.text("forecast.on_ramps"))
    assert len(forecast(plan(workers=2, iterations=10, algorithm={"name": "allreduce"}), 2)) == 1
    assert forecast(plan(workers=2, algorithm={"name": "leader"}), 2) == []
    (line,) = forecast(plan(workers=2, iterations=1000), 2)
    assert golden.text("forecast.by_network") in line and golden.text("forecast.exchange_time") in line
