"""The plan of a measurement, and what its workers' notes say."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.report.tables import table
from lsgd.plan.plan import Phase, Plan, algorithm_of
from lsgd.plan.run import RunSettings
from lsgd.settings import AlgorithmSettings

WORKERS = 2
COLUMNS = ("", "kept", "peak", "with `offload`: on the GPU", "kept in the CPU's memory", "peak there")
ITERATIONS = 8
"""Of a worker with each algorithm."""

SMALL_NUMEL = 50_000
"""Of a model whose memory is what everything else takes: it is subtracted."""

CASES: Mapping[str, Mapping[str, Any]] = {
    "`leader`": {"name": "leader", "period": 1, "local_period": 1},
    "`leader`, local rounds too": {"name": "leader", "period": 2, "local_period": 1},
    "`leader`, `minmax8`": {"name": "leader", "period": 1, "local_period": 1, "compression": "minmax8"},
    "`local`": {"name": "local", "period": 1, "delay": 0},
    "`local`, 4 fragments": {"name": "local", "period": 4, "fragments": 4, "delay": 0},
    "`diloco`": {"name": "diloco", "period": 1, "delay": 0},
    "`sparse`": {"name": "sparse", "period": 1, "delay": 0},
    "`elastic`": {"name": "elastic", "period": 1},
    "`decentralized`": {"name": "decentralized"},
    "`low_precision_decentralized`": {"name": "low_precision_decentralized"},
    "`allreduce`": {"name": "allreduce"},
    "`bytegrad`, `qsgd`": {"name": "bytegrad"},
    "the same, `error_feedback`": {"name": "bytegrad", "error_feedback": True},
}


@dataclass(frozen=True)
class Memory:
    """Bytes per parameter beside model, gradients and optimizer: between two rounds, and at most during one."""

    kept: float
    peak: float


def settings_of(*, offload: bool) -> dict[str, AlgorithmSettings]:
    """Return the cases that can be measured, by their names."""
    made = {name: algorithm_of(table, name) for name, table in CASES.items()}
    return {name: each for name, each in made.items() if not (offload and each.schedule().identical)}


def plan(*, offload: bool) -> Plan:
    """Return a plan in which all cases follow one another."""
    settings = list(settings_of(offload=offload).values())
    each = WORKERS * ITERATIONS
    phases = [Phase(one, each) for one in settings[:-1]] + [Phase(settings[-1])]
    return Plan(
        RunSettings(workers=WORKERS, nodes=WORKERS, iterations=each * len(settings), offload=offload), (*phases,)
    )


def measure(numel: int, train: Callable[[Plan, int, Path], None], folder: Path, *, offload: bool) -> dict[str, Memory]:
    """Return what each case takes.

    Args:
        numel: parameters of the model.
        train: trains a model of so many parameters by a plan; its workers write their notes to a file of this name.
        folder: for the notes.
        offload: the setting of that name.
    """
    notes = []
    for size in (SMALL_NUMEL, numel):
        file = folder / f"{size}-{offload}"
        train(plan(offload=offload), size, file)
        notes.append(read(file, settings_of(offload=offload)))
    small, large = notes

    def per_parameter(name: str, index: int) -> float:
        return (large[name][index] - small[name][index]) / (numel - SMALL_NUMEL)

    return {name: Memory(per_parameter(name, 0), per_parameter(name, 1)) for name in large}


def read(file: Path, cases: Mapping[str, AlgorithmSettings]) -> dict[str, tuple[int, int]]:
    """Return the bytes of each case: the least that was resident between iterations, and the most that three reached.

    Of the worker that has more; one that was slower in a phase may have made hardly any of its iterations. The first
    two lines of a phase are not counted: they have what the phase before has left, such as the gradients in its
    buffers until the first backward pass.
    """
    names = {settings: name for name, settings in cases.items()}
    found: dict[str, tuple[int, int]] = {}
    for rank in range(WORKERS):
        lines = [json.loads(line) for line in file.with_suffix(f".{rank}").read_text().splitlines()]
        for noted, group in groupby(lines, lambda line: line[0]):
            each = list(group)
            if len(each) < ITERATIONS:
                continue
            name = names[algorithm_of(noted, "a note")]
            kept = min(now for _, now, _ in each[2:])
            *_, peak, _, _ = sorted(peak for _, _, peak in each[2:])  # one or two may be chance
            before = found.get(name, (kept, peak))
            found[name] = max(kept, before[0]), max(peak, before[1])
    assert found.keys() == cases.keys(), "one worker makes at least half of the iterations of a phase"
    return found


def memory_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of results, each with its ``case``, ``offload``, and what was ``kept`` and the ``peak``."""
    offloaded = {row["case"]: row for row in results if row["offload"]}
    rows = []
    for row in results:
        if not row["offload"]:
            other = offloaded.get(row["case"])
            cells = ["0", f"{other['kept']:.1f}", f"{other['peak']:.1f}"] if other else ["refused", "", ""]
            rows.append([row["case"], f"{row['kept']:.1f}", f"{row['peak']:.1f}", *cells])
    return table(COLUMNS, rows)
