"""The bytes that each algorithm sends, counted on the interface of each node, against the formula."""

import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import Testbed
from lsgd.plan.plan import algorithm_of
from lsgd.settings import AlgorithmSettings

from .running import LIGHT, SCRIPTS
from .test_two_nodes import ROOT, finish, start

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

WORKERS = 3  # an odd number: a bye in pairs, two neighbors in a ring
NUMEL = 1000 * 2000 + 2000
ROUNDS = 7  # of each algorithm; a multiple of three after the first, so that each has had its bye as often

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


def plan() -> str:
    """Return a plan in which the algorithms follow one another."""
    lines = []
    for table in ALGORITHMS:
        iterations = ROUNDS * WORKERS * algorithm_of(table, "the test").schedule().period
        lines += ["[[phase]]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
        lines += [f"iterations = {iterations}"]
    lines.pop()  # the last phase has no iterations of its own
    return "\n".join([f"iterations = {total_iterations()}", *lines])


def total_iterations() -> int:
    periods = [algorithm_of(table, "the test").schedule().period for table in ALGORITHMS]
    return ROUNDS * WORKERS * sum(periods)


def sent_by_phase(path: Path) -> list[tuple[AlgorithmSettings, int]]:
    """Return the settings of each phase, and what was sent after its first step, which begins it."""
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    phases = [(table, [nbytes for _, nbytes in steps]) for table, steps in groupby(notes, lambda note: note[0])]
    return [(algorithm_of(table, "a note"), nbytes[-1] - nbytes[0]) for table, nbytes in phases]


@pytest.mark.slow
def test_the_bytes_on_the_interface_are_those_of_the_formula(tmp_path: Path) -> None:
    """With the headers of every packet, and all that the servers say, which is more the longer it takes."""
    (tmp_path / "plan.toml").write_text(plan())
    command = ("--", sys.executable, str(SCRIPTS / "sent_bytes.py"), str(tmp_path))
    with Testbed(WORKERS, rate_mbit=4000) as testbed:
        settings = {"NUM_GROUPS": str(WORKERS), "NUM_WORKERS": "1", "PLAN": str(tmp_path / "plan.toml")}
        settings["PYTHONPATH"] = os.pathsep.join([LIGHT["PYTHONPATH"], str(ROOT)])  # it counts as benchmarks do
        finish([start(host, tmp_path, *command, **settings) for host in testbed.hosts])
    members = [sent_by_phase(tmp_path / f"sent{rank}") for rank in range(WORKERS)]
    assert [settings.name for settings, _ in members[0]] == [table["name"] for table in ALGORITHMS]
    for phases in zip(*members, strict=True):
        algorithm = phases[0][0]
        iterations = (ROUNDS - 1) * algorithm.schedule().period
        formula = WORKERS * iterations * algorithm.sent_nbytes(NUMEL, WORKERS)
        ratio = sum(nbytes for _, nbytes in phases) / formula
        assert 1.0 < ratio < 1.1, f"{algorithm}: {ratio:.3f} of the formula's bytes"
