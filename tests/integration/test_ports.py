"""Scripts of common shapes and their ports by docs/start/from-ddp.md: few lines, and as good as before."""

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

from .running import Cluster, free_port

PORTS = Path(__file__).parent / "ports"
MOST_LINES = 5
SHAPES = ["flat", "classes", "accelerated"]


def changes(name: str) -> tuple[int, int]:
    """Return how many lines a port adds and removes, white space aside."""
    before, after = ([line.strip() for line in _source(name, port).splitlines()] for port in (False, True))
    lines = [line for line in difflib.ndiff([x for x in before if x], [x for x in after if x]) if line[2:].strip()]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def _source(name: str, port: bool) -> str:
    return (PORTS / f"{name}{'_lsgd' if port else ''}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHAPES)
def test_a_port_takes_few_lines_and_indents_none_again(name) -> None:
    added, removed = changes(name)
    assert added <= MOST_LINES and removed <= 1
    kept = set(_source(name, False).splitlines())
    assert sum(line not in kept for line in _source(name, True).splitlines()) <= MOST_LINES


def variables() -> dict[str, str]:
    """Return those that torchrun gives the only process of a group."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
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
