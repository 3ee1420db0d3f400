"""The plan: the settings of the whole run. The global server holds it and gives it to every worker.

Precedence: flag, ``LSGD_*`` variable, TOML file, default. The file::

    workers = 4
    iterations = 4000

    [algorithm]
    name = "leader"
    period = 64

Instead of ``[algorithm]``, a plan may have several ``[[phase]]`` tables in order; each but the last has ``iterations``.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.local import LocalSettings
from lsgd.codecs import CODECS
from lsgd.errors import ConfigError
from lsgd.output import MARKS_DETAILS
from lsgd.plan.run import RunSettings
from lsgd.settings import GONE, LARGEST, AlgorithmSettings, checked, fields, nearest, shown, values

VARIABLE_PREFIX = "LSGD_"
OTHER_VARIABLES = frozenset(
    {"LSGD_LOCAL", "LSGD_NODE", "LSGD_RANK", "LSGD_LOCAL_RANK", "LSGD_DEVICE", "LSGD_RUN_DIR", "LSGD_PLAN"}
    | {"LSGD_TOKEN", "LSGD_KEYS", "LSGD_RESUME", "LSGD_RESTARTED", "LSGD_SOLO", "LSGD_ISLAND", "LSGD_CHECK"}
    | {"LSGD_VERBOSE", MARKS_DETAILS}
)
"""Variables that are not settings of the plan: the place of a process, its keys, and its checkpoints."""


DEFAULT = LocalSettings
"""The algorithm of a plan that names none. benchmarks/results/convergence.md has the figures behind the choice."""


@dataclass(frozen=True)
class Phase:
    """A part of the run: its algorithm, and its length in iterations of all workers (0: to the end of the run)."""

    algorithm: AlgorithmSettings = field(default_factory=DEFAULT)
    iterations: int = 0


@dataclass(frozen=True)
class Plan:
    """Settings of the run, and of its algorithm, or of several in order."""

    run: RunSettings = field(default_factory=RunSettings)
    phases: tuple[Phase, ...] = (Phase(),)

    def __post_init__(self) -> None:
        if self.run.offload:
            self._check_offload()

    def _check_offload(self) -> None:
        if self.run.transport == "nccl":
            raise ConfigError(
                "offload = true, but transport = 'nccl' cannot send from the CPU's memory; set transport to auto or tcp"
            )
        names = [p.algorithm.name for p in self.phases if p.algorithm.schedule().identical]
        if names:
            raise ConfigError(
                f"offload = true, but {names[0]} exchanges gradients, which stay on the GPU; choose a method that "
                f"exchanges models"
            )

    @property
    def transport(self) -> str:
        """The setting ``transport``; with ``auto``, offloaded models travel over TCP."""
        return "tcp" if self.run.offload and self.run.transport == "auto" else self.run.transport

    @property
    def algorithm(self) -> AlgorithmSettings:
        """The algorithm of the first phase."""
        return self.phases[0].algorithm

    @property
    def loss_window(self) -> int:
        """Number of batches over which the reported loss is averaged."""
        return self.run.loss_window or self.algorithm.schedule().local_period

    def obstacle_to_islands(self) -> str:
        """Return why workers with sharded models cannot take part; empty if they can."""
        names = [phase.algorithm.name for phase in self.phases if not phase.algorithm.islands]
        return f"the algorithm {names[0]} is not made for that; choose another one, such as local" if names else ""

    def to_json(self) -> str:
        """Return the plan as JSON text, for :meth:`from_json`, with the packages that it needs besides lsgd."""
        tables, packages = self.tables(), self.packages()
        phases = {"phase": tables} if len(tables) > 1 else {"algorithm": tables[0]}
        needed = {"packages": packages} if packages else {}
        return json.dumps({**values(self.run), **phases, **needed})

    def packages(self) -> list[str]:
        """Return what pip installs for algorithms and codecs that are not lsgd's own."""
        algorithms = [phase.algorithm for phase in self.phases]
        needed = {ALGORITHMS.requirement(algorithm.name) for algorithm in algorithms}
        for algorithm in algorithms:
            for name, spec in fields(type(algorithm)).items():
                if spec.metadata["choices"] is CODECS:
                    needed.add(CODECS.requirement(getattr(algorithm, name).partition(":")[0]))
        return sorted(needed - {""})

    def tables(self) -> list[dict[str, Any]]:
        """Return the tables of the phases as the plan file has them; just the algorithm's if there is one phase."""
        tables = [_shown_table(phase.algorithm) for phase in self.phases]
        if len(tables) == 1:
            return tables
        return [table | {"iterations": phase.iterations} for table, phase in zip(tables, self.phases, strict=True)]

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Return the plan in ``text``, with all its values checked.

        Raises:
            ConfigError: it is not a plan, or needs packages that are not installed here.
        """
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the plan is not JSON: {error}") from None
        if not isinstance(table, dict):
            raise ConfigError(f"the plan is not a JSON object but a {type(table).__name__}")
        packages = table.pop("packages", None)
        try:
            return assemble(table, origin="the server's plan").plan
        except ConfigError as error:
            if not isinstance(packages, list) or not all(map(_is_requirement, packages)) or not packages:
                raise
            raise ConfigError(
                f"{error}; install here what the servers have: pip install {' '.join(packages)}"
            ) from None

    def to_toml(self) -> str:
        """Return the plan as a TOML file with every setting."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in values(self.run).items()]
        for table in self.tables():
            lines += ["", "[[phase]]" if len(self.phases) > 1 else "[algorithm]"]
            lines += [f"{name} = {json.dumps(value)}" for name, value in table.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Sourced:
    """A plan, with the origin of each setting's value (``workers``, ``algorithm.period``, ``phase2.period``)."""

    plan: Plan
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (setting, value in TOML, origin) for each setting, in the plan's order."""
        every, tables = values(self.plan.run), self.plan.tables()
        for number, table in enumerate(tables, start=1):
            section = f"phase{number}" if len(tables) > 1 else "algorithm"
            every |= {f"{section}.{name}": value for name, value in table.items()}
        return [(name, json.dumps(value), self.origins.get(name, "default")) for name, value in every.items()]


def table_of(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return an algorithm's name and settings as its table in a plan."""
    return {"name": settings.name, **values(settings)}


def _shown_table(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the table as a plan file has it."""
    known = fields(type(settings))
    return {n: shown(known[n], value) if n in known else value for n, value in table_of(settings).items()}


def algorithm_of(table: Mapping[str, Any], origin: str) -> AlgorithmSettings:
    """Return the settings in such a table.

    Raises:
        ConfigError: an unknown algorithm or setting, or a wrong value; the message names ``origin``.
    """
    return _algorithm({name: (value, origin) for name, value in table.items()})


def _is_requirement(text: Any) -> bool:
    """Return whether this is safe in a command line that a user copies: ``name==version``."""
    return isinstance(text, str) and re.fullmatch(r"\w[\w.-]*==[\w.+!]+", text, re.ASCII) is not None


def flag(name: str) -> str:
    """Return the flag of a setting: ``--pull-global``."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting: ``LSGD_PULL_GLOBAL``."""
    return VARIABLE_PREFIX + name.upper()


def read(
    path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], called: str = "flag {flag}"
) -> Sourced:
    """Return the plan from a file (or none), the variables in ``environ``, and ``flags`` by setting name.

    An error calls a flag what ``called`` says, with its ``name`` or its ``flag``.

    Raises:
        ConfigError: the file cannot be read, a name is unknown, or a value is wrong; it says where, and what is right.
    """
    table: Mapping[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"the plan {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
            raise ConfigError(f"the plan {path} is not TOML: {error}") from None
    return assemble(table, origin=f"the plan {path}", environ=environ, flags=_from_flags(flags, called))


def assemble(
    table: Mapping[str, Any],
    *,
    origin: str,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Any, str]] | None = None,
) -> Sourced:
    """Return the plan from a table (as in the file), variables and flags; ``origin`` names the table in errors.

    Flags come with their names in errors.

    The settings of the table's algorithm do not apply if a variable or a flag names another one.
    """
    run = {name: (value, origin) for name, value in table.items() if name not in ("algorithm", "phase")}
    overrides = {**_from_variables(environ or {}), **(flags or {})}
    run |= {name: sourced for name, sourced in overrides.items() if name in fields(RunSettings)}
    chosen = {"name" if n == "algorithm" else n: s for n, s in overrides.items() if n not in fields(RunSettings)}
    sections = _phase_tables(table, origin)
    if chosen and len(sections) > 1:
        name, (_, where) = next(iter(chosen.items()))
        raise ConfigError(f"{where}: {origin} has phases; set {name} in the [[phase]] where it belongs")
    phases, origins = [], {key: where for key, (_, where) in run.items()}
    for number, section in enumerate(sections, start=1):
        other = "name" in chosen and chosen["name"][0] != section.get("name", DEFAULT.name)
        own = {} if other else {name: (value, origin) for name, value in section.items()}
        sourced = own | chosen
        _derive_local_period(sourced)
        prefix = f"phase{number}" if len(sections) > 1 else "algorithm"
        origins |= {f"{prefix}.{name}": where for name, (_, where) in sourced.items()}
        iterations, _ = sourced.pop("iterations", (0, ""))
        last = number == len(sections)
        if type(iterations) is not int or not (iterations == 0 if last else 1 <= iterations <= LARGEST):
            wanted = "the last phase has no iterations of its own" if last else f"a whole number from 1 to {LARGEST:,}"
            raise ConfigError(f"{origin}: {prefix}.iterations = {iterations!r}; {wanted}")
        phases.append(Phase(_algorithm(sourced), iterations))
    return Sourced(Plan(_settings(RunSettings, run), tuple(phases)), origins)


def _phase_tables(table: Mapping[str, Any], origin: str) -> list[Mapping[str, Any]]:
    """Return the tables of the plan's phases; just one if it has only an algorithm."""
    if "phase" not in table:
        section = table.get("algorithm", {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"{origin}: algorithm must be a table; write [algorithm] and below it name = {section!r}")
        return [section]
    if "algorithm" in table:
        raise ConfigError(f"{origin}: it has both [algorithm] and [[phase]]; move the algorithm into the phases")
    sections = table["phase"]
    if not isinstance(sections, list) or not sections or not all(isinstance(s, Mapping) for s in sections):
        raise ConfigError(f"{origin}: phase must be a list of tables; write [[phase]] above each")
    return sections


def _algorithm(sourced: Mapping[str, tuple[Any, str]]) -> AlgorithmSettings:
    """Return the settings of the algorithm that ``sourced`` names, the default if it names none."""
    settings = dict(sourced)
    name, named_by = settings.pop("name", (DEFAULT.name, "default"))
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ConfigError(f"{named_by}: {ALGORITHMS.unknown(name)}")
    algorithm: AlgorithmSettings = _settings(ALGORITHMS[name], settings)
    return algorithm


def _derive_local_period(sourced: dict[str, tuple[Any, str]]) -> None:
    """If a period is given alone, add the largest local period up to the default that divides it, or itself."""
    cls = ALGORITHMS.get(str(sourced.get("name", (DEFAULT.name, ""))[0]))
    if cls is None or "period" not in sourced or "local_period" not in fields(cls).keys() - sourced.keys():
        return
    period, default = checked(cls, "period", *sourced["period"]), cls().schedule().local_period
    if period % default:
        divisors = [n for n in range(2, default) if period % n == 0]
        sourced["local_period"] = (max(divisors, default=period), f"period, by {sourced['period'][1]}")


def _settings(cls: Any, sourced: Mapping[str, tuple[Any, str]]) -> Any:
    known = fields(cls)
    read = {}
    for name, (value, origin) in sourced.items():
        if name not in known:
            whose = f"the algorithm {cls.name}" if hasattr(cls, "name") else "the run"
            raise ConfigError(f"{origin}: {whose} has no setting {name!r}; {_hint(cls, name)}")
        read[name] = checked(cls, name, value, origin)
    return cls(**read)


def _hint(cls: Any, name: str) -> str:
    """Return where an unknown setting of ``cls`` belongs, or the most similar known one."""
    if cls is RunSettings and any(name in fields(other) for other in ALGORITHMS.values()):
        return f"write {name} = ... below [algorithm]"
    if cls is not RunSettings and name in fields(RunSettings):
        return f"write {name} = ... above [algorithm]"
    tables = ("algorithm", "phase") if cls is RunSettings else ()
    return nearest(name, [*fields(cls), *tables])


def setting_names() -> list[str]:
    """Return every name that a flag or variable can set, ``algorithm`` included."""
    inside = (name for cls in ALGORITHMS.values() for name in fields(cls))
    return list(dict.fromkeys(["algorithm", *fields(RunSettings), *inside]))


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown variable that begins with ``LSGD_``, which is likely a typo."""
    names, gone = {*map(variable, setting_names()), *OTHER_VARIABLES}, {variable(name): name for name in GONE}
    for key in environ:
        if key.startswith(VARIABLE_PREFIX) and key not in names:
            raise ConfigError(f"the variable {key} is unknown; {nearest(gone.get(key, key), names)}")


def _from_variables(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    check_variables(environ)
    names = {variable(name): name for name in setting_names()}
    return {names[key]: (value, f"variable {key}") for key, value in environ.items() if key in names}


def _from_flags(flags: Mapping[str, Any], called: str) -> dict[str, tuple[Any, str]]:
    given = {name: value for name, value in flags.items() if value is not None}
    return {name: (value, called.format(name=name, flag=flag(name))) for name, value in given.items()}
