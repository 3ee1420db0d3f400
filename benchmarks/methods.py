"""The methods that benchmarks compare, by name: lsgd's algorithms with their settings, and the baselines."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from benchmarks.baselines import joining
from lsgd.algorithms.allreduce import AllReduceSettings
from lsgd.algorithms.bytegrad import ByteGradSettings
from lsgd.algorithms.decentralized import DecentralizedSettings
from lsgd.algorithms.elastic import ElasticSettings
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import DiLoCoSettings, LocalSettings, SparseSettings
from lsgd.algorithms.low_precision_decentralized import LowPrecisionDecentralizedSettings
from lsgd.algorithms.qsgd import QSGDSettings
from lsgd.settings import AlgorithmSettings

RAMP_SHARE = 0.05
"""Share of the run in which the period grows, or falls, in the methods that have ramps."""

PlainLocal = partial(LocalSettings, rescale=False)
"""Local SGD as in its paper: models become the mean."""

OURS: Mapping[str, Callable[[int], AlgorithmSettings]] = {
    "leader": lambda period: LeaderSettings(period=period, local_period=period),
    "leader-strong": lambda period: LeaderSettings(period=period, local_period=period, pull_global=0.5),
    "leader-progress": lambda period: LeaderSettings(period, period, election="progress"),
    "leader-probe": lambda period: LeaderSettings(period, period, election="probe"),
    "leader-probe-strong": lambda period: LeaderSettings(period, period, election="probe", pull_global=0.5),
    "leader-loss": lambda period: LeaderSettings(period, period, election="loss"),
    "leader-8bit": lambda period: LeaderSettings(period=period, local_period=period, compression="minmax8"),
    "leader-8bit-delay": lambda period: LeaderSettings(
        period=period, local_period=period, compression="minmax8", delay=period // 2
    ),
    "elastic": lambda period: ElasticSettings(period=period),
    "local": lambda period: PlainLocal(period=period, compression="none"),
    "local-warm": lambda period: PlainLocal(period=period, compression="none", warm_share=RAMP_SHARE),
    "local-closing": lambda period: PlainLocal(period=period, compression="none", closing_share=RAMP_SHARE),
    "local-ramps": lambda period: PlainLocal(
        period=period, compression="none", warm_share=RAMP_SHARE, closing_share=RAMP_SHARE
    ),
    "local-8bit": lambda period: PlainLocal(period=period, compression="minmax8"),
    "local-2bit": lambda period: LocalSettings(period=period, compression="levels2"),
    "local-2bit-delay": lambda period: LocalSettings(period=period, compression="levels2", delay=period // 3, keep=1.0),
    "local-2bit-delay-half": lambda period: LocalSettings(
        period=period, compression="levels2", delay=period // 3, keep=0.5
    ),
    "local-2bit-plain": lambda period: PlainLocal(period=period, compression="levels2"),
    "local-2bit-fragments": lambda period: LocalSettings(
        period=period, compression="levels2", fragments=4, delay=period // 8
    ),
    "local-2bit-parts": lambda period: LocalSettings(period=period, compression="levels2", fragments=min(16, period)),
    "sparse": lambda period: SparseSettings(period=period),
    "diloco": lambda period: DiLoCoSettings(period=period),
    "allreduce": lambda period: AllReduceSettings(),
    "bytegrad": lambda period: ByteGradSettings(),
    "qsgd": lambda period: QSGDSettings(),
    "decentralized": lambda period: DecentralizedSettings(),
    "low_precision_decentralized": lambda period: LowPrecisionDecentralizedSettings(),
}
"""Settings of lsgd's methods for a period, which some of them do not have."""

ALONE = "alone"
"""The name of the method that exchanges nothing."""

BASELINES = tuple(name for name in joining.BASELINES if name != ALONE)
"""Names of the baselines that communicate."""

ONE_MACHINE = "one-machine"
"""The name of a single worker that has all data, and makes the steps of one worker."""

ONE_MACHINE_SAMPLES = "one-machine-samples"
"""The same with as many steps as all workers make together, and so as many samples."""

LABELS: Mapping[str, str] = {
    ONE_MACHINE: "one machine",
    ONE_MACHINE_SAMPLES: "one machine, all workers' steps",
    ALONE: "no exchange",
    "ddp": "DistributedDataParallel",
    "ddp-float16": "DistributedDataParallel, float16",
    "ddp-powersgd1": "PowerSGD, rank 1",
    "ddp-powersgd2": "PowerSGD, rank 2",
    "post-local-sgd": "PostLocalSGD of PyTorch",
    "torchft-local-sgd": "torchft LocalSGD",
    "torchft-diloco": "torchft DiLoCo",
    "default": "lsgd with its defaults",
    "default-waiting": "lsgd with its defaults, delay 0",
    "local-2bit": "lsgd local, 2 bits",
    "local-2bit-delay": "lsgd local, 2 bits, delay",
    "local-8bit": "lsgd local, 8 bits",
    "leader": "lsgd leader",
    "leader-8bit": "lsgd leader, 8 bits",
    "leader-8bit-delay": "lsgd leader, 8 bits, delay",
    "diloco": "lsgd diloco",
    "sparse": "lsgd sparse",
    "bytegrad": "lsgd bytegrad",
    "low_precision_decentralized": "lsgd low_precision_decentralized",
}
"""What tables and pictures for readers call the methods."""

SAME_MESSAGES = (
    *("leader-strong", "leader-progress", "leader-probe", "leader-probe-strong", "leader-loss"),
    *("local-warm", "local-closing", "local-ramps", "local-2bit-plain"),
)
"""Methods that send what ``leader`` or ``local`` sends; they differ in what is learned, or how often."""

ALL = (ONE_MACHINE, ONE_MACHINE_SAMPLES, ALONE, *BASELINES, *OURS)
"""Names of all methods, in the order of tables."""

PERIODIC = frozenset(name for name, settings in OURS.items() if not settings(64).schedule().lockstep) | {
    "post-local-sgd",
    "torchft-local-sgd",
    "torchft-diloco",
    "hivemind",
}
"""Methods that have a period; all others exchange in every step."""


def sent_nbytes(method: str, period: int, model: nn.Module, workers: int) -> float | None:
    """Return the bytes that a worker sends per step, on average, by formula; None for a method without one."""
    numel = sum(p.numel() for p in model.parameters())
    if method in (ONE_MACHINE, ONE_MACHINE_SAMPLES, ALONE):
        return 0.0
    if method in OURS:
        return OURS[method](period or 1).sent_nbytes(numel, workers)
    ring = 2 * (workers - 1) / workers
    if method.startswith("ddp-powersgd"):
        return ring * 4 * _powersgd_numel(model, rank=int(method.removeprefix("ddp-powersgd")))
    element_nbytes = {"ddp": 4.0, "ddp-float16": 2.0}
    if method in ("post-local-sgd", "torchft-local-sgd", "torchft-diloco"):
        return ring * 4 * numel / period
    return ring * element_nbytes[method] * numel if method in element_nbytes else None


def _powersgd_numel(model: nn.Module, rank: int) -> int:
    """Return the numbers that PowerSGD sends: two factors of each matrix of which they are at most half."""
    sent = 0
    for parameter in model.parameters():
        rows = parameter.shape[0]
        factors = rank * (rows + parameter.numel() // rows)
        sent += factors if parameter.ndim > 1 and 2 * factors < parameter.numel() else parameter.numel()
    return sent
