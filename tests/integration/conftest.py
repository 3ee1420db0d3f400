"""Fixtures: servers and workers of a run (running.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .running import Cluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count every test with a run of its own among the slow ones."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Servers and workers for one test."""
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Servers of a run of one worker without an end: a test joins it in this process, and leaves it."""
    made = Cluster(tmp_path_factory.mktemp("run"))
    made.start("--workers", "1", "--period", "4", "--local-period", "4", "--restart-from-scratch", "true")
    yield made
    made.close()


@pytest.fixture
def here(open_run: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The open run, with this process as its worker to be."""
    monkeypatch.setenv("LSGD_LOCAL", open_run.local_address(0))
    monkeypatch.setenv("LSGD_LOCAL_RANK", "0")
    return open_run
