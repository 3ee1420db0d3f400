"""deploy/slurm/lsgd.sbatch in a real Slurm: slurmctld, and two nodes of this machine."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import golden

from ..integration.running import LIGHT, SCRIPTS, until
from ..needs import needs
from ..speed import scaled
from .slurm import Slurm

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "deploy" / "slurm" / "lsgd.sbatch"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
    needs("munge"),
    needs("slurm-wlm"),
]
WAITS_AT = 150
"""The iteration that a worker waits in until the test says so: after two rounds, when it has checkpoints."""
ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


def address() -> str:
    """Return this machine's address on the network, for which keys are needed; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Job:
    """A small regression that waits in the middle, submitted with the batch file to both nodes."""

    def __init__(self, slurm: Slurm, folder: Path, iterations: int, *options: str) -> None:
        self.slurm = slurm
        self.may_continue = folder / "may-continue"
        variables = {
            **LIGHT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{LIGHT['PYTHONPATH']}",
            "LSGD_KEYS": str(folder / "keys"),
            "LSGD_ITERATIONS": str(iterations),
            "LSGD_CHECKPOINT_EVERY": "2",
            "IP_ADDR": address(),  # the names of the nodes are no hosts
            "NUM_WORKERS": "1",
            "OMP_NUM_THREADS": "1",
        }
        script = [str(SCRIPTS / "crash.py"), "--stall-at", str(WAITS_AT), "--until", str(self.may_continue)]
        self.number = slurm.submit(folder, variables, *options, BATCH, sys.executable, *script)
        self.output = folder / f"lsgd-{self.number}.out"
        self.run_dir = folder / "runs" / f"slurm-{self.number}"

    @property
    def state(self) -> str:
        return self.slurm.job(self.number).get("JobState", "")

    @property
    def says(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("again", [("scontrol", "requeue"), ("scancel", "--batch", "--signal=USR1")])
def test_a_job_that_is_started_again_continues_from_its_checkpoints(
    slurm: Slurm, tmp_path: Path, again: tuple[str, ...]
) -> None:
    """As when the job is preempted: SIGTERM to all processes; and as before its time limit: SIGUSR1 to the script."""
    job = Job(slurm, tmp_path, 480)

    def saved() -> set[str]:
        assert job.state not in ("FAILED", "COMPLETED", "TIMEOUT", "CANCELLED"), job.says
        return {path.name[: len("node0")] for path in job.run_dir.glob("checkpoints/*/*/node*")}

    until(lambda: saved() == {"node0", "node1"}, "both nodes have checkpoints", scaled(150))
    slurm.ask(*again, job.number)
    until(lambda: golden.text("launch.stopping_by_sigterm") in job.says, "the job is told to stop")
    job.may_continue.touch()
    until(lambda: job.state in ENDS, "the job ends", scaled(200))
    assert job.state == "COMPLETED", job.says
    before, after = job.says.split("[launch] resumes from the checkpoints in", 1)
    assert golden.text("launch.sigterm") in before, job.says  # and no second signal
    assert "LSGD_TOKEN=" not in job.says
    result = json.loads((job.run_dir / "result.json").read_text())
    assert (result["state"], result["count"]) == ("finished", 480)
    assert (result["nodes"], len(result["members"])) == (2, 2)
    rounds = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert next(one["count"] for one in rounds if one["run"] == result["run"]) > 0, after  # not from the beginning
    assert slurm.job(job.number)["Restarts"] == "1"
