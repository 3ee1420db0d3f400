"""A take-over that is not needed any more is called off: a link is cut for a moment, and a run ends meanwhile."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed
from lsgd.run_folder import JOURNAL
from tests import golden

from .running import SCRIPTS, Fork, until
from .test_failover import PLAN, says, steps
from .test_two_nodes import finish, start

CUT_S = 4.2
RUN = {**PLAN, "NUM_GROUPS": "3", "NUM_WORKERS": "1"}
SCRIPT = (str(SCRIPTS / "crash.py"), "--sleep", "0.02")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def three_nodes(testbed: Testbed, folder: Path) -> list[Fork]:
    """Return launchers of three nodes that train."""
    launchers = []
    for host in testbed.hosts:  # in this order, and each has heard who the standbys are
        launchers.append(start(host, folder, *SCRIPT, **RUN))
        connects = f"node{host.index} ({host.name}) connects"
        until(partial(says, folder / "node0" / "global.log", connects), connects)
    trains_on(folder, 20)
    return launchers


def trains_on(folder: Path, iterations: int) -> None:
    """Wait until every node that is there has made so many more steps."""
    nodes = {path: steps(path) + iterations for path in folder.glob("node?")}
    until(lambda: all(steps(path) >= wanted for path, wanted in nodes.items()), "all train on")


def frozen_server(folder: Path, node: int) -> int:
    """Wait until a node takes over, and return its server, which is frozen before it serves."""
    journal = folder / f"node{node}" / f"node{node}-{JOURNAL}"
    until(journal.exists, f"node {node} takes over")
    argument = f"--journal\0{journal}\0".encode()

    def found() -> int:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if argument in path.read_bytes():
                    return int(path.parent.name)
            except OSError:  # it has ended meanwhile
                continue
        return 0

    server = until(found, f"node {node} starts a server")
    os.kill(server, signal.SIGSTOP)
    return int(server)


def test_a_link_that_is_down_for_a_moment_moves_no_node_and_no_worker(tmp_path: Path) -> None:
    with Testbed(3) as testbed:
        launchers = three_nodes(testbed, tmp_path)
        testbed.cut(testbed.hosts[0])
        mended_at = time.monotonic() + CUT_S
        until(lambda: time.monotonic() >= mended_at, "the cut lasts")
        testbed.mend(testbed.hosts[0])
        trains_on(tmp_path, 50)
        launchers[0].terminate()
        outputs = finish(launchers)
    assert "restarting it" not in "".join(outputs)
    assert not any(
        says(tmp_path / name / f"{name}.log", golden.text("failover.some_serves")) for name in ("node1", "node2")
    )


def test_a_server_that_starts_too_late_ends_with_the_run(tmp_path: Path) -> None:
    with Testbed(3) as testbed:
        launchers = three_nodes(testbed, tmp_path)
        testbed.hosts[0].close()
        launchers[0].communicate()
        first = frozen_server(tmp_path, 1)
        frozen_server(tmp_path, 2)
        os.kill(first, signal.SIGCONT)
        until(
            partial(says, tmp_path / "node1" / "node1.log", golden.text("failover.some_serves")),
            "node 1 serves the run",
        )
        launchers[1].terminate()
        finish(launchers[1:])
    assert not says(tmp_path / "node2" / "node2.log", golden.text("failover.serves", node="node2"))
