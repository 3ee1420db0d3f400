"""A run's metrics in Prometheus's text format, computed only from the run's view; the server of ``lsgd metrics``."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from lsgd.errors import ConfigError
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch import require
from lsgd.watch.history import BOUNDS_S
from lsgd.watch.reader import Reader
from lsgd.watch.view import RunView, WorkerView

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of what :func:`exposition` returns."""

MAX_WORKERS = 1024
"""Most workers with metrics of their own: the first ones."""

RUN_STATES = ("waiting", "running", "stopping", "over")
WORKER_STATES = ("held", "live", "straggler", "cut", "away", "left")

Samples = Mapping[Any, float]
"""A metric's values, by the tuple of its labels' values."""


def check() -> None:
    """Raise ConfigError where prometheus_client is missing."""
    require("the metrics page", "metrics", "prometheus_client")


def exposition(view: RunView) -> bytes:
    """Return all metrics of a run in Prometheus's format; nothing may change ``view`` meanwhile.

    Raises:
        ConfigError: prometheus_client is missing.
    """
    check()
    from prometheus_client import generate_latest

    told: bytes = generate_latest(_Families(view))
    return told


class _Families:
    """The registry that ``generate_latest`` reads."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterator["Metric"]:
        yield _gauge("connected", "Whether the global server answers.", self._view.connected)
        if self._view.now.run:
            workers = list(islice(self._view.workers.values(), MAX_WORKERS))
            yield from _run(self._view)
            yield from _rounds(self._view)
            yield from _workers(self._view, workers)
            yield from _totals(self._view, workers)


def _run(view: RunView) -> Iterator["Metric"]:
    now = view.now
    info = {(now.run, now.algorithm): 1}
    yield _gauge("run_info", "The run, and the algorithm of its current phase.", info, "run", "algorithm")
    states = {(state,): state == now.state for state in RUN_STATES}
    yield _gauge("run_state", "State of the run.", states, "state")
    yield _gauge("run_remaining_seconds", "Time that is left at the present pace.", view.left_s)
    for name, of, help_ in (
        ("progress_ratio", "progress", "Share of the run that is made."),
        ("participation_ratio", "participation", "Mean share of the workers that took part in the last global rounds."),
        ("elapsed_seconds", "seconds", "Time since the first round."),
        ("iterations_limit", "iterations", "Iterations that the run ends after; 0: there is no limit."),
        ("period_iterations", "period", "Iterations of a worker between two global rounds."),
        ("delay_iterations", "delay", "Iterations from a round until its result is applied."),
        ("generation", "generation", "Number of the generation."),
        ("nodes", "nodes", "Nodes in the generation."),
        ("loss", "loss", "Mean of the workers' losses at the last global round."),
    ):
        yield _gauge(f"run_{name}", help_, getattr(now, of))
    yield _counter("iterations", "Iterations made by all, those made again included.", view.counters.iterations)
    yield _counter("server_restarts", "How often the global server was started again.", view.counters.restarts)
    yield _counter("events_lost", "Events that were gone before they were read.", view.lost)
    logged = {(name,): number for name, number in view.logged.items()}
    yield _gauge("user", "What scripts log by name: the mean over live workers.", logged, "name")


def _rounds(view: RunView) -> Iterator["Metric"]:
    from prometheus_client.core import HistogramMetricFamily

    ordered = {("local",): view.now.rounds_local, ("global",): view.now.rounds_global}
    yield _counter("rounds", "Rounds that were ordered.", ordered, "scope")
    took = HistogramMetricFamily("lsgd_round_seconds", "Time from a round's order to its completion.", labels=["scope"])
    for scope, histogram in view.counters.took.items():
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        took.add_metric([scope], list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total_s)
    yield took
    failed = {(reason,): times for reason, times in view.counters.failed.items()}
    yield _counter("round_failures", "Rounds that a member could not complete.", failed, "reason")


def _workers(view: RunView, workers: list[WorkerView]) -> Iterator["Metric"]:
    counts = Counter(worker.state for worker in view.workers.values())
    yield _gauge("workers", "Workers in each state.", {(each,): counts[each] for each in WORKER_STATES}, "state")
    states = {(worker.worker, each): each == worker.state for worker in workers for each in WORKER_STATES}
    yield _gauge("worker_state", "State of each worker.", states, "worker", "state")
    losses = {(worker.worker,): worker.loss for worker in workers if worker.loss is not None}
    yield _gauge("worker_loss", "Loss, as the worker last reported it.", losses, "worker")
    silence = {(worker.worker,): worker.heard_s for worker in workers if worker.state != "left"}
    yield _gauge("worker_silence_seconds", "Time since the worker was heard.", silence, "worker")
    yield _counter("joins", "How often workers have joined.", view.counters.joins)
    departures = view.counters.departures
    help_ = "How often rounds went on without a worker, until the run was stopping."
    yield _counter("departures", help_, departures, "state", "reason")


def _totals(view: RunView, workers: list[WorkerView]) -> Iterator["Metric"]:
    done = {(worker.worker,): view.counters.done[worker.worker] for worker in workers}
    yield _counter("worker_iterations", "Iterations that the worker has made.", done, "worker")
    last = {(worker.worker,): worker.totals.last for worker in workers if worker.totals.last is not None}
    for name, of, help_ in (
        ("sent_bytes", "sent_nbytes", "Bytes of tensors that the worker has sent."),
        ("received_bytes", "received_nbytes", "Bytes of tensors that the worker has received."),
        ("compute_seconds", "compute_s", "Time in the worker's steps."),
        ("wait_seconds", "waiting_s", "Time of waiting for the servers and the others."),
        ("exchange_seconds", "exchange_s", "Time in rounds."),
    ):
        yield _counter(name, help_, {who: getattr(totals, of) for who, totals in last.items()}, "worker")


def _gauge(name: str, help_: str, value: Samples | float | None, *labels: str) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"lsgd_{name}", help_, labels=labels), value)


def _counter(name: str, help_: str, value: Samples | float, *labels: str) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"lsgd_{name}", help_, labels=labels), value)


def _filled(family: "GaugeMetricFamily | CounterMetricFamily", value: Samples | float | None) -> "Metric":
    """Add the samples, or the only one of a metric without labels; None: there is none."""
    samples = value if isinstance(value, Mapping) else {} if value is None else {(): value}
    for labels, number in samples.items():
        family.add_metric(labels, number)
    return family


LINGER_S = 60.0
"""How long to serve the metrics after the run's end, so that they are read once more."""


def serve(address: str, keys: ConnectorKeys | None, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve ``/metrics`` of the run at ``address`` until a while after its end; wait for a server that is away.

    Raises:
        ConfigError: prometheus_client is missing, or the port cannot be used.
        JoinError: the global server refuses us, or has given up for another one.
    """
    check()
    view, lock = RunView(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # for a silent peer

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            with lock:
                page = exposition(view)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"nothing can listen on {host}:{port}: {error.strerror}; name another --port") from None
    with server, Reader(address, keys) as reader:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        say(f"metrics on http://{shown}:{server.server_address[1]}/metrics")
        over_at: float | None = None
        try:
            while over_at is None or time.monotonic() - over_at < LINGER_S:
                batch = reader.read(0.25)
                with lock:
                    view.apply(batch)
                over_at = (over_at or time.monotonic()) if view.now.state == "over" else None
        finally:
            server.shutdown()
