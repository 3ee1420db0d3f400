"""What the tests of the algorithms have in common."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Keep the threads of simulated workers on one core, another one for each of pytest's processes.

    They release the interpreter's lock in every operation of torch. Handed from core to core, it costs more than the
    operations.
    """
    cores = os.sched_getaffinity(0)
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[process % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
