"""The bytes that each algorithm sends, counted on the interface of each node, against the formula."""

import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from lsgd.plan.plan import algorithm_of
from lsgd.settings import AlgorithmSettings

from .running import SCRIPTS
from .test_two_nodes import ROOT, finish, start

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

COUNTS = {"PYTHONPATH": str(ROOT)}
"""The workers count as benchmarks do."""

WORKERS = 3  # an odd number: a bye in pairs, two neighbors in a ring
ROWS = 1000  # of the model, of 1001 parameters each
ROWS_ON_ISLANDS = 500
ROUNDS = 4  # of each algorithm; a multiple of three after the first, so that each has had its bye as often

ALGORITHMS: list[dict[str, Any]] = [
    {"name": "allreduce"},
    {"name": "bytegrad"},
    {"name": "qsgd", "bucket_mib": 2.0},
    {"name": "decentralized"},
    {"name": "decentralized", "peers": "all", "hierarchical": False},
    {"name": "low_precision_decentralized"},
    {"name": "leader", "period": 2, "local_period": 2},
    {"name": "leader", "period": 2, "local_period": 2, "compression": "minmax8"},
    {"name": "elastic", "period": 2},
    {"name": "local", "period": 2},
    {"name": "diloco", "period": 2, "compression": "minmax8"},
    {"name": "local", "period": 2, "compression": "levels2", "fragments": 2},
]
ON_ISLANDS: list[dict[str, Any]] = [
    {"name": "local", "period": 2, "compression": "none"},
    {"name": "leader", "period": 2, "local_period": 2, "compression": "minmax8"},
    {"name": "diloco", "period": 2, "compression": "minmax8", "fragments": 1},
]


def plan(algorithms: list[dict[str, Any]], workers: int) -> str:
    """Return a plan in which the algorithms follow one another."""
    lines, total = [], 0
    for table in algorithms:
        iterations = ROUNDS * workers * algorithm_of(table, "the test").schedule().period
        lines += ["[[phase]]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
        lines += [f"iterations = {iterations}"]
        total += iterations
    lines.pop()  # the last phase has no iterations of its own
    return "\n".join([f"iterations = {total}", *lines])


def check(folder: Path, algorithms: list[dict[str, Any]], workers: int, rows: int) -> None:
    """Compare what was sent in each phase with the formula."""
    members = [sent_by_phase(folder / f"sent{rank}") for rank in range(workers)]
    assert [settings.name for settings, _ in members[0]] == [table["name"] for table in algorithms]
    for phases in zip(*members, strict=True):
        algorithm = phases[0][0]
        iterations = (ROUNDS - 1) * algorithm.schedule().period
        formula = workers * iterations * algorithm.sent_nbytes(1001 * rows, workers)
        ratio = sum(nbytes for _, nbytes in phases) / formula
        assert 1.0 < ratio < 1.1, f"{algorithm}: {ratio:.3f} of the formula's bytes"


def sent_by_phase(path: Path) -> list[tuple[AlgorithmSettings, int]]:
    """Return the settings of each phase, and what was sent after its first step, which begins it."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    phases = [(table, [nbytes for _, nbytes in steps]) for table, steps in groupby(notes, lambda note: note[0])]
    return [(algorithm_of(table, "a note"), nbytes[-1] - nbytes[0]) for table, nbytes in phases]


@pytest.mark.slow
def test_the_bytes_on_the_interface_are_those_of_the_formula(tmp_path: Path) -> None:
    """With the headers of every packet, and all that the servers say, which is more the longer it takes."""
    (tmp_path / "plan.toml").write_text(plan(ALGORITHMS, WORKERS))
    command = (str(SCRIPTS / "sent_bytes.py"), str(tmp_path), str(ROWS))
    with Testbed(WORKERS, rate_mbit=4000) as testbed:
        settings = {"NUM_GROUPS": str(WORKERS), "NUM_WORKERS": "1", "PLAN": str(tmp_path / "plan.toml"), **COUNTS}
        finish([start(host, tmp_path, *command, **settings) for host in testbed.hosts])
    check(tmp_path, ALGORITHMS, WORKERS, ROWS)


@pytest.mark.slow
def test_islands_send_each_part_of_the_model_once_over_their_link(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(plan(ON_ISLANDS, 2))
    command = [str(SCRIPTS / "sent_bytes.py"), str(tmp_path), str(ROWS_ON_ISLANDS)]
    with Testbed(2, rate_mbit=100) as testbed:
        settings = {"NUM_WORKERS": "1", "PLAN": str(tmp_path / "plan.toml"), **COUNTS}
        options = ["--processes-per-worker", "2"]
        finish([start(host, tmp_path, *command, options=options, **settings) for host in testbed.hosts])
    check(tmp_path, ON_ISLANDS, 2, ROWS_ON_ISLANDS)
    for rank in (0, 1):
        one, other = (int((tmp_path / f"own{rank}.{process}").read_text()) for process in (0, 1))
        assert one == pytest.approx(other, rel=0.02)
