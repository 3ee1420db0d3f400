"""The tables of benchmarks/network, made from its results."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.methods import ALL, BASELINES
from benchmarks.report.tables import number, table
from benchmarks.workloads import LAYERS

REFERENCE = "ddp"
BEST, DELAYED = "leader-8bit", "leader-8bit-delay"
COLUMNS = ("method", "ms a step", "over DDP", "MB a step", "bytes / needed", "compute", "wait", "exchange")
Rows = Sequence[Mapping[str, Any]]


def step_table(rows: Rows) -> str:
    """Return a table for each number of nodes and each link, and one of ours beside the fastest baselines."""
    places = sorted({(row["link"], row["nodes"]) for row in rows})
    texts = [f"**{nodes} nodes, {link}**\n\n{place_table(rows, nodes, link)}" for link, nodes in places]
    return "\n\n".join(filter(None, [*texts, fastest_baselines(rows)]))


def place_table(rows: Rows, nodes: int, link: str) -> str:
    """Return the table of the runs on so many nodes and one link."""
    here = [row for row in rows if (row["nodes"], row["link"]) == (nodes, link)]
    if not here:
        return table(COLUMNS, [])
    runs = pd.DataFrame(here)
    step_s = runs.pivot(index="repeat", columns="method", values="step_s")
    found = runs.groupby("method").median(numeric_only=True)
    found["over"] = step_s.rdiv(step_s.get(REFERENCE, float("nan")), axis=0).median()  # within a turn
    shown = found.reindex([method for method in ALL if method in found.index]).reset_index()
    return table(COLUMNS, [_line(one) for one in shown.to_dict("records")])


def fastest_baselines(rows: Rows) -> str:
    """Return a table of Leader SGD in 8 bits beside the baseline with the shortest step, of places that have both."""
    columns = ("link", "nodes", "fastest baseline", "its ms", BEST, "times as fast", DELAYED, "times as fast")
    lines = []
    medians = pd.DataFrame(rows).groupby(["link", "nodes", "method"])["step_s"].median().unstack() * 1e3
    medians = medians.reindex(columns=[*BASELINES, BEST, DELAYED])
    for place, ms in medians.iterrows():
        assert isinstance(place, tuple)
        baselines = ms[list(BASELINES)].dropna()
        if len(baselines) and ms[BEST] == ms[BEST]:
            line = [*map(str, place), str(baselines.idxmin()), f"{baselines.min():.1f}"]
            for method in (BEST, DELAYED):
                line += [number(ms[method], ".1f"), number(baselines.min() / ms[method], ".2f")]
            lines.append(line)
    return table(columns, lines) if lines else ""


def _line(found: Mapping[Any, Any]) -> Sequence[str]:
    """Return the cells of a method with these medians."""
    compute, wait = found["compute_s"] / found["step_s"], found["wait_s"] / found["step_s"]
    needed = found["needed_nbytes"]
    return (
        found["method"],
        f"{found['step_s'] * 1e3:.1f}",
        number(found["over"], ".2f"),
        f"{found['sent_nbytes'] / 1e6:.3f}",
        f"{found['sent_nbytes'] / needed:.3f}" if needed else "",
        f"{min(1.0, compute):.0%}",
        f"{wait:.1%}",
        f"{max(0.0, 1 - compute - wait):.0%}",
    )


PATTERN: Mapping[str, str] = {
    "ddp": "ring all-reduce",
    "allreduce": "all-reduce, each to each",
    "bytegrad": "two-round all-reduce",
    "decentralized": "decentralized",
    "low_precision_decentralized": "decentralized",
    "leader": "broadcast",
}


def latency_table(rows: Rows, links: Mapping[str, tuple[float | None, float]]) -> str:
    """Return the messages in sequence and the busiest node's load against the number of nodes."""
    columns = (
        *("method", "pattern", "nodes", "messages in sequence", "asking", "busiest node: packets"),
        "bytes / P",
    )
    runs = pd.DataFrame(rows)
    runs["delay_s"] = [links[link][1] / 1e3 for link in runs["link"]]
    found = runs.groupby(["method", "nodes"]).median(numeric_only=True)
    exchange_s = found["step_s"] - found["compute_s"] - found["wait_s"]
    found["messages"], found["asking"] = exchange_s / found["delay_s"], found["wait_s"] / found["delay_s"]
    found["models"] = found["busiest_nbytes"] / (4 * 16**2 * LAYERS)
    lines = [
        (
            *(method, PATTERN.get(method, ""), str(nodes)),
            *(f"{one['messages']:.1f}", f"{one['asking']:.1f}"),
            *(f"{one['busiest_packets']:.0f}", f"{one['models']:.2f}"),
        )
        for method in dict.fromkeys(runs["method"])
        for nodes, one in found.loc[method].iterrows()
    ]
    return table(columns, lines)
