"""What all tests have in common."""

import signal

import pytest
from hypothesis import settings

# Whoever runs the tests may ignore signals, as nohup and a shell's background jobs do. Every process that a test starts
# would inherit that, and some of them are sent just these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples every time: what a change breaks is seen with the change. Others are looked for by
# bash scripts/test.sh --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of a file run in one process, and those of network namespaces, one after the other, in another."""
    for item in items:
        group = "root" if item.get_closest_marker("root") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
