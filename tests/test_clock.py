"""Nothing is decided by the time of day, which can be set back: only by clocks that never go back."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lsgd"
TIME_OF_DAY = {
    "time",
    "time_ns",
    "localtime",
    "gmtime",
    "ctime",
    "asctime",
    "strftime",
    "now",
    "utcnow",
    "today",
}
FOR_PEOPLE = {
    ("server/daemon.py", "strftime"),  # before each line that a server prints
    ("output.py", "strftime"),  # before each line of a node and of its store
    ("cli/commands.py", "strftime"),  # the name of a run's folder
    ("pairing/up.py", "strftime"),
    ("cli/stacks.py", "time"),  # how long a process has been running
    ("cli/runs.py", "datetime"),  # when a run began
    ("cli/runs.py", "strftime"),
    ("server/report.py", "datetime"),  # when a run began
    ("server/report.py", "now"),
    ("cli/doctor.py", "time"),  # compared between two machines
    ("watch/curves.py", "time"),  # beside each point of a curve
    ("server/stream.py", "time"),  # beside each event
}


def times_of_day(path: Path) -> set[str]:
    """Return the names of the time of day that a module uses of the modules ``time`` and ``datetime``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {alias.name for alias in node.names} & {*TIME_OF_DAY, "datetime", "date"}
        elif isinstance(node, ast.Attribute) and node.attr in TIME_OF_DAY:
            owner = ast.unparse(node.value)
            if owner in ("time", "datetime", "datetime.datetime", "datetime.date"):
                found.add(node.attr)
    return found


def test_the_time_of_day_is_for_people_only() -> None:
    paths = PACKAGE.rglob("*.py")
    uses = {(path.relative_to(PACKAGE).as_posix(), use) for path in paths for use in times_of_day(path)}
    assert uses == FOR_PEOPLE
