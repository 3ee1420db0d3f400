"""Two nodes: two workers each, in network namespaces of their own, started as a user starts them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Testbed
from tests import golden

from .running import FORKS, LIGHT, SCRIPTS, Fork, lost

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

Node = subprocess.Popen[str] | Fork
REGRESSION = str(SCRIPTS / "crash.py")
ITERATION_TIMES = """
import sys, time, torch
from lsgd.client import Worker
model = torch.nn.Linear(1000, 250)
data = torch.utils.data.TensorDataset(torch.randn(400, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
times = []
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=10)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            times.append(time.monotonic())
            time.sleep(0.005)
    (worker.run_dir / f"times{worker.rank}").write_text("\\n".join(map(str, times)))
"""


RUN = {"IP_ADDR": "10.77.0.1", "NUM_GROUPS": "2", "NUM_WORKERS": "2", "DEVICE": "cpu"}
OPTIONS = {"IP_ADDR": "address", "NUM_GROUPS": "nodes", "NUM_WORKERS": "workers", "DEVICE": "device", "PLAN": "plan"}
"""What scripts/train.sh makes of its settings."""


def variables(folder: Path, **settings: str) -> dict[str, str]:
    """Return the environment of a node, with keys below ``folder``."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "LSGD_KEYS": str(folder / "keys"), **settings}


def start(host: Host, folder: Path, *script: str, options: Sequence[str] = (), **settings: str) -> Fork:
    """Launch ``host`` as its node, with results in a folder of its own below ``folder``."""
    named = {**RUN, **settings}
    options = [f"--{OPTIONS[name]}={named.pop(name)}" for name in OPTIONS if name in named] + list(options)
    launch = ["launch", "--node", str(host.index), *options, "--run-dir", str(folder / host.name)]
    command = [sys.executable, "-P", "-m", "lsgd.client", *launch, "--", sys.executable, *script]
    return FORKS.popen(command, cwd=ROOT, env=variables(folder, **named), host=host.pid)


def start_by_script(
    host: Host, folder: Path, *command: str, script: Sequence[str] = (), **settings: str
) -> subprocess.Popen[str]:
    """Start it as a user does: by train.sh, or by ``script``."""
    run_name = os.path.relpath(folder / host.name, ROOT / "runs")
    environ = variables(folder, **{**LIGHT, **RUN, "PYTHON": sys.executable, "RUN_NAME": run_name, **settings})
    script = script or ["bash", str(ROOT / "scripts/train.sh"), str(host.index), *command]
    return host.popen(script, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: Sequence[Node]) -> list[str]:
    """Return what each process showed, when all have ended well; one that ends badly ends the others."""

    def ended(process: Node) -> str:
        output = process.communicate()[0]
        if process.returncode:
            for other in processes:
                other.terminate()
        return output

    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = list(pool.map(ended, processes))
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


def processes_on(host: Host) -> list[str]:
    """Return the names of the processes on ``host``, without its first one and ps."""
    names = host.run(["ps", "-e", "-o", "comm="]).split()
    return sorted(name for name in names if name not in ("cat", "ps"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_reach_the_accuracy_with_local_rounds_inside_each(tmp_path: Path) -> None:
    iterations = 800
    plan = {
        "LSGD_ALGORITHM": "leader",
        "LSGD_PERIOD": "64",
        "LSGD_LOCAL_PERIOD": "8",
        "LSGD_ITERATIONS": str(iterations),
    }
    with Testbed(2) as testbed:
        finish([start(host, tmp_path, str(SCRIPTS / "digits.py"), **plan) for host in testbed.hosts])
        assert [processes_on(host) for host in testbed.hosts] == [[], []]
        on_the_wire_nbytes = sum(host.sent_nbytes for host in testbed.hosts)
    result = json.loads((tmp_path / "node0" / "result.json").read_text())
    (accuracy,) = {json.loads(path.read_text())["accuracy"] for path in tmp_path.glob("node?/node?-worker?.json")}
    assert accuracy >= 0.97
    assert (len(result["members"]), result["nodes"]) == (4, 2)
    taken_off = lost((tmp_path / "node0" / "global.log").read_text())
    assert result["count"] == sum(member["done"] for member in result["members"]) - taken_off == iterations
    assert result["rounds_local"] >= 4 * result["rounds_global"] > 0
    # A model crosses at most three times in a global round, and never in a local one.
    model_nbytes = 4 * 6_730  # one number for each parameter, and the buffers of the batch-norms
    control_nbytes = iterations * 500
    assert on_the_wire_nbytes < (result["rounds_global"] + 6) * 3 * model_nbytes + control_nbytes
    assert on_the_wire_nbytes < result["rounds_local"] * model_nbytes


def shows(process: Node, text: str) -> str:
    """Return the next line of a process's output with this text."""
    assert process.stdout
    shown = []
    while not shown or text not in shown[-1]:
        shown.append(process.stdout.readline())
        assert shown[-1], f"it ended early: {''.join(shown)}"
    return shown[-1]


def test_the_line_that_node_0_prints_starts_node_1_with_a_token_of_its_own(tmp_path: Path) -> None:
    with Testbed(2, loopback_names=True) as testbed:
        command = ("--", sys.executable, REGRESSION)
        first = start_by_script(testbed.hosts[0], tmp_path, *command, NUM_WORKERS="1", LSGD_ITERATIONS="100")
        line = shows(first, "[launch] node 1 joins with: ").partition("joins with: ")[2]
        assert line.startswith("LSGD_TOKEN=lsgd1:node1:")
        shows(first, "worker0")  # it is well under way
        elsewhere = {"LSGD_KEYS": str(tmp_path / "none"), "IP_ADDR": "", "NUM_GROUPS": "", "NUM_WORKERS": "1"}
        second = start_by_script(testbed.hosts[1], tmp_path, script=("bash", "-c", line), **elsewhere)
        while not [*tmp_path.rglob("node1-joined.token")]:  # lsgd status needs it there
            assert second.poll() is None
            time.sleep(0.05)
        finish([first, second])
    assert not [*tmp_path.rglob("node1-joined.token")]
    result = json.loads((tmp_path / "node0" / "result.json").read_text())
    assert (len(result["members"]), result["nodes"], result["count"]) == (2, 2, 100)


def test_node_1_may_start_first_and_waits_for_its_token_in_a_folder_that_both_see(tmp_path: Path) -> None:
    with Testbed(2) as testbed:
        plan = {"NUM_WORKERS": "1", "LSGD_ITERATIONS": "100"}
        second = start(testbed.hosts[1], tmp_path, REGRESSION, **plan)
        shows(second, golden.text("keys.needs_token"))
        finish([second, start(testbed.hosts[0], tmp_path, REGRESSION, **plan)])
    result = json.loads((tmp_path / "node0" / "result.json").read_text())
    assert (len(result["members"]), result["nodes"], result["count"]) == (2, 2, 100)


@pytest.mark.alone
def test_while_one_node_is_in_a_local_round_the_other_keeps_training(tmp_path: Path) -> None:
    script = tmp_path / "times.py"
    script.write_text(ITERATION_TIMES)
    plan = {"LSGD_ALGORITHM": "leader", "LSGD_ITERATIONS": "1600", "LSGD_PERIOD": "800", "LSGD_LOCAL_PERIOD": "10"}
    with Testbed(2) as testbed:
        # A model of 1 MB takes more than 0.3 s from one worker of node 0 to the other.
        testbed.hosts[0].run(
            ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *"rate 20mbit burst 128k latency 1s".split()]
        )
        finish([start(host, tmp_path, str(script), options=["--insecure"], **plan) for host in testbed.hosts])
    times_s = [
        [float(line) for line in (tmp_path / f"node{rank // 2}" / f"times{rank}").read_text().split()]
        for rank in range(4)
    ]
    # The leader may go on when its model is in the socket; the other waits for it. Which one leads changes.
    all_train = max(times[0] for times in times_s)
    long = ((a, b) for times in times_s[:2] for a, b in pairwise(times) if b - a > 0.2)
    pauses: list[tuple[float, float]] = []
    for a, b in sorted((a, b) for a, b in long if a > all_train):
        if pauses and a < pauses[-1][1]:  # both workers', in one round
            a, b = pauses[-1][0], max(pauses.pop()[1], b)
        pauses.append((a, b))
    went_on = [any(a < t < b for t in times_s[2]) and any(a < t < b for t in times_s[3]) for a, b in pauses]
    assert len(pauses) >= 8
    assert sum(went_on) >= len(pauses) - 2  # those of the two global rounds


@pytest.mark.slow
def test_the_script_for_two_nodes_trains_over_a_slow_wire(tmp_path: Path) -> None:
    name = os.path.relpath(tmp_path / "run", ROOT / "runs")
    environ = {**os.environ, **LIGHT, "PYTHON": sys.executable, "RUN_NAME": name}
    environ |= {"LSGD_KEYS": str(tmp_path / "keys"), "NUM_WORKERS": "1", "OMP_NUM_THREADS": "1"}
    environ["LSGD_ITERATIONS"] = "50"
    script = ["bash", ROOT / "scripts/two_nodes.sh", "--rate-mbit", "100", "--delay-ms", "5"]
    done = subprocess.run(
        script, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "run" / "node0" / "result.json").read_text())
    assert (len(result["members"]), result["nodes"], result["count"]) == (2, 2, 50)
