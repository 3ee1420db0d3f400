"""A newcomer behind NAT takes the model through the relay while others train, and the ones it takes it from die."""

import os
import re
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Testbed
from tests import golden

from ..needs import needs_nat
from .running import SCRIPTS, until
from .test_partition import Operator
from .test_two_nodes import finish, start

PLAN = """
workers = 2
exchange_timeout_s = 20
join_pause_s = 0.1
[[phase]]
name = "local"
period = 8
"""
WIDTH = 1 << 17
MB = 4 * 10 * WIDTH / 1e6
"""Size of the model."""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@needs_nat()
@pytest.mark.timeout(300)
def test_a_download_goes_on_when_its_source_and_then_the_newcomer_are_killed(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)

    def taken(count: int) -> tuple[float, str]:
        """Return how many MB node 2 takes from whom, when it has said it so often and some have come."""
        path, said = (
            tmp_path / "node2" / "node2-worker0.log",
            golden.pattern("exchange.takes_model"),
        )
        until(
            lambda: path.exists() and len(re.findall(said, path.read_text())) >= count, f"node 2 says it {count} times"
        )
        before = rounds()
        until(lambda: rounds() > before + 1, "rounds are made meanwhile")
        takers, size, source = re.findall(said, path.read_text())[count - 1]
        return float(size) - MB * takers.count(","), source  # another one that takes it lacks all

    def rounds() -> int:
        return (tmp_path / "node0" / "global.log").read_text().count("global round")

    def kill(host: Host) -> None:
        host.run(["sh", "-c", f"kill -9 {(tmp_path / host.name / f'{host.name}-worker0.pid').read_text()}"])

    def trains(node: int) -> list[str]:
        path = tmp_path / f"node{node}" / f"node{node}-worker0.digests"
        return path.read_text().split() if path.exists() else []

    with Testbed(3, rate_mbit=10, behind_nat=[1, 2]) as testbed:
        operator = Operator(testbed.hosts[0], tmp_path / "keys")
        run = {"PLAN": str(tmp_path / "plan.toml"), "NUM_GROUPS": "3", "NUM_WORKERS": "1"}
        command = (str(SCRIPTS / "steady.py"), "--width", str(WIDTH))
        processes = [start(host, tmp_path, *command, **run) for host in testbed.hosts[:2]]
        until(lambda: len(trains(0)) > 20, "the first two train")
        processes.append(start(testbed.hosts[2], tmp_path, *command, **run))
        size, source = taken(1)
        kill(testbed.hosts[0] if source == "node0/worker0" else testbed.hosts[1])
        survivor = {"node0/worker0": 1, "node1/worker0": 0}[source]
        trained = len(trains(survivor))
        left, other = taken(2)
        assert other == f"node{survivor}/worker0" and left < size
        kill(testbed.hosts[2])
        until(lambda: trains(2), "the newcomer trains in the end")
        assert len(trains(survivor)) > trained
        until(lambda: len(trains(1 - survivor)) > 8, "so does the source, which came back")
        operator.stop()
        finish(processes)
    assert len({(tmp_path / f"node{n}" / f"node{n}-worker0.model").read_text() for n in range(3)}) == 1
