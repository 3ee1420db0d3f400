"""What all tests have in common."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from . import costs, needs
from .integration import waiting
from .integration.running import DEADLINE_S, Cluster
from .speed import MARGIN, SLOWNESS, scaled

# Whoever runs the tests may ignore signals, as nohup and a shell's background jobs do. Every process that a test starts
# would inherit that, and some of them are sent just these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # until all is imported: that leaves no garbage, and to look for it takes a seventh of the time

# Tests read what details say; those of a quiet screen take the variable away.
os.environ["LSGD_VERBOSE"] = "1"

# The same examples every time: what a change breaks is seen with the change. "search" looks for others, and for more
# (CONTRIBUTING.md), "few" is for a slow tool around the tests (benchmarks/gpu). No example has a deadline: a busy
# machine is no failure.
settings.register_profile("repeatable", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("search", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("repeatable"), max_examples=20)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that notes what tests cost."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="note the processor time of each test in FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost if that is asked for."""
    if file := config.getoption("costs"):
        reports_elsewhere = hasattr(config, "workerinput")  # in one of several processes
        config.pluginmanager.register(costs.Meter(None if reports_elsewhere else file))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leave a file that lacks packages unread, and keep one that needs them out of the first lane."""
    if not (packages := needs.PACKAGES.get(str(module_path.relative_to(Path(__file__).parent)))):
        return None
    module = needs.Module.from_parent(parent, path=module_path)
    module.packages = packages
    module.add_marker("slow")
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Give each test its time on this machine (speed.py)."""
    mark = item.get_closest_marker("timeout")
    limit = mark.args[0] if mark else item.config.getoption("timeout") or float(item.config.getini("timeout"))
    item.add_marker(pytest.mark.timeout(scaled(limit)), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how slow the machine was found, by which every deadline was multiplied."""
    said = f"this machine takes {SLOWNESS:.1f} times as long as the fastest one; deadlines were {MARGIN * SLOWNESS:.1f}"
    terminalreporter.write_line(f"{said} times theirs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show of a test that failed what its processes wait for."""
    report = yield
    if report.failed and call.when != "teardown" and (story := waiting.story()):
        report.sections.append(("what still runs", story))
    return report


@pytest.fixture(autouse=True)
def _leaks_are_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the warning of a file that nobody closed fail the test that opened it, and no later one."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) > before:
        request.node.funcargs.clear()
        for name in ("last_type", "last_value", "last_exc", "last_traceback"):  # what a failure has left holds files
            vars(sys).pop(name, None)
        gc.collect()


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
    gc.enable()


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
