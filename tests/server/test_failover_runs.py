"""Random schedules of deaths, partitions and frozen hosts.

``python -m tests.server.failover_search`` tries thousands.
"""

import pytest

from .failover_search import search

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    for name in ("say", "complain"):
        monkeypatch.setattr(f"lsgd.server.global_daemon.{name}", lambda text: None)


@pytest.mark.parametrize("seed", [*range(15), 160, 295, 676, 684, 692])
def test_one_run_goes_on_with_one_model_and_the_exact_count(seed: int) -> None:
    search(seed)
