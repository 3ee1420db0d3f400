"""Node 0 is killed with everything in it, in the middle of a round, and the others end the run."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.testbed import Testbed

from .running import SCRIPTS, until
from .test_two_nodes import finish, start

ITERATIONS = 600
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


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_run_ends_on_the_others_with_the_exact_count(tmp_path: Path, nodes: int) -> None:
    run = {**PLAN, "NUM_GROUPS": str(nodes), "NUM_WORKERS": "1", "LSGD_ITERATIONS": str(ITERATIONS)}
    script = (str(SCRIPTS / "crash.py"), "--sleep", "0.02")
    with Testbed(nodes) as testbed:
        dwells = ("--dwell-in-round", "6", "--until", str(tmp_path / "never"))
        first = start(testbed.hosts[0], tmp_path, *script, *dwells, **run)
        others = [start(host, tmp_path, *script, **run) for host in testbed.hosts[1:]]
        log = tmp_path / "node0" / "node0-worker0.log"
        until(lambda: log.exists() and "dwells in round" in log.read_text(), "node 0 is in a round")
        testbed.hosts[0].close()
        first.communicate()
        lost = steps(tmp_path / "node0")
        shutil.rmtree(tmp_path / "node0")
        outputs = finish(others)
    # Both begin to serve if node 0 dies before it has told node 2 that node 1 is the first standby: one gives way.
    served = [node for node, output in enumerate(outputs, 1) if f"node{node} serves the run from now on" in output]
    results = {node: json.loads((tmp_path / f"node{node}" / "result.json").read_text()) for node in served}
    (serves,) = [node for node, result in results.items() if result["state"] == "finished"]
    assert results[serves]["count"] == ITERATIONS
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node*/node*.json"))]
    assert len(ends) == nodes - 1 and len({end["model"] for end in ends}) == 1
    made = sum(end["iterations"] for end in ends)
    assert made == sum(steps(tmp_path / f"node{node}") for node in range(1, nodes))
    assert 0 <= ITERATIONS - made <= lost
    metrics = tmp_path / f"node{serves}" / "metrics.jsonl"
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert len({each["run"] for each in rounds}) == 1
