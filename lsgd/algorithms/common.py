"""Settings that several algorithms share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from lsgd.codecs import CODECS, OWN_BLOCK, Codec, codec_of
from lsgd.errors import ConfigError
from lsgd.settings import AlgorithmSettings, Schedule, setting

GAIN = 0.7
"""How many machines' worth each further worker adds, if workers exchange in every step."""

HALF, LONGEST_HALF = 0.6, 256
"""The period that halves this gain: so many times the root of a worker's steps in the run, and at most so many."""

STALE = 1.5
"""A step of delay costs in learning with Muon what so many steps more between exchanges do."""

LONGEST_DELAY = 0.5
"""The longest delay that servers choose, in periods; longer ones were not measured."""

BESIDE = 0.3
"""Share of its time that a transfer beside training still costs, in processor time and memory bandwidth."""


def period(between: str = "exchanges", default: int = 64) -> Any:
    """Declare a period; with ``auto``, which is 0, the server chooses it."""
    return setting(default, f"iterations of a worker, on average, between {between}", low=1, high=1 << 30, auto=0)


@dataclass(frozen=True, kw_only=True)
class Periodic(AlgorithmSettings):
    """Base of the settings of algorithms that exchange models every ``period``, which may change during a run."""

    period: int = period()
    warm_share: float = setting(
        0.0, "share of the run, at its start, in which the period doubles from 1 to its value; 0: none", low=0, high=0.5
    )
    closing_share: float = setting(
        0.0, "share of the run, at its end, in which the period halves down to 1; 0: none", low=0, high=0.5
    )

    def schedule(self) -> Schedule:
        """Exchange every ``period`` steps; with ``auto`` every step until the server chooses a period."""
        return Schedule(self.period or 1, self.period or 1)

    @property
    def period_is_auto(self) -> bool:
        """Whether the servers choose the period."""
        return not self.period

    def with_period(self, period: int) -> Self:
        """Return the settings with this period, or the nearest valid one."""
        return dataclasses.replace(self, period=period)

    def at(self, progress: float | None, period: int | None = None) -> Self:
        """Return the settings with this period, shortened if the run is on a ramp."""
        most = self.period if period is None else period
        return self.with_period(ramp(most, progress, self.warm_share, self.closing_share))


def ramp(period: int, progress: float | None, warm_share: float, closing_share: float) -> int:
    """Return the period at a share of the run: powers of two on the two ramps, ``period`` between them.

    On a ramp the period is proportional to the distance from that end of the run: each power of two p lasts for p
    times the same share (1 for twice that), so a ramp has about log2(period) times as many rounds as it would without.
    """
    if progress is None:
        return period
    rise = progress / warm_share if warm_share else 1.0
    fall = (1.0 - progress) / closing_share if closing_share else 1.0
    reached = int(period * min(rise, fall, 1.0))
    return period if reached >= period else 1 << (max(1, reached).bit_length() - 1)


class Exchange(NamedTuple):
    """How long a round takes, over the time of a step.

    Attributes:
        waiting: the part that nothing hides: until all have come, and the servers have said so.
        transfer: the part that training can hide.
        parts: of the model, of which a round exchanges one.
    """

    waiting: float
    transfer: float = 0.0
    parts: int = 1

    def cost(self, delay: int) -> float:
        """Return how many steps' time it costs if its result is applied so many steps later."""
        hidden = min(self.transfer, delay)
        return self.waiting + self.transfer - hidden + BESIDE * hidden


def period_cost(period: int, exchange: Exchange, workers: int, steps: float = math.inf, *, delay: int = 0) -> float:
    """Return how long a run takes with this period and delay, over workers that exchange in every step for nothing.

    It is the product of two costs. An exchange makes a step longer, by ``exchange.cost(delay) / period``. And with rare
    exchanges more steps are needed: of what N workers gain over one, ``0.7 (N - 1)`` machines' worth,
    ``rare / (rare + h)`` is lost, with ``rare = parts period + 1.5 delay``. So a period of h loses half of it, and an
    endless one leaves N workers with what one machine learns. h is 0.6 times the root of a worker's ``steps``, those in
    the whole run.

    The constants are fits to trainings of one to four workers (benchmarks/results/convergence.md).
    """
    gain, half = GAIN * (max(workers, 2) - 1), half_period(steps)
    kept = half / (exchange.parts * period + STALE * delay + half)
    return (1 + exchange.cost(delay) / period) * (1 + gain) / (1 + gain * kept)


def half_period(steps: float) -> float:
    """Return the period at which workers keep half of what they gain, in a run of so many steps each."""
    return max(1.0, min(HALF * math.sqrt(steps), LONGEST_HALF))


def periods(steps: float, delay: int | None = None, parts: int = 1) -> range:
    """Return the periods that can be chosen: above a given delay, and at most twice what halves the gain."""
    least = (delay or 0) + 1
    return range(least, max(int(2 * half_period(steps) / parts), least) + 1)


def best_schedule(
    exchange: Exchange, workers: int, steps: float = math.inf, *, period: int | None = None, delay: int | None = 0
) -> tuple[int, int]:
    """Return the period and the delay of the least :func:`period_cost`, or the best ones beside a given one.

    A period that is chosen is one of :func:`periods`. A chosen delay is none, or hides the whole transfer, or is as
    long as :data:`LONGEST_DELAY` allows: a period's cost has no minimum between these, since its first factor falls by
    the same amount with each step of delay, and its second one is concave.
    """
    hides = math.ceil(exchange.transfer)

    def delays(period: int) -> list[int]:
        return [0, min(hides, int(LONGEST_DELAY * period))] if delay is None else [delay]

    pairs = [(p, d) for p in ([period] if period else periods(steps, delay, exchange.parts)) for d in delays(p)]
    return min(pairs, key=lambda pair: period_cost(pair[0], exchange, workers, steps, delay=pair[1]))


def hierarchical() -> Any:
    """Declare whether the workers of a node average first."""
    return setting(True, "average at full precision inside a node, then exchange between nodes only", fixed=True)


@dataclass(frozen=True, kw_only=True)
class Gossip(AlgorithmSettings):
    """Base of the settings of algorithms that exchange models with neighbors, by default every step."""

    islands: ClassVar[bool] = True

    hierarchical: bool = hierarchical()
    interval: int = setting(1, "optimizer steps of a worker, on average, between exchanges", low=1, high=1 << 30)

    def schedule(self) -> Schedule:
        """Exchange every ``interval`` steps."""
        return Schedule(self.interval, self.interval, lockstep=self.interval == 1)


def codec(default: str, what: str) -> Any:
    """Declare the codec of ``what``."""
    meaning = f"codec for {what}, optionally with parameters: minmax8:block=512"
    return setting(default, meaning, choices=CODECS, valid=codec_of)


def block() -> Any:
    """Declare the block size of codecs; one that has no parameter of this name refuses it."""
    meaning = f"elements per block of the codec; 0: all elements of a message; {OWN_BLOCK}: the codec's own default"
    return setting(OWN_BLOCK, meaning, low=OWN_BLOCK, high=1 << 30, fixed=True)


def delay(what: str, auto: int | None = None) -> Any:
    """Declare how long after a round its result is applied; ``auto`` stands for a delay that the server chooses."""
    meaning = f"{what} this many iterations after its round, to hide the transfer"
    return setting(0 if auto is None else auto, meaning, low=0, fixed=auto is None, auto=auto)


def rounding(default: str) -> Any:
    """Declare how a codec rounds."""
    meaning = "to the nearest code, or at random to one of the two neighbors, without bias"
    return setting(default, meaning, choices=("nearest", "stochastic"))


def rounding_codec(text: str, block: int, rounding: str) -> Codec:
    """Return the codec for these settings; raise ConfigError if it is unknown or does not support this rounding."""
    codec = codec_of(text, block)
    if rounding == "stochastic" and not codec.stochastic:
        raise ConfigError(
            f"rounding = 'stochastic', but the codec {codec.name} only rounds to nearest; set rounding to nearest"
        )
    return codec
