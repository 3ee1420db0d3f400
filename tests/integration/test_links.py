"""Links that break between two nodes only, and runs whose rounds fail for ever."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Host, Testbed
from lsgd.errors import NoConsensusError
from lsgd.server.reasons import Why
from tests import golden

from .running import SCRIPTS, lost, until
from .test_partition import Operator, live_nodes
from .test_two_nodes import finish, start


@pytest.mark.parametrize("algorithm", ["leader", "allreduce"])
def test_a_run_whose_rounds_fail_for_ever_ends_with_a_checkpoint_and_says_so(cluster, algorithm) -> None:
    """In the second case they fail in the backward pass.

    A round's reason is the first report: that of the worker that failed, or of the other, whose group it has left.
    """
    server, _ = cluster.start("--workers", "2", "--algorithm", algorithm)
    failing = cluster.worker("crash", 0, 0, "--fail-from", 3)
    other = cluster.worker("crash", 0, 1)
    reason = "(it fails on request|node0/worker0: it has left the group)"
    for worker, name in ((failing, "node0/worker0"), (other, "node0/worker1")):
        assert worker.wait() == NoConsensusError.exit_code
        worker.says(
            f"{name} ends with exit code 74: {name} has no consensus at the end of the run: 10 rounds in a row failed, "
            rf"the last because .*{reason}; its state is saved in \S+{name.replace('/', '-')}"
        )
    failing.says(golden.pattern("links.fails_on_request"))
    server.succeeds()
    server.says(golden.pattern("links.failed_end"))
    assert len(list(cluster.folder.glob("checkpoints/**/node0-worker*.safetensors"))) == 2


ADDRESS_OF_NOBODY = "02:00:00:00:00:01"


def cut_link(one: Host, other: Host) -> None:
    """Lose every packet between two hosts, silently, and none between them and others."""
    for host, peer in ((one, other), (other, one)):
        host.run([*"ip neigh replace".split(), peer.address, *f"lladdr {ADDRESS_OF_NOBODY} dev eth0".split()])


def mend_link(one: Host, other: Host) -> None:
    """Undo :func:`cut_link`."""
    for host, peer in ((one, other), (other, one)):
        host.run(["ip", "neigh", "del", peer.address, "dev", "eth0"])


PLAN = {
    "NUM_GROUPS": "3",
    "NUM_WORKERS": "1",
    "LSGD_PERIOD": "16",
    "LSGD_ALGORITHM": "leader",
    "LSGD_LOCAL_PERIOD": "16",
    "LSGD_EXCHANGE_TIMEOUT_S": "4",
}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.slow
@pytest.mark.first
@pytest.mark.timeout(240)
def test_a_link_that_breaks_between_two_nodes_is_gone_around_by_the_relay(tmp_path: Path) -> None:
    with Testbed(3) as testbed:
        operator = Operator(testbed.hosts[0], tmp_path / "keys")
        status = operator.status
        command = (str(SCRIPTS / "crash.py"), "--sleep", "0.03")
        processes = [start(host, tmp_path, *command, **PLAN) for host in testbed.hosts]
        operator.finds_the_server()
        until(lambda: status()["rounds_global"] >= 3, "it trains")
        assert status()["ways"] == []
        cut_link(testbed.hosts[1], testbed.hosts[2])
        until(lambda: status()["ways"] == [{"nodes": [1, 2], "way": "through the relay"}], "the relay is found")
        rounds = status()["rounds_global"]
        until(lambda: (s := status())["rounds_global"] >= rounds + 3 and live_nodes(s) == [0, 1, 2], "all train")
        operator.stop()
        outputs = finish(processes)
    assert Why.RELAYED(pairs="node1 and node2", more="") in outputs[0]
    assert "evicted" not in outputs[0]
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node*/node*.json"))]
    assert len(results) == 3 and len({result["model"] for result in results}) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_link_that_breaks_between_two_nodes_leaves_one_out_until_it_is_mended(tmp_path: Path) -> None:
    """Over NCCL, with Gloo in its place: it knows no relay."""
    plan = PLAN | {"LSGD_TRANSPORT": "nccl"}
    with Testbed(3) as testbed:
        operator = Operator(testbed.hosts[0], tmp_path / "keys")
        status = operator.status

        def trains(nodes: list[int]) -> dict[str, Any]:
            """Return the status, when these nodes alone have completed two global rounds more."""
            first = until(lambda: (s := status()) and live_nodes(s) == nodes and s, f"{nodes} are live")
            return until(lambda: (s := status())["rounds_global"] >= first["rounds_global"] + 3 and s, "it trains")

        command = (str(SCRIPTS / "crash.py"), "--sleep", "0.03", "--like-nccl")
        processes = [start(host, tmp_path, *command, **plan) for host in testbed.hosts]
        operator.finds_the_server()
        trains([0, 1, 2])
        cut_link(testbed.hosts[1], testbed.hosts[2])
        trains([0, 1])
        cut = until(  # between its attempts to come back
            lambda: [m["worker"] for m in status()["members"] if m["state"] == "cut"], "node 2 is cut off"
        )
        assert cut == ["node2/worker0"]
        mend_link(testbed.hosts[1], testbed.hosts[2])
        trains([0, 1, 2])
        operator.stop()
        outputs = finish(processes)
    said = outputs[0].splitlines()
    failed = [line for line in said if "[global]" in line and " failed: " in line]
    pair = "node1 and node2 cannot reach each other"
    assert any(line.endswith(f" failed: {pair}") for line in said)
    assert any(golden.text("links.evicted", pair=pair) in line for line in said)
    waits_s = [int(wait_s) for wait_s in re.findall(r"node2 evicted for (\d+) s", outputs[0])]
    assert waits_s == [4 * 2**n for n in range(len(waits_s))]  # after the probe, and whenever it comes back too early
    assert len(failed) <= 1 + len(waits_s), failed  # the first one timed out
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("node*/node*.json"))]
    assert len(results) == 3  # none of them was started again
    assert len({result["model"] for result in results}) == 1
    steps = sum(len(path.read_text().split()) for path in tmp_path.glob("node*/*.steps"))
    count = int(outputs[0].rpartition("the run is over: lsgd stop; ")[2].split()[0])
    assert steps - lost(outputs[0]) == count
