"""The run's progress, followed by a thread: the bottom lines of a terminal, or elsewhere a line every ten seconds."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lsgd.errors import LsgdError
from lsgd.node.screen import Screen
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch.reader import Reader
from lsgd.watch.terminal import duration
from lsgd.watch.view import TAKES_PART, RunView, WorkerView

EVERY_S, LINE_EVERY_S = 0.5, 10.0

RUN = "[run] "
"""Prefix of a line about the run as a whole."""

_UNREMARKABLE = ("busy", "nobody")  # reasons of a run that trains normally, which are not shown


class Panel(threading.Thread):
    """Shows the run at the bottom of the screen, from :meth:`start` on, or as lines where these cannot move.

    ``where`` returns where the run is served now, and the keys for it. From there, each line has another reader if the
    run has moved.
    """

    def __init__(self, screen: Screen, where: Callable[[], tuple[str, ConnectorKeys | None]]) -> None:
        super().__init__(name="lsgd-panel", daemon=True)
        self._screen = screen
        self._where = where
        self._line_at = time.monotonic() + LINE_EVERY_S
        self._closing = threading.Event()

    def end(self) -> None:
        """Have the thread end and remove the lines, or leave the line that says why it ended earlier."""
        self._closing.set()

    def close(self) -> None:
        """End the thread, and remove the lines."""
        self.end()
        if self.is_alive():
            self.join(2 * EVERY_S)
        self._screen.panel([])

    def run(self) -> None:
        """Follow the run until its end."""
        while not self._closing.is_set():
            address, keys = self._where()
            try:
                self._follow(address, keys)
            except LsgdError as error:
                if self._screen.is_terminal:
                    self._screen.panel([f"no progress is shown: {error}"])
                while self._where()[0] == address and not self._closing.wait(EVERY_S):
                    pass
            else:
                self._screen.panel([])
                if self._where()[0] == address:
                    return

    def _follow(self, address: str, keys: ConnectorKeys | None) -> None:
        run = RunView()
        shown_at = -math.inf
        with Reader(address, keys) as reader:
            while run.now.state != "over" and not self._closing.is_set() and self._where()[0] == address:
                batch = reader.read(EVERY_S)
                run.apply(batch)
                now = time.monotonic()
                if not run.now.run or batch.more or now - shown_at < EVERY_S:
                    continue
                shown_at = now
                if self._screen.is_terminal:
                    self._screen.panel(frame(run, *self._screen.size()).splitlines())
                elif now >= self._line_at and run.now.state != "over":
                    self._line_at = now + LINE_EVERY_S
                    self._screen.line(RUN, line(run))


def line(run: RunView) -> str:
    """Return a line: iterations, rate, loss, each node's share, who is away, and what the run waits for."""
    now, made = run.now, Counter[str]()
    here = [worker for worker in run.workers.values() if worker.state != "left"]
    for worker in here:
        made[worker.worker.partition("/")[0]] += worker.done
    cells = [f"{now.count} of {now.iterations} iterations" if now.iterations else f"{now.count} iterations"]
    cells += [f"{run.rate:.3g}/s"] if run.rate else []
    cells += [f"loss {now.loss:.4g}"] if now.loss is not None else []
    if now.state == "running" and run.left_s is not None:
        cells.append(f"{duration(round(run.left_s))} left")
    if len(made) > 1 and (total := made.total()):
        cells.append(", ".join(f"{node} {count / total:.0%}" for node, count in made.items()))
    cells += [f"{now.participation:.0%} take part in rounds"] if now.participation not in (None, 1.0) else []
    away = [f"{worker.worker} ({worker.state})" for worker in here if worker.state not in TAKES_PART]
    cells += [f"away: {', '.join(away)}"] if away and now.state == "running" else []
    if lost := [worker.worker for worker in here if worker.lost_its_loss]:
        cells.append(f"no finite loss: {', '.join(lost)} (lower the learning rate, or look at the batches)")
    if not run.connected:
        cells.append("the global server does not answer")
    elif now.state != "running" or now.code.partition(".")[0] not in _UNREMARKABLE:
        cells.append(f"{now.state}: {now.reason}")
    return "; ".join(cells)


def frame(run: RunView, columns: int, rows: int) -> str:
    """Return the lines for a terminal of this size: the progress, what the run is waiting for, and the workers."""
    console = Console(force_terminal=True, width=max(40, columns) - 1, highlight=False)
    lines = []
    if not run.connected:
        lines.append(Text("the global server does not answer; training continues as far as it can", "yellow"))
    elif run.now.state != "running" or run.now.code.partition(".")[0] not in _UNREMARKABLE:
        lines.append(Text(f"{run.now.state}: {run.now.reason}", "yellow"))
    workers = list(run.workers.values())
    most = max(1, rows // 2 - 3)
    if len(workers) > most:  # workers with a problem first
        workers.sort(key=lambda worker: worker.state in TAKES_PART)
    width = max((len(worker.worker) for worker in workers[:most]), default=0)
    lines += [_worker(run, worker, width) for worker in workers[:most]]
    if len(workers) > most:
        lines.append(Text(f"and {len(workers) - most} more: lsgd status", "dim"))
    with console.capture() as shown:
        console.print(_progress(run))
        for line in lines:
            console.print(line, no_wrap=True, overflow="ellipsis")
    return shown.get()


def _progress(run: RunView) -> Table:
    """Return one line: a bar if the length is known, iterations, rate, time left, loss."""
    now = run.now
    has_end = bool(now.iterations or now.progress)
    cells = [f"{now.progress:.0%}"] * has_end
    cells.append(f"{now.count}/{now.iterations}" if now.iterations else f"{now.count} iterations")
    if run.rate:
        cells.append(f"{run.rate:.3g}/s")
    if now.state == "running" and run.left_s is not None:
        cells.append(f"{duration(round(run.left_s))} left")
    if now.loss is not None:
        cells.append(f"loss {now.loss:.4g}")
    line = Table.grid(expand=has_end, padding=(0, 2, 0, 0))
    if has_end:
        line.add_column(ratio=1)
    for _ in cells:
        line.add_column(no_wrap=True)
    line.add_row(*[ProgressBar(total=1.0, completed=now.progress)] * has_end, *cells)
    return line


def _worker(run: RunView, worker: WorkerView, width: int) -> Text:
    """Return a worker's line, its name padded to ``width``."""
    trains = worker.state in TAKES_PART
    last = run.rounds.last
    line = Text(f"{worker.worker:{width}}  ")
    line.append(f"{'trains' if trains else worker.state:9}", "green" if trains else "yellow")
    unknown = "not finite" if worker.lost_its_loss else "-"
    loss = unknown if worker.loss is None else f"{worker.loss:.4g}"
    line.append(f"  {worker.done:>8}  loss {loss:<9}")
    leads = last is not None and last.leader == worker.worker
    return line.append(f"  {worker.reason or ('leads' if leads else '')}")
