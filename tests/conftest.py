"""What all tests have in common."""

import gc
import importlib
import signal
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from .integration.running import DEADLINE_S, Cluster

# Whoever runs the tests may ignore signals, as nohup and a shell's background jobs do. Every process that a test starts
# would inherit that, and some of them are sent just these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples every time: what a change breaks is seen with the change. "search" looks for others, and for more
# (CONTRIBUTING.md), "few" is for a slow tool around the tests (benchmarks/gpu). No example has a deadline: a busy
# machine is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("repeatable"), max_examples=20)
settings.load_profile("repeatable")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files with slow tests, which mostly wait, evenly among the others, which mostly compute."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [each for each in files.values() if any(item.get_closest_marker("slow") for item in each)]
    fast = [each for each in files.values() if each not in slow]
    spread = [(i / len(group), each) for group in (slow, fast) for i, each in enumerate(group)]
    items[:] = [item for _, each in sorted(spread, key=itemgetter(0)) for item in each]


def pytest_collection_finish() -> None:
    """Let no search for garbage go through the modules and the thousands of tests that stay to the end."""
    gc.collect()
    gc.freeze()


def example(name: str) -> Callable[[], ModuleType]:
    """Return the fixture of a module of lsgd.examples, which takes a second to import."""

    @pytest.fixture(scope="session", name=name)
    def module() -> ModuleType:
        return importlib.import_module(f"lsgd.examples.{name}")

    return module


digits, report = map(example, ("digits", "report"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A global server and one node without workers."""
    made = Cluster(tmp_path_factory.mktemp("servers"))
    made.start("--workers", "2", "--algorithm", "local", "--period", "8", "--iterations", "100")
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators' requests wait for a busy machine's answer."""
    monkeypatch.setattr("lsgd.watch.reader.ANSWER_WITHIN_S", DEADLINE_S)
