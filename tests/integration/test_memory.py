"""The table of memory in docs/guides/algorithms.md, against what the processes of real workers hold."""

import re
import sys
from pathlib import Path

import pytest

import benchmarks.memory.worker
from benchmarks.memory.measure import CASES, WORKERS, Memory, measure
from lsgd.plan.plan import Plan

from ..speed import scaled
from .running import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "algorithms.md"
SCRIPT = Path(benchmarks.memory.worker.__file__).with_suffix("")
NUMEL = 3_000_000
TOLERANCE = 2.5
"""Bytes per parameter, less than one more copy: some MB are buffers of sockets, and of the few buckets of gradients
that are under way. A large model has no more of them."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of resident memory"),
]


def table() -> dict[str, list[str]]:
    """Return the cells of each row of the table, by its first one."""
    section = PAGE.read_text().partition("\n## Memory\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    return {row[0]: row[1:] for row in rows[2:]}


def train(plan: Plan, numel: int, notes: Path) -> None:
    folder = notes.with_suffix(".run")
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        path = folder / "plan.toml"
        path.write_text(plan.to_toml())
        cluster.start("--plan", str(path), nodes=WORKERS)
        workers = [cluster.worker(str(SCRIPT), node, 0, numel, notes) for node in range(WORKERS)]
        for worker in workers:
            worker.succeeds(scaled(180))
    finally:
        cluster.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("offload", [False, True])
def test_the_table_has_what_is_resident(tmp_path: Path, offload: bool) -> None:
    rows = table()
    assert list(rows) == list(CASES)
    columns = slice(3, 5) if offload else slice(0, 2)
    said = {name: Memory(*map(float, row[columns])) for name, row in rows.items() if not offload or row[2] == "0"}
    measured = measure(NUMEL, train, tmp_path, offload=offload)
    assert measured.keys() == said.keys()
    for name, one in measured.items():
        assert (one.kept, one.peak) == pytest.approx((said[name].kept, said[name].peak), abs=TOLERANCE), name
