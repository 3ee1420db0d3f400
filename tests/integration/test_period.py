"""The period in real runs: short at both ends, and with auto as long as the link wants."""

import os
import re
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed
from lsgd.server.phases import SAMPLES
from lsgd.server.reasons import Why
from tests import golden

from .running import SCRIPTS, until
from .test_partition import Operator
from .test_two_nodes import finish, start


def test_a_run_begins_and_ends_with_short_periods_on_all_workers(cluster) -> None:
    shares = ("--warm-share", "0.25", "--closing-share", "0.25")
    plan = ("--workers", "2", "--iterations", "128", "--algorithm", "local", "--period", "8", *shares)
    server, _ = cluster.start(*plan)
    for worker in [cluster.worker("steps", 0, index) for index in range(2)]:
        worker.succeeds()
    said = server.succeeds()
    for index in range(2):
        periods = [settings["period"] for _, _, settings in cluster.result(0, index)["turns"]]
        assert [period for period, _ in groupby(periods)] == [1, 2, 4, 8, 4, 2, 1]
    assert Why.PERIOD(period=2, delay="", reason=Why.WARM()) in said
    assert "period 8: as planned" in said
    assert Why.PERIOD(period=1, delay="", reason=Why.CLOSING()) in said


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_auto_follows_a_link_that_changes(tmp_path: Path) -> None:
    plan = {"LSGD_COMPRESSION": "none", "LSGD_PERIOD": "auto", "NUM_WORKERS": "1"}
    rounds, log = (tmp_path / "node0" / name for name in ("metrics.jsonl", "global.log"))

    def chosen() -> tuple[int, str]:
        """Return the period, and why it is this one."""
        *_, (period, reason) = re.findall(r"period (\d+)[^:\n]*: (.*)", log.read_text())
        return int(period), reason

    with Testbed(2, rate_mbit=25) as testbed:
        # A round sends a quarter of a megabyte each way: 0.08 s, and then 0.8 s, beside steps of 0.05 s.
        command = (str(SCRIPTS / "steps.py"), "--width", "256", "--sleep", "0.05")
        processes = [start(host, tmp_path, *command, **plan) for host in testbed.hosts]
        # The first rounds are measured while processes still start.
        until(lambda: rounds.exists() and rounds.read_text().count("\n") > 2 * SAMPLES, "the link is measured")
        fast, _ = chosen()
        testbed.set_rate(2.5)
        slow = until(lambda: (found := chosen())[0] > 2 * fast and found, f"more than twice {fast}")
        assert slow[1].startswith("a round takes ")
        testbed.set_rate(None)
        until(lambda: chosen()[0] <= 1.5 * fast, f"about {fast} again")
        Operator(testbed.hosts[0], tmp_path / "keys").stop()
        outputs = finish(processes)
    assert re.search(golden.pattern("exchange.round_takes"), outputs[0])
