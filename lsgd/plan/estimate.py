"""What more machines are worth on a link, from a step's time and the model's size: the formula of the period's cost."""

import re
from dataclasses import dataclass

from lsgd.algorithms.common import GAIN, Exchange, best_schedule, period_cost
from lsgd.codecs import codec_of
from lsgd.errors import ConfigError

OFF = 0.16
"""By how much the formula was off at most (benchmarks/results/endtoend.md, What the estimate says)."""

MACHINES = (2, 3, 4)

CODEC = "levels2"
"""Of what is exchanged: the default."""

_WRITTEN = r"([0-9]+\.?[0-9]*|\.[0-9]+)"
_LINK = re.compile(rf"{_WRITTEN}\s*(k|m|g)?bit(?:/s)?(?:\s*,\s*{_WRITTEN}\s*ms)?", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_NUMBER = re.compile(rf"{_WRITTEN}\s*([kmb]?)", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Link:
    """A link between two machines: bits and seconds one way."""

    bits_per_s: float
    latency_s: float = 0.0

    def __str__(self) -> str:
        latency = f", {1e3 * self.latency_s:g} ms" if self.latency_s else ""
        return f"{self.bits_per_s / 1e6:g} Mbit/s{latency}"


def link_of(text: str) -> Link:
    """Return the link that a text such as ``100mbit,20ms`` says.

    Raises:
        ConfigError: it says none.
    """
    if (found := _LINK.fullmatch(text.strip())) is None or float(found[1]) <= 0:
        raise ConfigError(f"{text!r} is no link: write its bits a second and, if you like, its delay, as 100mbit,20ms")
    return Link(float(found[1]) * _UNITS[(found[2] or "").lower()], float(found[3] or 0) / 1e3)


def number_of(text: str) -> int:
    """Return the number that a text such as ``100M`` says; raise a ConfigError if it says none."""
    found = _NUMBER.fullmatch(text.strip())
    number = int(float(found[1]) * _TIMES[found[2].lower()]) if found else 0
    if number < 1:
        raise ConfigError(f"{text!r} is no number from 1 on: write it as 25000000, 100M or 1.5B")
    return number


@dataclass(frozen=True)
class Worth:
    """What some machines do in the time of one.

    Args:
        machines: how many.
        period: with which this is, in iterations.
        delay: with which this is, in iterations.
        slower: how many times as long a step takes with its share of a round.
        times: as fast as one machine, to the same loss.
    """

    machines: int
    period: int
    delay: int
    slower: float
    times: float

    @property
    def least(self) -> float:
        """The lower end of the range."""
        return self.times * (1 - OFF)

    @property
    def most(self) -> float:
        """The upper end of the range."""
        return self.times * (1 + OFF)


def worth_of(parameters: int, step_s: float, link: Link, steps: float, *, muon: bool = False) -> list[Worth]:
    """Return what 2, 3 and 4 machines are worth, each with the period of the least cost, which ``auto`` takes.

    Args:
        parameters: of the model, those that train.
        step_s: time of an iteration, in seconds.
        link: of each machine.
        steps: of one machine, in the whole run.
        muon: whether the optimizer is Muon, with which a round may be hidden behind steps (``delay = "auto"``).
    """
    found = []
    for machines in MACHINES:
        nbytes = codec_of(CODEC).element_nbytes * parameters * 2 * (machines - 1) / machines
        transfer_s, waiting_s = 8 * nbytes / link.bits_per_s, 4 * link.latency_s
        exchange = Exchange(waiting_s / step_s, transfer_s / step_s)
        own = steps / machines
        period, delay = best_schedule(exchange, machines, own, delay=None if muon else 0)
        cost = period_cost(period, exchange, machines, own, delay=delay)
        slower = 1 + exchange.cost(delay) / period
        found.append(Worth(machines, period, delay, slower, (1 + GAIN * (machines - 1)) / cost))
    return found


def lines(parameters: int, step_s: float, link: Link, steps: float, *, muon: bool = False) -> list[str]:
    """Return lines that say what machines are worth; the arguments are those of :func:`worth_of`."""
    head = f"with {parameters:,} parameters, {1e3 * step_s:.3g} ms a step and {link}, to the loss of one machine's "
    head += f"{steps:,.0f} steps{' with Muon' if muon else ''}:"
    rows = [
        f"  {each.machines} machines are {max(each.least, 0):.2g} to {each.most:.2g} times as fast as one, "
        f"with a period of {each.period}"
        + (f" and a delay of {each.delay}" if each.delay else "")
        + ("" if each.times > 1 else ": not worth it, take larger steps or a faster link")
        for each in worth_of(parameters, step_s, link, steps, muon=muon)
    ]
    return [head, *rows]
