"""The plan: put together from flags, variables, a file and defaults, and the same after every trip."""

import json
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.codecs import CODECS, OWN_BLOCK
from lsgd.codecs.plain import Float16
from lsgd.errors import ConfigError
from lsgd.plan.plan import (
    OTHER_VARIABLES,
    Phase,
    Plan,
    algorithm_of,
    assemble,
    check_variables,
    flag,
    read,
    setting_names,
    table_of,
    variable,
)
from lsgd.plan.run import RunSettings
from lsgd.settings import GONE, fields
from tests import golden

FILE = """
workers = 4
iterations = 4000
seconds = 30

[algorithm]
name = "leader"
period = 32
pull_global = 0.5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(FILE)
    return path


def test_defaults() -> None:
    sourced = read(None, {}, {})
    assert sourced.plan == Plan() == Plan(RunSettings(), (Phase(LocalSettings()),))
    assert all(origin == "default" for _, _, origin in sourced.rows())


def test_a_file_of_a_windows_editor(path: Path) -> None:
    plan = read(path, {}, {}).plan
    path.write_bytes(FILE.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read(path, {}, {}).plan == plan


def test_another_algorithm_leaves_the_settings_of_the_files_one(path: Path) -> None:
    plan = read(path, {"LSGD_ALGORITHM": "bytegrad"}, {}).plan
    assert (plan.algorithm.name, plan.run.iterations) == ("bytegrad", 4000)
    assert read(path, {"LSGD_ALGORITHM": "local"}, {"period": "8"}).plan.algorithm == LocalSettings(period=8)
    same = read(path, {"LSGD_ALGORITHM": "leader"}, {}).plan.algorithm
    assert isinstance(same, LeaderSettings) and same.period == 32


def test_flag_before_variable_before_file_before_default(path: Path) -> None:
    environ = {"LSGD_ITERATIONS": "500", "LSGD_PERIOD": "48", "PATH": "/bin", "LSGD_NODE": "1"}
    sourced = read(path, environ, {"iterations": 60, "period": None, "lease_s": "3"})
    run, algorithm = sourced.plan.run, sourced.plan.algorithm
    assert isinstance(algorithm, LeaderSettings)
    assert (run.workers, run.iterations, run.seconds, run.lease_s) == (4, 60, 30.0, 3.0)
    assert (algorithm.period, algorithm.pull_global, algorithm.local_period) == (48, 0.5, 16)
    rows = {name: (value, origin) for name, value, origin in sourced.rows()}
    assert rows["workers"] == ("4", f"the plan {path}")
    assert rows["iterations"] == ("60", "flag --iterations")
    assert rows["lease_s"] == ("3.0", "flag --lease-s")
    assert rows["algorithm.period"] == ("48", "variable LSGD_PERIOD")
    assert rows["algorithm.pull_global"] == ("0.5", f"the plan {path}")
    assert rows["algorithm.name"] == ('"leader"', f"the plan {path}")
    assert rows["algorithm.local_period"] == ("16", "default")
    assert rows["buffers"] == ('"average"', "default")


def test_rows_are_every_setting_once_in_order() -> None:
    names = [name for name, _, _ in read(None, {}, {"algorithm": "qsgd"}).rows()]
    qsgd = [f"algorithm.{name}" for name in fields(ALGORITHMS["qsgd"])]
    assert names == [*fields(RunSettings), "algorithm.name", *qsgd]


@pytest.mark.parametrize(
    ("environ", "flags", "origin"),
    [
        ({"LSGD_ALGORITHM": "qsgd"}, {}, "variable LSGD_ALGORITHM"),
        ({}, {"algorithm": "qsgd"}, "flag --algorithm"),
    ],
)
def test_the_algorithm_is_chosen_like_any_other_setting(
    environ: dict[str, str], flags: dict[str, str], origin: str
) -> None:
    sourced = read(None, environ, {"block": 0, **flags})
    assert sourced.plan.algorithm == ALGORITHMS["qsgd"](block=0)
    assert sourced.origins["algorithm.name"] == origin
    assert sourced.origins["algorithm.block"] == "flag --block"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("itertions = 3", golden.text("plan.mean_iterations")),
        ("period = 3", golden.text("plan.period_below_algorithm")),
        ("zzz = 3", golden.text("plan.unknown_setting")),
        ("[[phases]]", golden.text("plan.mean_phase")),
        ("workers = 'two'", golden.text("plan.no_integer", setting=": workers = 'two'")),
        ("workers = -1", ": workers = -1 is not in 0 … 100000"),
        ("seconds = nan", ": seconds = nan is not a number"),
        ("buffers = 'averge'", ": buffers = 'averge'; did you mean 'average'?"),
        ("sync_optimizer = 1", ": sync_optimizer = 1 is not true or false"),
        ("[algorithm]\nperid = 3", ": the algorithm local has no setting 'perid'; did you mean 'period'?"),
        (
            "[algorithm]\nworkers = 3",
            ": the algorithm local has no setting 'workers'; write workers = ... above [algorithm]",
        ),
        ("[algorithm]\nname = 'leder'", ": algorithm 'leder' is unknown; did you mean 'leader'?"),
        ("[algorithm]\nname = ['leader']", ": algorithm ['leader'] is unknown; did you mean 'leader'?"),
        ("[algorithm]\nname = 3", ": algorithm 3 is unknown; known: allreduce, "),
        ("[algorithm]\nname = 'leader'\npull_local = 2", ": pull_local = 2 is not in 0 … 1"),
        ("[algorithm]\nperiod = [1, 2]", golden.text("plan.no_integer", setting=": period = [1, 2]")),
        ("algorithm = 'qsgd'", golden.text("plan.algorithm_no_table")),
        ("workers = ", " is not TOML: Invalid value"),
        ("workers = 1\nworkers = 2", " is not TOML: Cannot overwrite a value"),
        ("\x00", " is not TOML: "),
        (f"workers = {'[' * 5000}", " is not TOML: "),
        (f"iterations = {'9' * 5000}", " is not TOML: "),
    ],
)
def test_a_wrong_file_says_where_what_and_what_is_right(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path, {}, {})
    assert str(error.value).startswith(f"the plan {path}{problem}")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"workers = \xff")
    with pytest.raises(ConfigError, match=golden.pattern("plan.no_toml")):
        read(path, {}, {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("plan.no_file")):
        read(tmp_path / "none.toml", {}, {})
    with pytest.raises(ConfigError, match=golden.pattern("plan.directory")):
        read(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"LSGD_PEROD": "3"}, "the variable LSGD_PEROD is unknown; did you mean 'LSGD_PERIOD'?"),
        ({"LSGD_LOCL_RANK": "3"}, "the variable LSGD_LOCL_RANK is unknown; did you mean 'LSGD_LOCAL_RANK'?"),
        ({"LSGD_PERIOD": "many"}, golden.text("plan.no_integer", setting="variable LSGD_PERIOD: period = 'many'")),
        ({"LSGD_WORKERS": ""}, golden.text("plan.no_integer", setting="variable LSGD_WORKERS: workers = ''")),
        (
            {"LSGD_ALGORITHM": "x"},
            "variable LSGD_ALGORITHM: algorithm 'x' is unknown; known: allreduce, ",
        ),
        (
            {"LSGD_ALGORITHM": "allreduce", "LSGD_PERIOD": "3"},
            "variable LSGD_PERIOD: the algorithm allreduce has no setting 'period'; known: bucket_mib",
        ),
    ],
)
def test_wrong_variables(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(None, environ, {})
    assert str(error.value).startswith(problem)


def test_variables_of_others_and_of_places_are_left_alone() -> None:
    environ = dict.fromkeys(["PATH", "LSG", "MY_LSGD_PERIOD", *OTHER_VARIABLES], "?")
    check_variables(environ)
    assert read(None, environ, {}).plan == Plan()


def test_wrong_flags() -> None:
    with pytest.raises(ConfigError, match=golden.pattern("plan.flag_range")):
        read(None, {}, {"algorithm": "leader", "pull_global": 3})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('transport = "nccl"', golden.text("plan.nccl_cannot")),
        ('[algorithm]\nname = "qsgd"', golden.text("plan.qsgd_on_gpu")),
        ('[[phase]]\niterations = 9\n[[phase]]\nname = "allreduce"', "allreduce exchanges gradients"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"offload = true\n{text}")
    with pytest.raises(ConfigError, match=f"offload = true, but .*{words}"):
        read(path, {}, {})
    assert read(path, {}, {"offload": "false"}).plan.transport in ("nccl", "auto")


@pytest.mark.parametrize(("name", "above"), [("offline_iterations", ""), ("growth_coefficient", "[algorithm]\n")])
def test_a_setting_that_is_gone_names_what_does_its_work(tmp_path: Path, name: str, above: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"{above}{name} = 8\n")
    with pytest.raises(ConfigError, match=re.escape(f"{name!r}; {GONE[name]}")):
        read(path, {}, {})
    with pytest.raises(ConfigError, match=re.escape(f"LSGD_{name.upper()} is unknown; {GONE[name]}")):
        check_variables({f"LSGD_{name.upper()}": "8"})


def test_only_algorithms_that_say_so_are_for_sharded_models() -> None:
    class Other(LocalSettings):
        name: ClassVar[str] = "other"
        islands: ClassVar[bool] = False

    own = tuple(Phase(settings(), 1) for settings in ALGORITHMS.values())
    assert not Plan(phases=own).obstacle_to_islands()
    assert golden.text("plan.not_made_for") in Plan(phases=(*own, Phase(Other()))).obstacle_to_islands()


@pytest.mark.parametrize(
    ("period", "local_period"), [("8", 8), ("20", 10), ("48", 16), ("17", 17), ("1", 1), ("64", 16)]
)
def test_a_period_given_alone_brings_its_local_period(period: str, local_period: int) -> None:
    sourced = read(None, {"LSGD_PERIOD": period, "LSGD_ALGORITHM": "leader"}, {})
    algorithm = sourced.plan.algorithm
    assert isinstance(algorithm, LeaderSettings)
    assert (algorithm.period, algorithm.local_period) == (int(period), local_period)
    rows = {name: origin for name, _, origin in sourced.rows()}
    derived = "default" if local_period == 16 else "period, by variable LSGD_PERIOD"
    assert rows["algorithm.local_period"] == derived


@pytest.mark.parametrize("name", ["leader", "local"])
def test_auto_is_a_period_wherever_a_plan_is_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'[algorithm]\nname = "{name}"\nperiod = "auto"')
    by_flag = read(None, {}, {"algorithm": name, "period": "auto"})
    by_file = read(path, {}, {})
    plan = read(None, {"LSGD_PERIOD": "auto", "LSGD_ALGORITHM": name}, {}).plan
    assert plan == by_flag.plan == by_file.plan == Plan.from_json(plan.to_json())
    assert plan.algorithm.period == 0 and plan.loss_window == (16 if name == "leader" else 1)  # type: ignore[attr-defined]
    assert ("algorithm.period", '"auto"', f"the plan {path}") in by_file.rows()
    path.write_text(plan.to_toml())
    assert 'period = "auto"' in path.read_text() and read(path, {}, {}).plan == plan


def test_auto_is_a_delay_and_a_share_to_keep(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[algorithm]\nname = "local"\ndelay = "auto"')
    plan = read(path, {}, {}).plan
    assert plan == read(None, {}, {"delay": "auto"}).plan == read(None, {"LSGD_DELAY": "auto"}, {}).plan
    assert plan.algorithm.delay_is_auto and plan.algorithm.schedule().delay == 0
    path.write_text(plan.to_toml())
    assert {'delay = "auto"', 'keep = "auto"'} <= {*path.read_text().splitlines()} and read(path, {}, {}).plan == plan
    with pytest.raises(ConfigError, match=golden.pattern("plan.negative_delay")):
        read(None, {}, {"algorithm": "leader", "delay": "-1"})


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=golden.pattern("plan.no_multiple")):
        read(None, {}, {"algorithm": "leader", "period": 64, "local_period": 48})


PHASES = """
[[phase]]
name = "allreduce"
iterations = 200

[[phase]]
name = "leader"
period = 32
"""


def test_phases_follow_one_another(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PHASES)
    sourced = read(path, {"LSGD_WORKERS": "3"}, {})
    first, second = sourced.plan.phases
    assert (first.algorithm, first.iterations) == (ALGORITHMS["allreduce"](), 200)
    assert (second.algorithm, second.iterations) == (LeaderSettings(period=32), 0)
    assert sourced.plan.algorithm == first.algorithm and sourced.plan.run.workers == 3
    rows = {name: (value, origin) for name, value, origin in sourced.rows()}
    assert rows["phase1.iterations"] == ("200", f"the plan {path}")
    assert rows["phase2.period"] == ("32", f"the plan {path}")
    assert rows["phase2.local_period"] == ("16", "default")


@pytest.mark.parametrize(
    ("text", "environ", "problem"),
    [
        (
            PHASES,
            {"LSGD_PERIOD": "3"},
            "variable LSGD_PERIOD: the plan {} has phases; set period in the [[phase]]",
        ),
        ("[algorithm]\n[[phase]]", {}, golden.text("plan.both", plan="{}")),
        ("phase = 3", {}, golden.text("plan.phase_no_tables", plan="{}")),
        ("phase = []", {}, golden.text("plan.phase_no_tables", plan="{}")),
        ("phase = [3]", {}, golden.text("plan.phase_no_tables", plan="{}")),
        (
            "[[phase]]\n[[phase]]",
            {},
            golden.text("plan.phase_iterations", plan="{}", value=0),
        ),
        (
            "[[phase]]\niterations = true\n[[phase]]",
            {},
            golden.text("plan.phase_iterations", plan="{}", value=True),
        ),
        (
            "[[phase]]\niterations = 9\n[[phase]]\niterations = -5",
            {},
            golden.text("plan.last_phase_iterations", plan="{}", setting="phase2.iterations = -5"),
        ),
        (
            f"[[phase]]\niterations = {10**400}\n[[phase]]",
            {},
            golden.text("plan.phase_iterations", plan="{}", value=10**400),
        ),
        (
            f"iterations = {10**400}",
            {},
            f"the plan {{}}: iterations = {10**400} is beyond 1,000,000,000,000,000",
        ),
        (
            "[[phase]]\niterations = 3",
            {},
            golden.text("plan.last_phase_iterations", plan="{}", setting="algorithm.iterations = 3"),
        ),
        (
            "[[phase]]\niterations = 9\n[[phase]]\nname = 'qsg'",
            {},
            "the plan {}: algorithm 'qsg' is unknown; did you mean 'qsgd'?",
        ),
    ],
)
def test_wrong_phases(tmp_path: Path, text: str, environ: dict[str, str], problem: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(path, environ, {})
    assert str(error.value).startswith(problem.format(path))


def test_an_algorithm_by_its_table() -> None:
    settings = LeaderSettings(period=32)
    assert table_of(settings)["name"] == "leader"
    assert algorithm_of(table_of(settings), "here") == settings
    with pytest.raises(ConfigError, match=golden.pattern("plan.here_range")):
        algorithm_of({"name": "leader", "pull_local": 2}, "here")


def test_every_setting_has_one_flag_and_one_variable() -> None:
    names = setting_names()
    assert names[0] == "algorithm" and len(set(names)) == len(names)
    assert {*fields(RunSettings), *fields(LeaderSettings)} < set(names)
    assert len({variable(n) for n in names} | OTHER_VARIABLES) == len(names) + len(OTHER_VARIABLES)
    assert (flag("pull_global"), variable("pull_global")) == ("--pull-global", "LSGD_PULL_GLOBAL")


def drawn(draw: st.DrawFn, cls: type) -> Any:
    """Return settings of a class with every value drawn from its range."""
    values: dict[str, Any] = {}
    for name, field in fields(cls).items():
        low, high = field.metadata["low"], min(field.metadata["high"], 1e15)
        kind = type(field.default)
        if field.metadata["choices"]:
            values[name] = draw(st.sampled_from(list(field.metadata["choices"])))
        elif kind is bool:
            values[name] = draw(st.booleans())
        elif kind is float:
            values[name] = draw(st.floats(low, high))
        else:
            values[name] = draw(st.integers(int(low), int(high)))
    if "local_period" in values:
        values["local_period"] = draw(st.integers(1, 1000))
        values["period"] = values["local_period"] * draw(st.integers(1, 1000))
    if "fragments" in values:
        values["period"] = values["fragments"] * draw(st.integers(1, 1000))
    if "delay" in values:
        between = values.get("local_period") or values["period"] // values["fragments"]
        values["delay"] = draw(st.integers(0, between - 1))
    if values.get("divisor") == "contributors":
        values["compression"] = "topk"
    if "codec" in values and not CODECS[values["codec"]].stochastic:
        values["rounding"] = "nearest"
    if "block" in values:
        codec = values.get("codec") or values["compression"]
        powers = [1 << exponent for exponent in range(3, 17)]  # which all codecs with blocks take
        sizes = powers if "block" in fields(CODECS[codec]) else []
        values["block"] = draw(st.sampled_from([OWN_BLOCK, *sizes]))
    return cls(**values)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    lengths = [*draw(st.lists(st.integers(1, 10**9), max_size=2)), 0]
    algorithms = st.sampled_from(list(ALGORITHMS.values()))
    phases = [Phase(drawn(draw, draw(algorithms)), length) for length in lengths]
    run = drawn(draw, RunSettings)
    if run.transport == "nccl" or any(phase.algorithm.schedule().identical for phase in phases):
        run = replace(run, offload=False)
    return Plan(run, tuple(phases))


@given(plans())
def test_a_plan_is_the_same_after_every_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    table = tomllib.loads(plan.to_toml())
    again = assemble(table, origin="the file")
    assert again.plan == plan
    sections = {
        "algorithm": table.pop("algorithm", {}),
        **{f"phase{i}": section for i, section in enumerate(table.pop("phase", []), start=1)},
    }
    inside = {f"{section}.{name}": v for section, values in sections.items() for name, v in values.items()}
    assert {name: json.loads(value) for name, value, _ in again.rows()} == table | inside
    assert {origin for _, _, origin in again.rows()} == {"the file"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", golden.text("plan.no_json_value")),
        ("{", golden.text("plan.no_json_name")),
        ("[" * 100_000, golden.text("plan.json_too_deep")),
        ("[]", golden.text("plan.no_json_object", kind="list")),
        ("3", golden.text("plan.no_json_object", kind="int")),
        ("null", golden.text("plan.no_json_object", kind="NoneType")),
        ('{"algorithm": 3}', golden.text("plan.servers_algorithm")),
        ('{"workers": 1.5}', golden.text("plan.no_integer", setting="the server's plan: workers = 1.5")),
        ('{"seconds": NaN}', "the server's plan: seconds = nan is not a number"),
        ('{"wrokers": 1}', golden.text("plan.servers_workers")),
    ],
)
def test_what_is_no_plan(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        Plan.from_json(text)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(
    ("loss_window", "algorithm", "window"),
    [(0, LeaderSettings(), 16), (5, LeaderSettings(), 5), (0, ALGORITHMS["allreduce"](), 1)],
)
def test_the_loss_window_is_the_local_period_unless_set(
    loss_window: int, algorithm: LeaderSettings, window: int
) -> None:
    assert Plan(RunSettings(loss_window=loss_window), (Phase(algorithm),)).loss_window == window


@dataclass(frozen=True)
class Soft(LeaderSettings):
    """An algorithm of another package."""

    name: ClassVar[str] = "soft"


@dataclass(frozen=True)
class Mine(Float16):
    """A codec of another one."""

    name: ClassVar[str] = "mine"


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, cls in ((ALGORITHMS, Soft), (CODECS, Mine)):
        monkeypatch.setitem(registry.classes, cls.name, cls)
        monkeypatch.setitem(registry.requirements, cls.name, f"lsgd-{cls.name}==0.1.0")


def test_a_plan_names_the_packages_that_it_needs(others: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "packages" not in Plan().to_json()
    plan = Plan(phases=(Phase(Soft(), 4), Phase(LeaderSettings(compression="mine"))))
    text = plan.to_json()
    assert plan.packages() == json.loads(text)["packages"] == ["lsgd-mine==0.1.0", "lsgd-soft==0.1.0"]
    assert Plan.from_json(text) == plan
    monkeypatch.delitem(ALGORITHMS.classes, "soft")
    with pytest.raises(ConfigError) as error:
        Plan.from_json(text)
    assert str(error.value).startswith(golden.text("plan.servers_plan"))
    assert str(error.value).endswith(golden.text("plan.install_two"))


@pytest.mark.parametrize("packages", [None, 3, [], [3], ["x; rm -rf ~"], ["--index-url=http://a b==1"], ["-r==1"]])
def test_nobody_is_told_to_type_what_is_no_package(packages: object) -> None:
    with pytest.raises(ConfigError) as error:
        Plan.from_json(json.dumps({"algorithm": {"name": "soft"}, "packages": packages}))
    assert "pip install" not in str(error.value)
