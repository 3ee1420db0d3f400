"""A running run in a terminal: what it waits for, its progress, and its workers."""

import math
import time
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lsgd.errors import JoinError
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch import reader
from lsgd.watch.view import RunView


def duration(seconds: float) -> str:
    """Return a time: ``9.5s``, ``3m05s``, ``2h40m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f}s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s"


AWAY_FOR_S = 10.0
WATCH_EVERY_S = 2.0


def watch(address: str, keys: ConnectorKeys | None = None) -> Iterator[RunView]:
    """Yield the view of a run every two seconds until it is over; wait for its server to restart.

    Raises:
        JoinError: no answer from the address within 5 s, or for 10 s later on, or its server has given up.
    """
    run = RunView()
    shown_at, heard_at = -math.inf, time.monotonic()
    with reader.Reader(address, keys) as stream:
        while run.now.state != "over":
            batch = stream.read(0.5)
            run.apply(batch)
            now = time.monotonic()
            if batch.connected:
                heard_at = now
            elif now - heard_at > (AWAY_FOR_S if run.now.run else reader.ANSWER_WITHIN_S):
                raise JoinError(reader.silent(address, now - heard_at))
            if run.now.run and not batch.more and (now - shown_at >= WATCH_EVERY_S or run.now.state == "over"):
                shown_at = now
                yield run


def view(run: RunView) -> Group:
    """Return the state of a run to print: what it waits for, its progress, and a table of the workers."""
    now = run.now
    limit = f" of {now.iterations}" if now.iterations else ""
    rate = run.rate if run.rate is not None else run.made / now.seconds if now.seconds else 0.0
    left = f", about {duration(round(run.left_s))} left" if run.left_s else ""
    part = "" if now.participation is None else f", participation {now.participation:.0%}"
    lines = Text(
        f"{now.state}: {now.reason}\n"
        f"{now.count}{limit} iterations in {duration(now.seconds)} ({rate:.1f} a second){left}\n"
        f"run {now.run}, {now.algorithm}: {now.rounds_global} global and {now.rounds_local} local rounds, "
        f"generation {now.generation}{part}\n"
        f"period {now.period}{f' with a delay of {now.delay}' if now.delay else ''}: {now.period_reason}"
    )
    workers = run.workers.values()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("worker", no_wrap=True, overflow="ellipsis")
    led = ("led",) if run.elects else ()
    for name in ("rank", "state", "iterations", "loss", *led, "heard"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for worker in workers:
        table.add_row(
            worker.worker,
            "-" if worker.rank < 0 else str(worker.rank),
            worker.state,
            str(worker.done),
            "-" if worker.loss is None else f"{worker.loss:.4g}",
            *[str(worker.times_leader) for _ in led],
            f"{worker.heard_s:.1f} s",
        )
    ways = [Text(f"node{way['nodes'][0]} and node{way['nodes'][1]}: {way['way']}") for way in run.ways]
    reasons = [Text(f"{worker.worker} is {worker.state}: {worker.reason}") for worker in workers if worker.reason]
    return Group(lines, table, *ways, *reasons) if workers else Group(lines)
