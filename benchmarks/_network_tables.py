"""The tables of benchmarks/network.py, made from its results."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._about import table
from benchmarks.methods import ALL, PEERS
from benchmarks.workloads import LAYERS

BASELINE = "ddp"
BEST, DELAYED = "leader-8bit", "leader-8bit-delay"
Rows = Sequence[Mapping[str, Any]]


def step_table(rows: Rows) -> str:
    """Return a table for each number of nodes and each wire, and one of the best of each against the best of peers."""
    places = by_place(rows).items()
    texts = [f"**{nodes} nodes, {link}**\n\n{place_table(here)}" for (nodes, link), here in places]
    return "\n\n".join(filter(None, [*texts, fastest_peers(rows)]))


def by_place(rows: Rows) -> Mapping[tuple[int, str], Rows]:
    """Return the runs by number of nodes and wire, all numbers of one wire together."""
    found: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["link"], row["nodes"])):
        found[row["nodes"], row["link"]].append(row)
    return found


def place_table(here: Rows) -> str:
    """Return the table of one number of nodes and one wire, of its runs."""
    columns = (
        "method",
        "ms a step",
        "over DDP",
        "MB a step",
        "bytes / needed",
        "compute",
        "wait",
        "exchange",
    )
    methods = sorted({row["method"] for row in here}, key=ALL.index)
    return table(columns, [_step_line(method, here) for method in methods])


def fastest_peers(rows: Rows) -> str:
    """Return a table of Leader SGD in 8 bits beside the peer with the shortest step, for each place that has both."""
    columns = ("wire", "nodes", "fastest peer", "its ms", BEST, "times as fast", DELAYED, "times as fast")
    lines = []
    for (nodes, link), here in by_place(rows).items():
        step_s: dict[str, list[float]] = {}
        for row in here:
            step_s.setdefault(row["method"], []).append(row["step_s"])
        ms = {method: statistics.median(found) * 1e3 for method, found in step_s.items()}
        peers = [method for method in PEERS if method in ms]
        if peers and BEST in ms:
            fastest = min(peers, key=lambda method: ms[method])
            line = [link, str(nodes), fastest, f"{ms[fastest]:.1f}"]
            for method in (BEST, DELAYED):
                line += [f"{ms[method]:.1f}", f"{ms[fastest] / ms[method]:.2f}"] if method in ms else ["", ""]
            lines.append(line)
    return table(columns, lines) if lines else ""


def _step_line(method: str, rows: Rows) -> Sequence[str]:
    runs = [row for row in rows if row["method"] == method]
    step_s, sent = _median(runs, "step_s"), _median(runs, "sent_nbytes")
    compute, wait = _median(runs, "compute_s") / step_s, _median(runs, "wait_s") / step_s
    needed = runs[0]["needed_nbytes"]
    baselines = {row["repeat"]: row["step_s"] for row in rows if row["method"] == BASELINE}
    ratios = [baselines[run["repeat"]] / run["step_s"] for run in runs if run["repeat"] in baselines]
    return (
        method,
        f"{step_s * 1e3:.1f}",
        f"{statistics.median(ratios):.2f}" if ratios else "",
        f"{sent / 1e6:.3f}",
        f"{sent / needed:.3f}" if needed else "",
        f"{min(1.0, compute):.0%}",
        f"{wait:.1%}",
        f"{max(0.0, 1 - compute - wait):.0%}",
    )


COMPLEXITY: Mapping[str, tuple[str, str]] = {
    "ring all-reduce": ("2(n - 1)", "4(n - 1)/n P"),
    "two-round all-reduce": ("2", "4(n - 1)/n P"),
    "parameter server": ("2", "2n P"),
    "decentralized": ("1", "2P, with one peer; 4P in a ring"),
    "broadcast": ("1 to log n", "(n - 1) P at most"),
}
"""Messages that follow one another, and the bytes that the busiest node sends and receives, for a model of P bytes."""

PATTERN: Mapping[str, str] = {
    "ddp": "ring all-reduce",
    "allreduce": "ring all-reduce",
    "bytegrad": "two-round all-reduce",
    "decentralized": "decentralized",
    "low_precision_decentralized": "decentralized",
    "leader": "broadcast",
}


def latency_table(rows: Rows, links: Mapping[str, tuple[float | None, float]]) -> str:
    """Return the messages in sequence and the busiest node's load against the number of nodes, and the theory's."""
    columns = (
        "method",
        "pattern",
        "nodes",
        "messages in sequence",
        "asking",
        "busiest node: packets",
        "bytes / P",
    )
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        for nodes in sorted({row["nodes"] for row in rows}):
            runs = [row for row in rows if (row["method"], row["nodes"]) == (method, nodes)]
            if runs:
                lines.append((method, PATTERN.get(method, ""), str(nodes), *_latencies(runs, links)))
    theory = [(pattern, *formulas) for pattern, formulas in COMPLEXITY.items()]
    measured = table(columns, lines)
    return f"{measured}\n\n{table(('pattern', 'messages in sequence', 'bytes of the busiest node'), theory)}"


def _latencies(runs: Rows, links: Mapping[str, tuple[float | None, float]]) -> Sequence[str]:
    delay_s = links[runs[0]["link"]][1] / 1e3
    waits = _median(runs, "wait_s")
    exchange_s = _median(runs, "step_s") - _median(runs, "compute_s") - waits
    model_nbytes = 4 * 16**2 * LAYERS
    return (
        f"{exchange_s / delay_s:.1f}",
        f"{waits / delay_s:.1f}",
        f"{_median(runs, 'busiest_packets'):.0f}",
        f"{_median(runs, 'busiest_nbytes') / model_nbytes:.2f}",
    )


def _median(runs: Rows, name: str) -> float:
    return statistics.median(run[name] for run in runs)
