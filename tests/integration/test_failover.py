"""Node 0 is killed with everything in it, in the middle of a round, and the others end the run."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed
from tests import golden

from .running import SCRIPTS, until
from .test_two_nodes import finish, start

ITERATIONS = 240
PLAN = {"LSGD_ALGORITHM": "leader", "LSGD_PERIOD": "16", "LSGD_LOCAL_PERIOD": "4"}

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def steps(folder: Path) -> int:
    """Return how many steps the workers with this run folder have made."""
    return sum(len(path.read_text().split()) for path in folder.glob("*.steps"))


def says(log: Path, words: str) -> bool:
    """Return whether the log is there and has these words."""
    return log.exists() and words in log.read_text()


@pytest.mark.parametrize("nodes", [pytest.param(2, marks=pytest.mark.first), 3])
def test_the_run_ends_on_the_others_with_the_exact_count(tmp_path: Path, nodes: int) -> None:
    run = {**PLAN, "NUM_GROUPS": str(nodes), "NUM_WORKERS": "1", "LSGD_ITERATIONS": str(ITERATIONS)}
    script = (str(SCRIPTS / "crash.py"), "--sleep", "0.02")
    with Testbed(nodes) as testbed:
        dwells = ("--dwell-in-round", "3", "--until", str(tmp_path / "never"))
        first = start(testbed.hosts[0], tmp_path, *script, *dwells, **run)
        serves = tmp_path / "node0" / "global.log"
        others = []
        for host in testbed.hosts[1:]:  # so that node 2 knows that node 1 comes first, however soon node 0 dies
            others.append(start(host, tmp_path, *script, **run))
            connects = f"node{host.index} ({host.name}) connects"
            until(partial(says, serves, connects), connects)
        log = tmp_path / "node0" / "node0-worker0.log"
        until(partial(says, log, "dwells in round"), "node 0 is in a round")
        testbed.hosts[0].close()
        first.communicate()
        lost = steps(tmp_path / "node0")
        shutil.rmtree(tmp_path / "node0")
        outputs = finish(others)
    assert golden.text("failover.serves", node="node1") in outputs[0]
    result = json.loads((tmp_path / "node1" / "result.json").read_text())
    assert (result["state"], result["count"]) == ("finished", ITERATIONS)
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node*/node*.json"))]
    assert len(ends) == nodes - 1 and len({end["model"] for end in ends}) == 1
    made = sum(end["iterations"] for end in ends)
    assert made == sum(steps(tmp_path / f"node{node}") for node in range(1, nodes))
    assert 0 <= ITERATIONS - made <= lost
    rounds = [json.loads(line) for line in (tmp_path / "node1" / "metrics.jsonl").read_text().splitlines()]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert len({each["run"] for each in rounds}) == 1
