"""Whether the dashboard stays smooth: ``python -m benchmarks.dashboard [--quick] [--json FILE]``.

The real coordinator runs in virtual time (benchmarks/control/simulation.py): 3 workers for a minute, and 64 workers, of
whom some fail, for six hours. Then the dashboard follows the run in real time, and a real Chromium shows the page for a
while, without a graphics card. Measured are the data that the page gets, what it costs to make and to draw them,
the time between two frames, and how long a key that zooms takes until its frame is there.

It needs Chromium, and playwright from PyPI.
"""

import asyncio
import json
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from benchmarks.control.simulation import Simulation, percentile
from benchmarks.report.about import about, argument_parser, heading, write_json
from benchmarks.report.tables import table
from lsgd.protocol.events import Event, Happening
from lsgd.server.report import progress, report
from lsgd.watch.dashboard.data import Story, encoded, snapshot
from lsgd.watch.dashboard.follow import Follower
from lsgd.watch.dashboard.server import Dashboard, application
from lsgd.watch.reader import Batch, Reader

STEP_S, PERIOD, LOCAL_PERIOD = 1.0, 4, 2
"""Of a simulated worker: 5,400 global rounds in six hours."""

MORE_S = 3600
"""How much longer a run would go on."""

VIEWPORT = {"width": 1280, "height": 900}
SETTLED_S = 5.0
ZOOMS = 8

WATCH = """() => {
  window.frames = [];
  window.updates = 0;
  new MutationObserver(() => { updates += 1; }).observe(document.getElementById("tiles"),
    { childList: true, characterData: true, subtree: true });
  let last = performance.now();
  const next = (now) => { frames.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""
ZOOM = """async (key) => {
  const from = performance.now();
  loss.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - from;
}"""


class Replay(Reader):
    """Reads a simulated run: what is past at once, then second by second."""

    def __init__(self, workers: int, seconds: int, failures: int) -> None:
        steps = round((seconds + MORE_S) / STEP_S)
        self._simulation = Simulation(
            workers, steps, failures, period=PERIOD, local_period=LOCAL_PERIOD, stragglers=0.0, step_s=STEP_S
        )
        self._simulation.happened = self._add
        self._zero, self._second = time.time() - seconds, 0
        self._seq, self._events = 0, list[Event]()
        self._report: dict[str, Any] | None = json.loads(report(self._simulation.state, 0.0))

    def read(self, timeout_s: float) -> Batch:
        """Return what has happened up to now, a minute of it at most."""
        if not self._is_due():
            time.sleep(timeout_s)
        for _ in range(60):
            if not self._is_due():
                break
            self._second += 1
            self._simulation.advance(self._second)
            self._add([progress(self._simulation.state, self._second)])
        batch = Batch(tuple(self._events), connected=True, report=self._report, more=self._is_due())
        self._events, self._report = [], None
        return batch

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _is_due(self) -> bool:
        return self._zero + self._second + 1 <= time.time()

    def _add(self, happened: Iterable[Happening]) -> None:
        for what in happened:
            self._seq += 1
            self._events.append(Event(self._seq, self._zero + self._simulation.now, what))


@dataclass(frozen=True)
class Smoothness:
    """How a page behaved.

    Args:
        workers: of the run; ``hours`` is how long it had been running.
        kilobytes: of the page's data.
        updates: of the page, and ``seconds`` how long it was watched.
        made_ms: processor time that making the data took, a median.
        drawn_ms: time that the page said drawing them took, a median.
        frames_ms: between two frames: the median, 95 % are shorter, the longest.
        zoom_ms: from a key to the frame that shows what it did, a median.
    """

    workers: int
    hours: float
    kilobytes: float
    updates: int
    seconds: float
    made_ms: float
    drawn_ms: float
    frames_ms: tuple[float, float, float]
    zoom_ms: float

    columns: ClassVar = (
        *("workers", "hours", "kB of data", "updates a second", "ms to make", "to draw"),
        *("ms between frames: median", "95 %", "longest", "ms until a zoom is seen"),
    )

    def cells(self) -> Sequence[str]:
        """Return it as a line of the table."""
        return (
            *(str(self.workers), f"{self.hours:.2g}", f"{self.kilobytes:.0f}", f"{self.updates / self.seconds:.1f}"),
            *(f"{self.made_ms:.0f}", f"{self.drawn_ms:.0f}"),
            *(f"{each:.0f}" for each in (*self.frames_ms, self.zoom_ms)),
        )


@contextmanager
def served(story: Story, source: Replay) -> Iterator[Dashboard]:
    """Serve a dashboard that follows ``source``, once it has caught up."""
    dashboard = Dashboard("tcp://127.0.0.1:0", None, "127.0.0.1", "", control=False)
    loop, (listener,) = asyncio.new_event_loop(), bind_sockets(0, "127.0.0.1")
    dashboard.port = listener.getsockname()[1]

    async def serve() -> HTTPServer:
        server = HTTPServer(application(dashboard))
        server.add_socket(listener)
        return server

    def tell(text: str) -> None:
        asyncio.run_coroutine_threadsafe(dashboard.show(text), loop)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(), loop).result()
    follower = Follower(source, story, tell, lambda: bool(dashboard.streams))
    follower.start()
    try:
        yield dashboard
    finally:
        follower.stop()
        follower.join()
        asyncio.run_coroutine_threadsafe(dashboard.show(None), loop).result()
        loop.call_soon_threadsafe(server.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def measure(browser: Any, workers: int, seconds: int, failures: int, watched_s: float) -> Smoothness:
    """Show the page of a run of so many workers that has been running for so long, and measure it."""
    story, source = Story(), Replay(workers, seconds, failures)
    while (batch := source.read(0.1)).more:
        story.apply(batch)
    story.apply(batch)
    made_ms = []
    for _ in range(5):
        began_at = time.process_time()
        text = encoded(snapshot(story))
        made_ms.append((time.process_time() - began_at) * 1000)
    with served(story, source) as dashboard:
        page = browser.new_page(viewport=VIEWPORT)
        page.goto(dashboard.url())
        page.wait_for_function(f"() => document.querySelectorAll('#workers tr').length === {workers}")
        page.check("[value=whole]")
        page.wait_for_timeout(min(SETTLED_S, watched_s) * 1000)
        page.evaluate(WATCH)
        drawn_ms, watched_from = [], time.monotonic()
        while time.monotonic() < watched_from + watched_s:
            page.wait_for_timeout(500)
            drawn_ms.append(float(page.evaluate("drawMs")))
        page.wait_for_function("() => updates > 0 && frames.length > 10")  # on a busy machine they come later
        frames, updates, watched_s = page.evaluate("frames"), page.evaluate("updates"), time.monotonic() - watched_from
        zoom_ms = [float(page.evaluate(ZOOM, "+-"[i % 2])) for i in range(ZOOMS)]
        page.close()
    spread = (statistics.median(frames), percentile(frames, 0.95), max(frames))
    middles = (statistics.median(made_ms), statistics.median(drawn_ms))
    return Smoothness(
        *(workers, seconds / 3600, len(text) / 1000, updates, watched_s),
        *(*middles, spread, statistics.median(zoom_ms)),
    )


def main() -> int:
    """Measure a small run and a large one, and print a Markdown table."""
    parser = argument_parser("benchmarks.dashboard", __doc__)
    parser.add_argument("--quick", action="store_true", help="ten minutes of 16 workers are the large run")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("there is no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    machine = about("benchmarks.dashboard")
    print(heading(machine), flush=True)
    watched_s = 2.0 if options.quick else 30.0
    large = (16, 600, 3) if options.quick else (64, 6 * 3600, 24)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        results = [measure(browser, *run, watched_s) for run in ((3, 60, 0), large)]
        browser.close()
    print(f"\n{table(Smoothness.columns, [result.cells() for result in results])}")
    write_json(options.json, machine, [asdict(result) for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
