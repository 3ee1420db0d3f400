"""The methods that benchmarks compare, by name: lsgd's algorithms with their settings, and its peers."""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.decentralized import DecentralizedSettings
from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.gradient import GradientSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import DiLoCoSettings, LocalSettings
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.settings import AlgorithmSettings

OURS: Mapping[str, Callable[[int], AlgorithmSettings]] = {
    "leader": lambda period: LeaderSettings(period=period, local_period=period),
    "leader-strong": lambda period: LeaderSettings(period=period, local_period=period, pull_global=0.5),
    "leader-8bit": lambda period: LeaderSettings(period=period, local_period=period, compression="minmax8"),
    "leader-8bit-delay": lambda period: LeaderSettings(
        period=period, local_period=period, compression="minmax8", delay=period // 2
    ),
    "elastic": lambda period: ElasticSettings(period=period),
    "local": lambda period: LocalSettings(period=period),
    "local-8bit": lambda period: LocalSettings(period=period, compression="minmax8"),
    "diloco": lambda period: DiLoCoSettings(period=period),
    "allreduce": lambda period: AllReduceSettings(),
    "bytegrad": lambda period: ByteGradSettings(),
    "qsgd": lambda period: QSGDSettings(),
    "decentralized": lambda period: DecentralizedSettings(),
    "low_precision_decentralized": lambda period: LowPrecisionDecentralizedSettings(),
}
"""Settings of lsgd's methods for a period, which some of them do not have."""

PEERS = (
    "ddp",
    "ddp-float16",
    "ddp-powersgd1",
    "ddp-powersgd2",
    "post-local-sgd",
    "torchft-local-sgd",
    "torchft-diloco",
    "hivemind",
)
"""Names of the peers that communicate (benchmarks/peers.py)."""

ALL = ("alone", *PEERS, *OURS)
"""Names of all methods, in the order of tables; ``alone`` exchanges nothing."""

PERIODIC = frozenset(name for name, settings in OURS.items() if not settings(64).schedule().lockstep) | {
    "post-local-sgd",
    "torchft-local-sgd",
    "torchft-diloco",
    "hivemind",
}
"""Methods that have a period; all others exchange in every step."""


def settings_of(method: str, period: int, bucket_mib: float | None = None) -> AlgorithmSettings:
    """Return the settings of one of lsgd's methods; ``bucket_mib`` is for those that exchange gradients."""
    settings = OURS[method](period)
    if bucket_mib is not None and isinstance(settings, GradientSettings):
        return replace(settings, bucket_mib=bucket_mib)
    return settings


def add_peer_python(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option that names the environments of peers."""
    parser.add_argument(
        "--peer-python",
        nargs="+",
        default=[],
        metavar="LIBRARY=PYTHON",
        help="the interpreter of an environment that has torchft or hivemind, with torch and scikit-learn",
    )


def interpreters_of(methods: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the Python that each method runs in, without the peers whose library is not installed.

    Args:
        methods: their names.
        given: ``torchft=/path/to/python``, for libraries that have environments of their own.
    """
    found = {method: _interpreter_of(method, given) for method in methods}
    return {method: python for method, python in found.items() if python is not None}


def _interpreter_of(method: str, given: Sequence[str]) -> str | None:
    library = next((name for name in ("torchft", "hivemind") if method.startswith(name)), None)
    if library is None:
        return sys.executable
    for pair in given:
        name, _, path = pair.partition("=")
        if name == library:
            found = subprocess.run([path, "-c", f"import {library}"], capture_output=True, check=False)
            return path if found.returncode == 0 else None
    return sys.executable if importlib.util.find_spec(library) else None
