"""Settings, each declared once: name, type, default, range and meaning.

The settings of a run and of each algorithm (``lsgd/algorithms/``) are frozen dataclasses. Their fields define the keys
of the plan file, the flags of ``lsgd-server``, the ``LSGD_*`` variables and the help texts. Nothing here imports torch,
because the servers use it too.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from lsgd.errors import ConfigError

AUTO = "auto"
"""The word for a setting's value that leaves the choice to lsgd."""

LARGEST = 10**15
"""The largest number in a setting: messages, JSON and floats can hold it, and sums and products of some."""

GONE = {
    "growth_coefficient": "it is gone: give the period itself, which closing_share shortens towards the end of the run",
    "offline_iterations": "it is gone: a worker waits for its servers, and another node takes over in seconds; "
    "server_timeout_s says for how long it waits",
}
"""Settings of earlier versions, and what to use instead."""

_WRITTEN = {int: re.compile(r"[+-]?[0-9]+"), float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")}
"""How flags, variables and ``lsgd set`` write numbers: Python would read 1_000 and the digits of other scripts, too."""

_KINDS: dict[Any, Any] = {kind.__name__: kind for kind in (int, float, bool, str)}

if TYPE_CHECKING:
    from lsgd.algorithms.base import Algorithm, Flat


def setting(
    default: Any,
    meaning: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: Collection[str] = (),
    valid: Callable[[Any], object] | None = None,
    fixed: bool = False,
    auto: int | None = None,
) -> Any:
    """Declare a setting: its default, its meaning, its range (inclusive, within :data:`LARGEST`) or its choices.

    A ``fixed`` setting cannot be changed during a run, because what is sent or kept depends on it. ``valid``
    raises ConfigError for a wrong value, for rules that ``choices`` cannot express. ``auto``: a value outside the
    range, which is written :data:`AUTO` and leaves the choice to the servers or the worker; None: there is none.
    """
    if type(default) in (int, float):
        low, high = max(low, -LARGEST), min(high, LARGEST)
    metadata = dict(meaning=meaning, low=low, high=high, choices=choices, valid=valid, fixed=fixed, auto=auto)
    return field(default=default, metadata=metadata)


class Schedule(NamedTuple):
    """When an algorithm needs rounds.

    Attributes:
        period: iterations of a worker, on average, between two global rounds.
        local_period: the same for rounds inside a node; equal to ``period`` if there are none.
        lockstep: every iteration is a round, so all workers make the same number of them.
        identical: all workers have the same model at all times; a generation begins with one member's model for all.
        election: who leads a round, a rule of :mod:`lsgd.election`.
        delay: iterations from a round until its result is applied.
        parts: of the model, of which each round exchanges one, in turn.
        common: all workers know the model of the last round, so one that has missed rounds comes back with what it has
            learned since; elsewhere that is lost.
    """

    period: int
    local_period: int
    lockstep: bool = False
    identical: bool = False
    election: str = "loss"
    delay: int = 0
    parts: int = 1
    common: bool = False


@dataclass(frozen=True)
class AlgorithmSettings:
    """Base of every algorithm's settings; servers know nothing else of an algorithm."""

    name: ClassVar[str]
    summary: ClassVar[str]

    elects: ClassVar[bool] = False
    """Whether an elected worker gives others its model."""

    islands: ClassVar[bool] = False
    """Whether workers with sharded models can use it: all its changes are in its
    :class:`~lsgd.algorithms.base.Commit`, and numbers are judged by `Commit.judged` and `is_finite` only."""

    def schedule(self) -> Schedule:
        """Return when the algorithm needs rounds."""
        raise NotImplementedError

    @property
    def period_is_auto(self) -> bool:
        """Whether the servers choose the period."""
        return False

    @property
    def delay_is_auto(self) -> bool:
        """Whether the servers choose the delay."""
        return False

    def with_delay(self, delay: int) -> Self:
        """Return the settings with this delay; called if the servers choose it."""
        raise NotImplementedError

    def at(self, progress: float | None, period: int | None = None) -> Self:
        """Return the settings until the next global round.

        ``progress`` is None if the run has no end, or several phases; ``period`` is the servers' choice, if any.
        """
        return self

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """Return the bytes that a worker sends per iteration, on average, each worker on a node of its own."""
        raise NotImplementedError

    def create(self, parameters: "Flat", run: str = "") -> "Algorithm":
        """Return the algorithm with these settings, in its initial state; only workers call it, not servers.

        An algorithm that keeps a model of its own copies the parameters. ``run`` is part of the seeds of rounding.
        """
        raise NotImplementedError


def fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings of a settings class by name, in order."""
    return {f.name: f for f in dataclasses.fields(cls)}


def values(settings: Any) -> dict[str, Any]:
    """Return the values of ``settings`` by name, in order."""
    return {name: getattr(settings, name) for name in fields(type(settings))}


def _kind(spec: dataclasses.Field[Any]) -> Any:
    """Return the type of a setting, which is its name where annotations are not evaluated."""
    return _KINDS.get(spec.type, spec.type)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``did you mean ...?`` with the most similar of ``names``, or a list of all if none is similar."""
    if name in GONE:
        return GONE[name]
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def checked(cls: type, name: str, value: Any, origin: str) -> Any:
    """Return ``value`` in the type of the setting ``name`` of ``cls``; strings (from flags, variables) are converted.

    Raises ConfigError, which names ``origin``, if it has the wrong type or is out of range.
    """
    spec = fields(cls)[name]
    meta, kind = spec.metadata, _kind(spec)
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]
    if meta["auto"] is not None:
        if value == AUTO or (value == meta["auto"] and type(value) is kind):
            return kind(meta["auto"])
        wanted += f", or {AUTO}"
    converted = _converted(kind, value)
    if converted is None:
        raise ConfigError(f"{origin}: {name} = {value!r} is not {wanted}")
    if meta["valid"]:
        try:
            meta["valid"](converted)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {name} = {value!r}: {error}") from None
    elif meta["choices"] and converted not in meta["choices"]:
        raise ConfigError(f"{origin}: {name} = {value!r}; {nearest(str(value), meta['choices'])}")
    if kind in (int, float) and not meta["low"] <= converted <= meta["high"]:
        raise ConfigError(f"{origin}: {name} = {value!r} is {_outside(spec, converted)}")
    return converted


def _outside(spec: dataclasses.Field[Any], number: float) -> str:
    """Return what is wrong with a number outside a setting's range."""
    if abs(number) > LARGEST == spec.metadata["high"]:
        return f"beyond {LARGEST:,}"
    wanted = span(spec)
    return f"not {'' if 'at least' in wanted else 'in '}{wanted}"


def same_form(one: Any, other: Any) -> bool:
    """Return whether two algorithms' settings differ only in values that may change during a run."""
    if type(one) is not type(other):
        return False
    free = changeable(type(one))
    return all(getattr(one, n) == getattr(other, n) for n in fields(type(one)) if n not in free)


def changeable(cls: type) -> list[str]:
    """Return the settings of a settings class that ``lsgd set`` can change during a run: numbers and switches."""
    return [n for n, spec in fields(cls).items() if _kind(spec) is not str and not spec.metadata["fixed"]]


def changed(settings: Any, changes: Mapping[str, str], others: Collection[str] = ()) -> Any:
    """Return ``settings`` with these changed, all or none, as ``lsgd set`` does during a run.

    Raises ConfigError if there is no such setting (``others`` are known elsewhere), it cannot be changed during a run,
    or a value is wrong.
    """
    cls = type(settings)
    free = changeable(cls)
    for name in changes:
        if name not in free:
            known_but = "cannot be changed during a run" if name in fields(cls) else "is unknown"
            raise ConfigError(f"{name} {known_but}; {nearest(name, [*free, *others])}")
    values = {name: checked(cls, name, text, "lsgd set") for name, text in changes.items()}
    return dataclasses.replace(settings, **values)


def shown(spec: dataclasses.Field[Any], value: Any) -> Any:
    """Return a setting's value as in a plan file."""
    return AUTO if value == spec.metadata["auto"] else value


def span(spec: dataclasses.Field[Any]) -> str:
    """Return the range or choices of a setting, for help texts and messages."""
    meta = spec.metadata
    if meta["choices"]:
        return " | ".join(meta["choices"])
    low, high = (f"{bound:.15g}" if abs(bound) < LARGEST else "" for bound in (meta["low"], meta["high"]))
    if not low and not high:
        return ""
    word = "" if meta["auto"] is None else f"{AUTO} | "
    return word + (f"{low} … {high}" if high else f"at least {low}")


def _converted(kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower())
        return value if isinstance(value, bool) else None
    if kind is str:
        return value if isinstance(value, str) else None
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and not _WRITTEN[kind].fullmatch(value):
        return None
    try:
        number = kind(value) if isinstance(value, str) else value
        if kind is float and isinstance(number, int | float):
            return float(number) if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None
    return number if isinstance(number, kind) else None
