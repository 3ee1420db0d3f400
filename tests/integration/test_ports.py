"""Scripts of common shapes and their ports by docs/start/from-ddp.md: few lines, and as good as before."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lsgd.protocol.messages import StopRun
from scripts.docs.ports import ALL, PAGE, changes, row, source

from .running import Cluster, Process, free_port, until
from .test_transformers import TrainerCluster

MOST_LINES = {"flat": 7, "classes": 7, "accelerated": 9, "reference": 9, "clm": 5, "machine": 7}
SHAPES = ["flat", "classes", "accelerated", "reference"]


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_port_takes_few_lines_and_indents_none_again(name) -> None:
    added, removed = changes(name)
    assert added <= MOST_LINES[name] and removed <= 2
    kept = set(source(name, port=False).splitlines())
    assert sum(line not in kept for line in source(name, port=True).splitlines()) <= MOST_LINES[name]


def test_the_page_has_these_ports_and_their_lines() -> None:
    """``python -m scripts.docs.ports`` writes the table."""
    assert ALL.keys() == MOST_LINES.keys()
    page = PAGE.read_text(encoding="utf-8")
    assert all(row(name) in page for name in ALL)


def variables(size: int = 1) -> dict[str, str]:
    """Return those that torchrun gives the first process of a group."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return alone | {"MASTER_PORT": str(free_port())}


def arguments(name: str, folder: Path, workers: int) -> list[str]:
    """Return the arguments for equally many steps of each worker: an epoch of a shard is shorter than one of all."""
    folder.mkdir()
    return [f"out_dir={folder}"] if name == "flat" else [str(folder), str(3 * workers)]


def final(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "final.json").read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_a_port_trains_as_the_script_does(cluster: Cluster, tmp_path: Path, name: str) -> None:
    cluster.start("--workers", "2", "--algorithm", "local", "--period", "4")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    own = variables() if name == "classes" else {}
    before = cluster.worker(f"../ports/{name}", 0, 0, *arguments(name, alone, 1), **own)
    given = arguments(name, shared, 2)
    workers = [
        cluster.worker(f"../ports/{name}_lsgd", 0, i, *given, LSGD_RANK=str(i), **(own and variables()))
        for i in range(2)
    ]
    outputs = [process.succeeds() for process in (before, *workers)][1:]
    was, now = final(alone), final(shared)
    print(name, "alone", was, "with two workers", now)
    assert now["val"] < was["val"] * 1.1 + 0.01
    assert not any("cover" in output for output in outputs), "schedules are as long as the loops"
    assert "all workers" in cluster.processes[0].succeeds()


def machine(cluster: Cluster, name: str, node: int, folder: Path, epochs: int) -> list[Process]:
    """Start the processes of a machine."""
    folder.mkdir()
    given = variables(2)
    return [
        cluster.worker(f"../ports/{name}", node, 0, folder, epochs, **given | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_a_port_reaches_its_last_lines_when_the_run_is_stopped(cluster: Cluster, tmp_path: Path, name: str) -> None:
    cluster.start("--workers", "1", "--algorithm", "local", "--period", "4")
    given = [f"out_dir={tmp_path}", "max_iters=1000000"] if name == "flat" else [str(tmp_path), "1000000"]
    own = variables() if name == "classes" else {}
    worker = cluster.worker(f"../ports/{name}_lsgd", 0, 0, *given, **own)
    until(lambda: cluster.status()["count"] > 20, "it trains")
    cluster.ask(StopRun("enough"))
    worker.succeeds()
    (made,) = re.findall(r"stops after (\d+) iterations", worker.output)
    assert final(tmp_path).get("steps", int(made)) == int(made) < 1_000_000


@pytest.mark.slow
def test_a_port_with_a_trainer_trains_as_the_script_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'lsgd[transformers]'")
    cluster = TrainerCluster(tmp_path)
    try:
        cluster.start("--workers", "2", "--algorithm", "local", "--period", "4", "--iterations", "204")
        before = cluster.worker("../ports/clm", 0, 0, tmp_path / "alone", 3)
        workers = [cluster.worker("../ports/clm_lsgd", 0, i, tmp_path / "shared", 3) for i in range(2)]
        outputs = [process.succeeds() for process in (before, *workers)]
        steps = re.findall(r"stops after (\d+) iterations", "".join(outputs))
        print("alone", was := final(tmp_path / "alone"), "with two workers", now := final(tmp_path / "shared"), steps)
        assert now["val"] < was["val"] * 1.1
    finally:
        cluster.close()


@pytest.mark.slow
def test_a_port_with_ddp_in_the_machines_trains_as_the_script_does(cluster: Cluster, tmp_path: Path) -> None:
    server, _ = cluster.start("--workers", "2", "--algorithm", "local", "--period", "4", nodes=2)
    before = machine(cluster, "machine", 0, tmp_path / "alone", 2)
    islands = [machine(cluster, "machine_lsgd", node, tmp_path / str(node), 4) for node in (0, 1)]
    outputs = [process.succeeds() for process in (*before, *islands[0], *islands[1])]
    was, one, other = (final(tmp_path / name) for name in ("alone", "0", "1"))
    print("alone", was, "with two machines", one)
    assert one["val"] == other["val"], "all processes test the same consensus"
    assert one["val"] < was["val"] * 1.1 + 0.01
    models = [torch.load(tmp_path / name / "model.pt") for name in ("0", "1")]
    assert all(torch.equal(x, models[1][name]) for name, x in models[0].items() if x.is_floating_point())
    assert "different models" not in "".join(outputs)
    assert "all workers" in server.succeeds()
