"""The bottom lines of the terminal, which show the run's progress. A thread follows the run and draws them."""

import math
import threading
import time

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lsgd.errors import LsgdError
from lsgd.node.screen import Screen
from lsgd.protocol.keys import OPERATOR, connector_keys
from lsgd.watch.reader import Reader
from lsgd.watch.terminal import duration
from lsgd.watch.view import TAKES_PART, RunView, WorkerView

EVERY_S = 0.5

_UNREMARKABLE = ("busy", "nobody")  # reasons of a run that trains normally, which are not shown


class Panel(threading.Thread):
    """Shows the run of the global server at ``address`` at the bottom of the screen, from :meth:`start` on."""

    def __init__(self, screen: Screen, address: str, *, insecure: bool) -> None:
        super().__init__(name="lsgd-panel", daemon=True)
        self._screen = screen
        self._address = address
        self._insecure = insecure
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
        try:
            self._follow()
        except LsgdError as error:
            self._screen.panel([f"no progress is shown: {error}"])
        else:
            self._screen.panel([])

    def _follow(self) -> None:
        run = RunView()
        shown_at = -math.inf
        keys = connector_keys(self._address, None, OPERATOR, insecure=self._insecure)
        with Reader(self._address, keys) as reader:
            while run.now.state != "over" and not self._closing.is_set():
                batch = reader.read(EVERY_S)
                run.take(batch)
                now = time.monotonic()
                if run.now.run and not batch.more and now - shown_at >= EVERY_S:
                    shown_at = now
                    self._screen.panel(frame(run, *self._screen.size()).splitlines())


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
    loss = "-" if worker.loss is None else f"{worker.loss:.4g}"
    line.append(f"  {worker.done:>8}  loss {loss:<9}")
    leads = last is not None and last.leader == worker.worker
    return line.append(f"  {worker.reason or ('leads' if leads else '')}")
