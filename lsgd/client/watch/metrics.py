"""A run's metrics in the text format of Prometheus: made from the view of the run, and from nothing else."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from lsgd.client.watch.counters import BOUNDS_S
from lsgd.client.watch.view import RunView, WorkerView
from lsgd.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what :func:`exposition` returns."""

MAX_WORKERS = 1024
"""Metrics of single workers are those of the first so many."""

RUN_STATES = ("waiting", "running", "stopping", "over")
WORKER_STATES = ("held", "live", "straggler", "cut", "away", "left")
"""All states that there are."""


def check() -> None:
    """Raise ConfigError where prometheus_client is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(f"metrics need prometheus_client: {sys.executable} -m pip install 'lsgd[metrics]'")


def exposition(view: RunView) -> bytes:
    """Return all metrics of a run as Prometheus reads them; nothing may change ``view`` meanwhile.

    Raises:
        ConfigError: prometheus_client is missing.
    """
    check()
    from prometheus_client import generate_latest

    return generate_latest(_Families(view))


class _Families:
    """What ``generate_latest`` takes for a registry."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def collect(self) -> Iterator["Metric"]:
        yield _gauge("connected", "Whether the global server answers.", self._view.connected)
        if self._view.run:
            yield from _run(self._view)
            yield from _rounds(self._view)
            yield from _workers(self._view)
            yield from _totals(list(islice(self._view.workers.values(), MAX_WORKERS)), self._view)


def _run(view: RunView) -> Iterator["Metric"]:
    info = _gauges("run_info", "The run, and the algorithm of its current phase.", ["run", "algorithm"])
    info.add_metric([view.run, view.algorithm], 1)
    yield info
    yield _states("run_state", "State of the run.", [], [((), view.state)], RUN_STATES)
    yield _gauge("run_progress_ratio", "Share of the run that is made.", view.share)
    yield _gauge("run_elapsed_seconds", "Time since the first round.", view.seconds)
    yield _gauge("run_remaining_seconds", "Time that is left at the present pace.", view.left_s)
    yield _gauge("run_iterations_limit", "Iterations that the run ends after; 0: there is no limit.", view.iterations)
    yield _gauge("run_period_iterations", "Iterations of a worker between two global rounds.", view.period)
    yield _gauge("run_generation", "Number of the generation.", view.generation)
    yield _gauge("run_nodes", "Nodes in the generation.", view.nodes)
    yield _gauge("run_loss", "Mean of the workers' losses at the last global round.", view.loss)
    yield _counter("iterations", "Iterations made by all, those made again included.", view.counters.iterations)
    yield _counter("server_restarts", "How often the global server was started again.", view.counters.restarts)
    yield _counter("events_lost", "Events that were gone before they were read.", view.lost)
    user = _gauges("user", "What scripts log by name: the mean over live workers.", ["name"])
    for name, number in view.logged.items():
        user.add_metric([name], number)
    yield user


def _rounds(view: RunView) -> Iterator["Metric"]:
    from prometheus_client.core import HistogramMetricFamily

    rounds = _counters("rounds", "Rounds that were ordered.", ["scope"])
    rounds.add_metric(["local"], view.rounds_local)
    rounds.add_metric(["global"], view.rounds_global)
    yield rounds
    took = HistogramMetricFamily("lsgd_round_seconds", "Time from a round's order to its completion.", labels=["scope"])
    for scope, histogram in view.counters.took.items():
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        took.add_metric([scope], list(zip(bounds, histogram.cumulated, strict=True)), histogram.total_s)
    yield took
    failed = _counters("round_failures", "Rounds that a member could not complete.", ["reason"])
    for reason, times in view.counters.failed.items():
        failed.add_metric([reason], times)
    yield failed


def _workers(view: RunView) -> Iterator["Metric"]:
    workers = list(islice(view.workers.values(), MAX_WORKERS))
    count = _gauges("workers", "Workers in each state.", ["state"])
    states = Counter(worker.state for worker in view.workers.values())
    for state in WORKER_STATES:
        count.add_metric([state], states[state])
    yield count
    shown = (((worker.worker,), worker.state) for worker in workers)
    yield _states("worker_state", "State of each worker.", ["worker"], shown, WORKER_STATES)
    loss = _gauges("worker_loss", "Loss, as the worker last reported it.", ["worker"])
    for worker in workers:
        if worker.loss is not None:
            loss.add_metric([worker.worker], worker.loss)
    yield loss
    silence = _gauges("worker_silence_seconds", "Time since the worker was heard.", ["worker"])
    for worker in workers:
        if worker.state != "left":
            silence.add_metric([worker.worker], worker.heard_s)
    yield silence
    yield _counter("joins", "How often workers have joined.", view.counters.joins)
    departures = _counters("departures", "How often rounds went on without a worker.", ["state", "reason"])
    for (state, reason), times in view.counters.departures.items():
        departures.add_metric([state, reason], times)
    yield departures


def _totals(workers: list[WorkerView], view: RunView) -> Iterator["Metric"]:
    done = _counters("worker_iterations", "Iterations that the worker has made.", ["worker"])
    for worker in workers:
        done.add_metric([worker.worker], view.counters.done[worker.worker])
    yield done
    for name, of, help_ in (
        ("sent_bytes", "sent_nbytes", "Bytes of tensors that the worker has sent."),
        ("received_bytes", "received_nbytes", "Bytes of tensors that the worker has received."),
        ("compute_seconds", "compute_s", "Time in the worker's steps."),
        ("wait_seconds", "waiting_s", "Time of waiting for the servers and the others."),
        ("exchange_seconds", "exchange_s", "Time in rounds."),
    ):
        family = _counters(name, help_, ["worker"])
        for worker in workers:
            if worker.totals.last is not None:
                family.add_metric([worker.worker], getattr(worker.totals.last, of))
        yield family


def _gauges(name: str, help_: str, labels: list[str]) -> "GaugeMetricFamily":
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"lsgd_{name}", help_, labels=labels)


def _counters(name: str, help_: str, labels: list[str]) -> "CounterMetricFamily":
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"lsgd_{name}", help_, labels=labels)


def _gauge(name: str, help_: str, value: float | None) -> "Metric":
    """Return a gauge; one without a value has no sample."""
    family = _gauges(name, help_, [])
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, help_: str, value: float) -> "Metric":
    family = _counters(name, help_, [])
    family.add_metric([], value)
    return family


def _states(
    name: str, help_: str, labels: list[str], shown: Iterable[tuple[tuple[str, ...], str]], states: tuple[str, ...]
) -> "Metric":
    """Return a state set: for each state a sample, 1 for the one that is the case."""
    family = _gauges(name, help_, [*labels, "state"])
    for whose, state in shown:
        for each in states:
            family.add_metric([*whose, each], each == state)
    return family
