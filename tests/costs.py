"""What each test costs: the processor time of its process, and of all processes below.

A test's duration says that only where nothing else runs. Daemons that have left their parent, such as Ray's, are not
counted.
"""

from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

NAME = "processor_s"


def spent_s() -> float:
    """Return the processor time of this process and of all below it so far, in seconds."""
    spent = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            spent += sum(process.cpu_times()[:4])  # its own, and that of its children which have ended
        except psutil.Error:
            pass  # it has ended meanwhile, and its parent has its time
    return spent


class Meter:
    """Measures tests where they run, and notes their costs where that is reported, which may be another process.

    Args:
        file: gets a line for each test's set-up, call and teardown; None where another process reports.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._so_far = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        before, self._so_far = self._so_far, spent_s()
        report.user_properties = [(NAME, self._so_far - before)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file:
            with self._file.open("a") as file:
                file.write(f"{dict(report.user_properties)[NAME]:.2f} {report.nodeid} {report.when}\n")
