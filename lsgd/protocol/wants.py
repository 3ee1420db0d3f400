"""What a worker asks for; a request says one of these."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration, and the round before it if one is due."""


@dataclass(frozen=True, slots=True)
class More:
    """Iterations beyond the present one.

    They are granted at once, or the request is forgotten: a worker that has none left asks for a :class:`Step` with the
    same number.
    """


@dataclass(frozen=True, slots=True)
class Round:
    """A round without an iteration, after which the worker leaves."""


@dataclass(frozen=True, slots=True)
class End:
    """The run's last round: the worker's own loop is over, and a round has what it learned."""


@dataclass(frozen=True, slots=True)
class Call:
    """The answer of a call that all workers make together; until then rounds, without iterations.

    Args:
        number: of the call; a later one of this worker has a higher number.
        numbers: what to average, by name; empty: the worker only waits.
        aside: whether rounds continue without it meanwhile: it has other weights than it trains.
    """

    number: int
    numbers: dict[str, float] = field(default_factory=dict)
    aside: bool = False


STEP = Step()

Want = Step | More | Round | End | Call
"""What a request says; its position is its kind on the wire."""
