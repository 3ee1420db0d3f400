"""How slow this machine is now: measured when a run of the tests begins, for all that waits for real processes.

A deadline is written down as on the fastest machine seen, and :func:`scaled` makes it this one's. The measurement sees
the load of the moment and a quota of the processor, but no load that comes later: ``MARGIN`` is for that.
"""

import os
import subprocess
import sys
import time

VARIABLE = "SLOWNESS_OF_TESTS"
"""Has the factor for the processes that share it: pytest-xdist's, and what tests start."""

FASTEST_S = 1.3
"""What :func:`probe_s` has returned on the fastest machine, with nothing beside it."""

MARGIN = 2.0
MOST = 10.0
"""Of the factor: load so high is a moment's, and a test that hangs is to fail within the hour."""

PROBE = """
import os, torch
for _ in range(20):
    child = os.fork() or os._exit(0)
    os.waitpid(child, 0)
sum(i * i for i in range(1_000_000))
"""


def probe_s() -> float:
    """Return the seconds that two new processes side by side take to import torch, to fork and to compute.

    Two, because tests run at least as many: a quota of one core for all of them is half a machine.
    """
    begun = time.monotonic()
    probes = [subprocess.Popen([sys.executable, "-c", PROBE]) for _ in range(2)]
    for probe in probes:
        assert probe.wait() == 0, "the probe of this machine's speed failed"
    return time.monotonic() - begun


def measured() -> float:
    """Return how many times as long as on the fastest machine things take; files that had to be read do not count."""
    if VARIABLE not in os.environ:
        factor = probe_s() / FASTEST_S
        if factor > 1.5:
            factor = min(factor, probe_s() / FASTEST_S)
        os.environ[VARIABLE] = f"{min(max(1.0, factor), MOST):.2f}"
    return float(os.environ[VARIABLE])


SLOWNESS = measured()


def scaled(seconds: float) -> float:
    """Return a deadline of this machine for one of the fastest."""
    return seconds * SLOWNESS * MARGIN
