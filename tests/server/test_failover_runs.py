"""Random schedules of deaths, partitions and frozen hosts.

``python -m tests.server.failover_search`` tries thousands.
"""

import random

import pytest

from .failover_run import World
from .failover_search import may_die, search, world_of
from .helpers import make_plan


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    for name in ("say", "complain"):
        monkeypatch.setattr(f"lsgd.server.global_daemon.{name}", lambda text: None)


@pytest.mark.parametrize("seed", range(12))
def test_one_run_goes_on_with_one_model_and_the_exact_count(seed: int) -> None:
    search(seed)


@pytest.mark.parametrize("seed", [16, 44, 92])
def test_a_server_that_was_started_in_vain_does_not_outlive_the_run(seed: int) -> None:
    search(seed)


@pytest.mark.parametrize("seed", [39, 41, 50, 63])
def test_a_server_that_was_started_in_vain_does_not_stay_beside_the_one_that_serves(seed: int) -> None:
    search(seed)


def test_a_stop_that_only_a_part_that_gives_up_has_heard_stops_the_other_one() -> None:
    search(50169)


@pytest.mark.parametrize("seed", [15, 47, 55, 71, 103])
def test_a_link_that_is_down_for_less_than_a_standby_waits_moves_no_worker(seed: int) -> None:
    search(seed)


def test_who_could_not_serve_does_not_when_the_server_answers_again() -> None:
    world = World(make_plan(period=4, workers=2, nodes=2, lease_s=15.0, patience_s=30.0), (1, 1), 0)
    world.until(lambda: all(worker.committed for worker in world.workers), 60.0)
    standby = world.hosts[1]
    standby.cannot_serve = True
    world.cuts = {frozenset((0, 1))}
    world.until(lambda: standby.failed > 1)
    world.cuts = set()
    world.until(lambda: all(worker.term == world.hosts[0].terms[-1] for worker in world.workers))
    standby.cannot_serve = False
    world.finish()
    assert world.takeovers == 0


@pytest.mark.parametrize("seed", [2, 6, 23, 36, 42, 55])
def test_a_new_run_that_node_0_begins_makes_way_for_the_one_that_is_under_way(seed: int) -> None:
    """Its launcher was killed and is started again, perhaps before another node serves, and without its journal."""
    world, rng = world_of(seed), random.Random(seed)
    world.until(lambda: all(worker.committed for worker in world.workers), 60.0)
    world.passes(rng.choice((0.3, 5.0, 12.0)))
    host = world.hosts[0]
    assert may_die(world, host)
    host.die()
    world.passes(rng.choice((1.0, 2.0, 4.0, 8.0, 20.0)))
    host.journals["journal"].finish()
    host.reboot()
    world.passes(rng.choice((10.0, 60.0)))
    assert world.finish().run == "run"
