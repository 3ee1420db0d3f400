"""Plain scripts that torchrun starts below servers that run: each process is a worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lsgd.server.reasons import Why
from tests import golden

from ..speed import scaled
from .running import FORKS, LIGHT

PLAIN = Path(__file__).parent / "workers" / "train.py"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_each_process_of_torchrun_is_a_worker(cluster) -> None:
    server, _ = cluster.start("--workers", "2", "--iterations", "40", "--period", "4")
    environ = {**os.environ, "LSGD_LOCAL": cluster.local_address(0), "LSGD_RUN_DIR": str(cluster.folder)}
    done = FORKS.popen([*COMMAND, str(PLAIN)], env=environ)
    output, _ = done.communicate(scaled(90))
    assert done.returncode == 0, output
    assert f"{Why.ALL_MADE(limit=40)}; 40 iterations" in server.succeeds()
    workers = [cluster.result(0, i) for i in range(2)]  # node0/worker0 and node0/worker1, by LOCAL_RANK
    assert workers[0]["rank"] != workers[1]["rank"]


@pytest.mark.slow
def test_without_servers_torchrun_shows_what_to_type(tmp_path) -> None:
    environ = {
        **os.environ,
        **LIGHT,
        "LSGD_LOCAL": f"ipc://{tmp_path}/none",
        "LOCAL_RANK": "1",
        "LSGD_RUN_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, str(PLAIN)], env=environ, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1
    assert re.search(golden.pattern("joining.command"), done.stderr)
