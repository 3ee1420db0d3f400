"""How slow this machine is now: measured when a run of the tests begins, for all that waits for real processes.

A deadline is written down as on the fastest machine seen, and :func:`scaled` makes it this one's. The measurement sees
the load of the moment and a quota of the processor, but no load that comes later: ``MARGIN`` is for that.
"""

import os
import subprocess
import sys

VARIABLE = "SLOWNESS_OF_TESTS"
"""Has the factor for the processes that share it: pytest-xdist's, and what tests start."""

FASTEST_PER_S = 1100.0
"""Pieces of work that a process has done in a second on the fastest machine, with one other beside it."""

MARGIN = 2.0
MOST = 10.0
"""Of the factor: load so high is a moment's, and a test that hangs is to fail within the hour."""

PROBE_S = 1.5
"""So many periods of a quota, and turns of a busy processor, that where they begin makes no difference."""

PROBE = f"""
import time
source = "def f(x):\\n" + "    x = x + [1, 2, {{'three': x}}]\\n" * 40
block = bytes(1 << 20)
def work():
    sum(i * i for i in range(20_000))
    compile(source, "source", "exec")
    bytearray(block)[::64]
work()
begun, done = time.monotonic(), 0
while (taken := time.monotonic() - begun) < {PROBE_S}:
    work()
    done += 1
print(done / taken)
"""
"""What processes that start do: compute, compile, and get memory. No file is read meanwhile."""


def pieces_per_s() -> float:
    """Return how much work a process does in a second beside another one.

    Two, because tests run at least as many: a quota of one core for all of them is half a machine.
    """
    command = [sys.executable, "-S", "-c", PROBE]
    probes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    rates = [float(probe.communicate()[0] or 0) for probe in probes]
    assert all(rates), "the probe of this machine's speed failed"
    return sum(rates) / 2


def measured() -> float:
    """Return how many times as long as on the fastest machine things take."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{min(max(1.0, FASTEST_PER_S / pieces_per_s()), MOST):.2f}"
    return float(os.environ[VARIABLE])


SLOWNESS = measured()


def scaled(seconds: float) -> float:
    """Return a deadline of this machine for one of the fastest."""
    return seconds * SLOWNESS * MARGIN
