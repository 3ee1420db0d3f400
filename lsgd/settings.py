"""What can be set, each declared once: name, type, default, range and meaning.

The settings of a run and of each algorithm are frozen dataclasses. Their fields are at once the keys of the plan
file, the flags of ``lsgd-server``, the ``LSGD_*`` variables and the documentation. Nothing here imports torch:
the servers read it too.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from lsgd.errors import ConfigError


def setting(
    default: Any,
    meaning: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    fixed: bool = False,
) -> Any:
    """Declare a field that can be set: its default, what it means, its range (inclusive) or its choices.

    A ``fixed`` one, on which the form of what is sent depends, cannot be changed while the run goes on.
    """
    metadata = {"meaning": meaning, "low": low, "high": high, "choices": choices, "fixed": fixed}
    return field(default=default, metadata=metadata)


class Schedule(NamedTuple):
    """When an algorithm wants rounds, as the coordinator counts.

    Args:
        period: iterations that a worker makes on average between two global rounds.
        local_period: the same for the rounds inside a node; equal to ``period`` where there are none.
        lockstep: every iteration of every worker is a part of a round, so that all make the same number.
        identical: all have the same model at all times: a generation begins with one member's model for all.
    """

    period: int
    local_period: int
    lockstep: bool = False
    identical: bool = False


@dataclass(frozen=True)
class RunSettings:
    """How long the run is, who takes part, and how long anything may take."""

    workers: int = setting(1, "the run starts when so many workers have joined", low=1, high=100_000)
    iterations: int = setting(
        0, "end after so many iterations of all workers together; 0: no such limit", low=0
    )
    seconds: float = setting(0.0, "end after so much time since the first iteration; 0: no such limit", low=0)
    buffers: str = setting(
        "average",
        "floating-point buffers (batch-norm statistics) at a global round: averaged, kept, or the leader's",
        choices=("average", "keep", "leader"),
    )
    consensus: str = setting(
        "average",
        "the model at the end: the average of all workers', or that of the worker with the lowest loss",
        choices=("average", "leader"),
    )
    sync_optimizer: bool = setting(False, "a newcomer takes over the optimizer's state too")
    loss_window: int = setting(
        0,
        "batches that the loss which elects leaders is averaged over; 0: the algorithm's local period",
        low=0,
    )
    checkpoint_every: int = setting(
        0,
        "global rounds from one checkpoint of each worker to the next; 0: only one, at the end of the run",
        low=0,
    )
    exchange_timeout_s: float = setting(
        60.0, "longest that one step of an exchange may take", low=0.1, high=86_400
    )
    join_timeout_s: float = setting(
        600.0, "longest that a worker which has joined waits for the others", low=1, high=864_000
    )
    lease_s: float = setting(
        15.0, "a worker whose process has been silent for so long is left out of the run", low=1, high=864_000
    )
    patience_s: float = setting(
        120.0,
        "a round for which all others have waited so long starts without the worker that they wait for; 0: never",
        low=0,
        high=864_000,
    )
    server_timeout_s: float = setting(
        300.0, "longest that a worker waits while its servers are silent", low=1, high=864_000
    )
    lookahead: int = setting(
        1,
        "iterations that a worker asks for in advance, so that it does not wait for the answers; 0: none",
        low=0,
        high=1 << 20,
    )
    unsupervised_iterations: int = setting(
        0, "iterations that a worker makes on its own before it waits for silent servers", low=0, high=1 << 30
    )


@dataclass(frozen=True)
class AlgorithmSettings:
    """Base of every algorithm's settings."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def schedule(self) -> Schedule:
        """Return when the algorithm wants rounds."""
        raise NotImplementedError


def _period() -> Any:
    return setting(64, "iterations of a worker, on average, between exchanges", low=1, high=1 << 30)


def _interval() -> Any:
    return setting(1, "optimizer steps of a worker, on average, between exchanges", low=1, high=1 << 30)


def _hierarchical() -> Any:
    return setting(True, "average at full precision inside a node, then exchange between nodes only")


def _rounding(default: str) -> Any:
    return setting(
        default,
        "to 8 bits: to the nearest code, or to one of the two beside at random, without bias",
        choices=("nearest", "stochastic"),
    )


def _compression(what: str) -> Any:
    return setting("none", f"how {what} travel: as they are, or in 8 bits", choices=("none", "minmax8"))


def _block() -> Any:
    return setting(
        2048,
        "numbers that share one range of 8-bit codes; 0: all that travel in one piece",
        low=0,
        high=1 << 30,
        fixed=True,
    )


def _bucket_mib() -> Any:
    return setting(5.0, "MiB of gradients that are exchanged at a time", low=0.001, high=65_536, fixed=True)


def _average() -> Any:
    return setting(True, "apply the mean of the gradients; false: their sum")


def _error_feedback() -> Any:
    return setting(False, "add what rounding lost to the next gradient")


@dataclass(frozen=True)
class LeaderSettings(AlgorithmSettings):
    """Leader SGD (arXiv 1905.10395): workers are pulled toward the worker with the lowest training loss."""

    name: ClassVar[str] = "leader"
    summary: ClassVar[str] = "Leader SGD (arXiv 1905.10395)"

    period: int = setting(
        64, "iterations of a worker, on average, between global rounds", low=1, high=1 << 30
    )
    local_period: int = setting(16, "the same for rounds inside a node; divides period", low=1, high=1 << 30)
    pull_global: float = setting(0.1, "c2: how far a global round pulls to the leader of all", low=0, high=1)
    pull_local: float = setting(0.1, "c1: how far a local round pulls to the node's leader", low=0, high=1)
    proximal_global: float = setting(
        0.1, "p2: pull to the leader of all, spread over the steps of a period", low=0, high=1
    )
    proximal_local: float = setting(
        0.1, "p1: pull to the node's leader, spread over the steps of a local period", low=0, high=1
    )

    compression: str = _compression("leaders' models")
    block: int = _block()
    delay: int = setting(
        0,
        "take a leader's model over so many iterations after its round, to hide the transfer",
        low=0,
        fixed=True,
    )

    def __post_init__(self) -> None:
        if self.period < self.local_period or self.period % self.local_period:
            raise ConfigError(
                f"period = {self.period} is not a multiple of local_period = {self.local_period}; "
                f"set local_period to a divisor of period, or equal to it for global rounds only"
            )
        if self.delay >= self.local_period and self.delay:
            raise ConfigError(
                f"delay = {self.delay} is not less than local_period = {self.local_period}: "
                f"the next round would come first; set delay to at most {self.local_period - 1}"
            )

    def schedule(self) -> Schedule:
        """Return its two periods."""
        return Schedule(self.period, self.local_period)


@dataclass(frozen=True)
class GradientSettings(AlgorithmSettings):
    """Base of the methods that exchange every gradient."""

    bucket_mib: float = _bucket_mib()

    def schedule(self) -> Schedule:
        """Every iteration is a round."""
        return Schedule(1, 1, lockstep=True, identical=True)


@dataclass(frozen=True)
class QuantizedGradientSettings(GradientSettings):
    """Base of the methods that exchange every gradient in 8 bits."""

    average: bool = _average()
    error_feedback: bool = _error_feedback()
    block: int = _block()


@dataclass(frozen=True)
class AllReduceSettings(GradientSettings):
    """Synchronous SGD: the gradients of every iteration are averaged at full precision."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "synchronous SGD, gradients averaged at full precision"


@dataclass(frozen=True)
class ByteGradSettings(QuantizedGradientSettings):
    """ByteGrad (Bagua, arXiv 2107.01499): gradients averaged in 8 bits between nodes."""

    name: ClassVar[str] = "bytegrad"
    summary: ClassVar[str] = "ByteGrad, gradients in 8 bits between nodes (Bagua, arXiv 2107.01499)"

    hierarchical: bool = _hierarchical()
    rounding: str = _rounding("nearest")


@dataclass(frozen=True)
class QSGDSettings(QuantizedGradientSettings):
    """QSGD (arXiv 1610.02132): gradients averaged in 8 bits between all workers, rounded without bias."""

    name: ClassVar[str] = "qsgd"
    summary: ClassVar[str] = "QSGD, gradients in 8 bits, stochastic rounding (arXiv 1610.02132)"

    rounding: str = _rounding("stochastic")


@dataclass(frozen=True)
class DecentralizedSettings(AlgorithmSettings):
    """Decentralized SGD (Bagua, arXiv 2107.01499): models averaged with a peer that changes every time."""

    name: ClassVar[str] = "decentralized"
    summary: ClassVar[str] = "decentralized SGD, models averaged with one peer (Bagua, arXiv 2107.01499)"

    peers: str = setting("shift_one", "whose models a model is averaged with", choices=("shift_one", "all"))
    hierarchical: bool = _hierarchical()
    interval: int = _interval()

    def schedule(self) -> Schedule:
        """Exchange every ``interval`` steps."""
        return Schedule(self.interval, self.interval, lockstep=self.interval == 1)


@dataclass(frozen=True)
class LowPrecisionDecentralizedSettings(AlgorithmSettings):
    """DCD-PSGD (arXiv 1803.06443): neighbors in a fixed graph send the changes of their models in 8 bits."""

    name: ClassVar[str] = "low_precision_decentralized"
    summary: ClassVar[str] = "DCD-PSGD, neighbors send model changes in 8 bits (arXiv 1803.06443)"

    topology: str = setting("ring", "the graph of neighbors", choices=("ring", "all"))
    hierarchical: bool = _hierarchical()
    interval: int = _interval()
    rounding: str = _rounding("stochastic")
    block: int = _block()

    def schedule(self) -> Schedule:
        """Exchange every ``interval`` steps."""
        return Schedule(self.interval, self.interval, lockstep=self.interval == 1)


@dataclass(frozen=True)
class ElasticSettings(AlgorithmSettings):
    """EASGD (arXiv 1412.6651): workers and a master that all hold a copy of attract each other."""

    name: ClassVar[str] = "elastic"
    summary: ClassVar[str] = "elastic averaging SGD (arXiv 1412.6651)"

    period: int = _period()
    strength: float = setting(
        0.43, "beta: how far the master moves to the mean; a worker moves by beta / workers", low=0, high=1
    )

    def schedule(self) -> Schedule:
        """Exchange every ``period`` steps."""
        return Schedule(self.period, self.period)


@dataclass(frozen=True)
class LocalSettings(AlgorithmSettings):
    """Local SGD (arXiv 1805.09767): models are averaged now and then, with an outer optimizer if wanted."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "local SGD, models averaged now and then (arXiv 1805.09767)"

    period: int = _period()
    outer_lr: float = setting(1.0, "learning rate of the outer step; 1 without momentum: the mean", low=0)
    outer_momentum: float = setting(0.0, "Nesterov momentum of the outer step", low=0, high=1)
    compression: str = _compression("the models' changes")
    block: int = _block()

    def schedule(self) -> Schedule:
        """Exchange every ``period`` steps."""
        return Schedule(self.period, self.period)


@dataclass(frozen=True)
class DiLoCoSettings(LocalSettings):
    """DiLoCo (arXiv 2311.08105): local SGD with an outer Nesterov step; ``local`` with other defaults."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "DiLoCo, local SGD with an outer Nesterov step (arXiv 2311.08105)"

    outer_lr: float = setting(0.7, "learning rate of the outer step", low=0)
    outer_momentum: float = setting(0.9, "Nesterov momentum of the outer step", low=0, high=1)


ALGORITHMS: Mapping[str, type[AlgorithmSettings]] = {
    cls.name: cls
    for cls in (
        LeaderSettings,
        ByteGradSettings,
        QSGDSettings,
        DecentralizedSettings,
        LowPrecisionDecentralizedSettings,
        AllReduceSettings,
        ElasticSettings,
        LocalSettings,
        DiLoCoSettings,
    )
}
"""Settings of each algorithm by its name."""


def fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of a settings class by name, in order."""
    return {f.name: f for f in dataclasses.fields(cls)}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` with the most similar of ``names``, or a list of them all if none is."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(names)}"


def checked(cls: type, name: str, value: Any, origin: str) -> Any:
    """Return ``value`` as the type of the setting ``name`` of ``cls``; texts (from flags, variables) are converted.

    Raises:
        ConfigError: it is of another type or out of range; the message names ``origin``.
    """
    spec = fields(cls)[name]
    kind = typing.get_type_hints(cls)[name]
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    converted = _converted(kind, value)
    if converted is None:
        raise ConfigError(f"{origin}: {name} = {value!r} is not {wanted}")
    meta = spec.metadata
    if meta["choices"] and converted not in meta["choices"]:
        raise ConfigError(f"{origin}: {name} = {value!r}; {nearest(str(value), meta['choices'])}")
    if kind in (int, float) and not meta["low"] <= converted <= meta["high"]:
        raise ConfigError(f"{origin}: {name} = {value!r} is not in {span(spec)}")
    return converted


def same_form(one: Any, other: Any) -> bool:
    """Return whether two algorithms' settings differ in nothing but what may change while a run goes on."""
    if type(one) is not type(other):
        return False
    free = _changeable(type(one))
    return all(getattr(one, n) == getattr(other, n) for n in fields(type(one)) if n not in free)


def _changeable(cls: type) -> list[str]:
    kinds = typing.get_type_hints(cls)
    return [n for n, spec in fields(cls).items() if kinds[n] in (int, float) and not spec.metadata["fixed"]]


def changed(settings: Any, name: str, text: str) -> Any:
    """Return ``settings`` with one numeric setting changed, as while a run goes on.

    Raises:
        ConfigError: there is no such setting, it cannot be changed in a run, or the value is wrong.
    """
    known = fields(type(settings))
    free = _changeable(type(settings))
    if name not in free:
        known_but = "cannot be changed while the run goes on" if name in known else "is unknown"
        raise ConfigError(f"{name} {known_but}; {nearest(name, free)}")
    return dataclasses.replace(settings, **{name: checked(type(settings), name, text, "lsgd set")})


def span(spec: dataclasses.Field[Any]) -> str:
    """Return the range or choices of a setting for people."""
    meta = spec.metadata
    if meta["choices"]:
        return " | ".join(meta["choices"])
    low, high = (f"{bound:.15g}" for bound in (meta["low"], meta["high"]))
    if low == "-inf" and high == "inf":
        return ""
    return f"{low} … {high}" if high != "inf" else f"at least {low}"


def _converted(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
                value.lower()
            )
        return value if isinstance(value, bool) else None
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    try:
        number = kind(value) if isinstance(value, str) else value
        if kind is float and isinstance(number, int | float):
            return float(number) if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
    return number if isinstance(number, kind) else None
