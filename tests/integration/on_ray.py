"""Trains on a real Ray cluster of two nodes on this machine; the tests look at what is left.

Each run has a folder, in which worker R writes its name, place and process to ``starts-R`` when it joins, and a digest
of its model to ``ends-R``.
"""

import hashlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import lsgd
from lsgd.errors import LsgdError
from lsgd.integrations import ray as on_ray

EXAMPLES = Path(__file__).parents[2] / "examples"


def train(config):
    """Train until the end, and meet the event of this run on the way; until a node is dead, the run has no end."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    torch.manual_seed(rank)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    endless = config["event"] == "shrinks" and not (folder / "node").exists()
    worker = lsgd.wrap(model, optimizer, steps=10**6 if endless else 400)
    with (folder / f"starts-{rank}").open("a") as file:
        file.write(json.dumps({"name": worker.name, "step": worker.step, "process": os.getpid()}) + "\n")
    refused(folder / "early", lambda: on_ray.report(worker, {}))
    while worker.step < worker.steps and not worker.stopped:
        EVENTS[config["event"]](rank, worker.step, folder)
        x = torch.randn(16, 8)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worker.report(loss)
    finished = worker.finish()
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    (folder / f"ends-{rank}").write_text(digest)
    if config["event"] == "kills" and rank == 1 and once(folder, "late"):
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint = Checkpoint.from_directory(folder / "saved") if worker.first else None
    on_ray.report(worker, {"consensus": finished, "workers": worker.world_size}, checkpoint)


def once(folder, name):
    """Return whether this is the first call of this name."""
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def refused(path, call):
    """Write down what lsgd says of a mistake."""
    with pytest.raises(LsgdError) as error:
        call()
    path.write_text(str(error.value))


def kill_worker_and_server(rank, step, folder):
    """Kill rank 1; then kill from rank 0 the global server, and hold its loop until the other one is back.

    After the end rank 1 is killed again, before its report.
    """
    if rank == 1 and step == 100 and once(folder, "worker"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and (folder / "worker").exists() and once(folder, "server"):
        ray.kill(on_ray._main, no_restart=False)
        while len((folder / "starts-1").read_text().splitlines()) < 2:
            time.sleep(0.1)


def kill_node(rank, step, folder):
    """Kill the Ray node that is not the driver's, and the worker on it."""
    away = ray.get_runtime_context().get_node_id() != (folder / "head").read_text()
    if away and step == 100 and once(folder, "node"):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


EVENTS = {"kills": kill_worker_and_server, "shrinks": kill_node}


def fit(out, name, num_workers, elastic):
    """Train with the event of this name, and write down how it ended."""
    folder = out / name
    (folder / "saved").mkdir(parents=True)
    (folder / "saved" / "model").write_text("of the first worker")
    (folder / "head").write_text(ray.get_runtime_context().get_node_id())
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "event": name},
        torch_config=on_ray.LsgdConfig(period=8, checkpoint_every_s=1, elastic=elastic),
        scaling_config=ScalingConfig(num_workers=num_workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name, storage_path=str(out / "results"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    saved = Path(result.checkpoint.path, "model").read_text()
    (folder / "result.json").write_text(json.dumps({"metrics": result.metrics, "saved": saved}))


def main(out):
    """Train the example, a run with killed processes, and one that loses a node."""
    os.chdir(out)
    refused(out / "setting", lambda: on_ray.LsgdConfig(perod=8))
    sys.argv = ["ray_trainer.py"]
    with tempfile.TemporaryDirectory(prefix="ray") as files:
        os.environ["RAY_TMPDIR"] = files  # a folder given to the nodes alone leaves the default one missing
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        runpy.run_path(str(EXAMPLES / "ray_trainer.py"), run_name="__main__")
        fit(out, "kills", num_workers=2, elastic=False)
        fit(out, "shrinks", num_workers=(1, 2), elastic=True)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
