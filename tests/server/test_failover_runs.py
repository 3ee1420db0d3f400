"""Random schedules of deaths, partitions and frozen hosts.

``python -m tests.server.failover_search`` tries thousands.
"""

import pytest

from .failover_run import World
from .failover_search import search
from .helpers import make_plan

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    for name in ("say", "complain"):
        monkeypatch.setattr(f"lsgd.server.global_daemon.{name}", lambda text: None)


@pytest.mark.parametrize("seed", [*range(15), 160, 295, 676, 684, 692])
def test_one_run_goes_on_with_one_model_and_the_exact_count(seed: int) -> None:
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
