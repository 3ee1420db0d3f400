"""Settings: each declared once, complete for people, and checked for type and range."""

import dataclasses
import math
import typing

import pytest

from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.leader import LeaderSettings
from lsgd.algorithms.local import LocalSettings
from lsgd.errors import ConfigError
from lsgd.plan.run import RunSettings
from lsgd.settings import AlgorithmSettings, changed, checked, fields, nearest, same_form, setting, span
from tests import golden

ALL = [RunSettings, *ALGORITHMS.values()]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One setting of each kind."""

    count: int = setting(1, "a count", low=0, high=10)
    share: float = setting(0.5, "a share", low=0, high=1)
    any_number: float = setting(0.0, "any number")
    at_least: int = setting(3, "no upper end", low=3)
    often: int = setting(4, "one that the servers may choose", low=1, high=10, auto=0)
    later: int = setting(0, "one without an upper end that may be chosen", low=0, auto=-1)
    part: float = setting(-1.0, "a share that the worker may choose", low=0, high=1, auto=-1)
    flag: bool = setting(False, "a flag")
    kind: str = setting("average", "a choice", choices=("average", "keep"))
    text: str = setting("", "free text")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_setting_is_complete_and_its_default_is_right(cls: type) -> None:
    for name, field in fields(cls).items():
        assert field.metadata["meaning"], name
        assert typing.get_type_hints(cls)[name] in (int, float, bool, str), name
        value = checked(cls, name, field.default, "default")
        assert value == field.default and type(value) is typing.get_type_hints(cls)[name], name


@pytest.mark.parametrize("cls", ALGORITHMS.values(), ids=lambda cls: cls.__name__)
def test_every_algorithm_says_what_it_is_and_when_it_wants_rounds(cls: type[AlgorithmSettings]) -> None:
    assert ALGORITHMS[cls.name] is cls and cls.summary
    schedule = cls().schedule()
    assert 1 <= schedule.local_period <= schedule.period
    assert schedule.period % schedule.local_period == 0
    assert not schedule.lockstep or schedule.period == 1


@pytest.mark.parametrize("text", ["\u0663", "\uff18", "1_000", "0x10", " 1", "1e308", "inf", "", "1e"])
@pytest.mark.parametrize("name", ["count", "any_number"])
def test_a_number_is_written_in_ascii_digits_and_bounded(name, text) -> None:
    with pytest.raises(ConfigError, match=f"lsgd set: {name} = "):
        changed(Sample(), {name: text})
    assert changed(Sample(), {"any_number": "-2.5e3"}).any_number == -2500.0
    assert changed(Sample(), {"count": "+7", "share": ".5"}) == Sample(count=7, share=0.5)
    with pytest.raises(ConfigError, match="seconds = '1e308' is beyond 1,000,000,000,000,000"):
        changed(RunSettings(), {"seconds": "1e308"})


def test_no_setting_of_the_run_is_one_of_an_algorithm() -> None:
    """Flags and variables have one name each."""
    of_algorithms = {name for cls in ALGORITHMS.values() for name in fields(cls)}
    assert not of_algorithms & {*fields(RunSettings), "algorithm", "name"}


def test_an_algorithm_without_a_schedule_is_none() -> None:
    bare = AlgorithmSettings()
    for verb in (bare.schedule, lambda: bare.sent_nbytes(1, 1), lambda: bare.create([])):
        with pytest.raises(NotImplementedError):
            verb()


@pytest.mark.parametrize("cls", ALGORITHMS.values(), ids=lambda cls: cls.__name__)
def test_every_algorithm_says_what_it_sends(cls: type[AlgorithmSettings]) -> None:
    """Nothing where it is alone, and more for a larger model; tests/lsgd/test_sent_bytes.py counts it."""
    settings = cls()
    assert 0 < settings.sent_nbytes(1000, 3) < settings.sent_nbytes(2000, 3)
    assert settings.sent_nbytes(1000, 1) == 0


def test_a_codec_is_named_with_its_parameters() -> None:
    for text in ("none", "float16", "minmax8", "minmax8:block=512"):
        assert checked(LocalSettings, "compression", text, "flag") == text
    names = ["float16", "levels1", "levels2", "minmax4", "minmax8", "none", "topk"]
    assert span(fields(LocalSettings)["compression"]).split(" | ") == names
    with pytest.raises(ConfigError) as error:
        checked(LocalSettings, "compression", "minmx8", "flag --compression")
    assert str(error.value) == (golden.text("plan.unknown_codec"))


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("count", 3, 3),
        ("count", "3", 3),
        ("count", 10, 10),
        ("often", "auto", 0),
        ("often", 0, 0),
        ("part", "auto", -1.0),
        ("part", -1.0, -1.0),
        ("part", 0, 0.0),
        ("often", "3", 3),
        ("share", 1, 1.0),
        ("share", "1e-3", 0.001),
        ("any_number", -1e15, -1e15),
        ("flag", True, True),
        ("flag", "true", True),
        ("flag", "YES", True),
        ("flag", "1", True),
        ("flag", "False", False),
        ("flag", "0", False),
        ("flag", "no", False),
        ("kind", "keep", "keep"),
        ("text", "", ""),
    ],
)
def test_right_values(name: str, value: object, result: object) -> None:
    got = checked(Sample, name, value, "flag")
    assert got == result and type(got) is type(result)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("count", "three", golden.text("plan.no_integer", setting="count = 'three'")),
        ("count", "3.0", golden.text("plan.no_integer", setting="count = '3.0'")),
        ("count", "", golden.text("plan.no_integer", setting="count = ''")),
        ("count", 3.0, golden.text("plan.no_integer", setting="count = 3.0")),
        ("count", True, golden.text("plan.no_integer", setting="count = True")),
        ("count", None, golden.text("plan.no_integer", setting="count = None")),
        ("count", [3], golden.text("plan.no_integer", setting="count = [3]")),
        ("count", 11, "count = 11 is not in 0 … 10"),
        ("count", "-1", "count = '-1' is not in 0 … 10"),
        ("often", "0", "often = '0' is not in auto | 1 … 10"),
        ("later", "-3", "later = '-3' is not auto | at least 0"),
        ("part", "-1", "part = '-1' is not in auto | 0 … 1"),
        ("often", False, golden.text("plan.no_integer_or_auto", setting="often = False")),
        ("often", "Auto", golden.text("plan.no_integer_or_auto", setting="often = 'Auto'")),
        ("count", "auto", golden.text("plan.no_integer", setting="count = 'auto'")),
        ("at_least", 2, "at_least = 2 is not at least 3"),
        ("at_least", "1" + 20 * "0", f"at_least = '{10**20}' is beyond 1,000,000,000,000,000"),
        ("share", 1e300, "share = 1e+300 is not in 0 … 1"),
        ("share", "half", "share = 'half' is not a number"),
        ("share", math.nan, "share = nan is not a number"),
        ("share", "inf", "share = 'inf' is not a number"),
        ("share", False, "share = False is not a number"),
        ("share", 1.001, "share = 1.001 is not in 0 … 1"),
        ("flag", "maybe", "flag = 'maybe' is not true or false"),
        ("flag", 1, "flag = 1 is not true or false"),
        ("kind", "averag", "kind = 'averag'; did you mean 'average'?"),
        ("kind", "xyz", "kind = 'xyz'; known: average, keep"),
        ("kind", 1, "kind = 1 is not a string"),
    ],
)
def test_wrong_values_say_where_what_and_what_is_right(name: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked(Sample, name, value, "the plan p.toml")
    assert str(error.value) == f"the plan p.toml: {problem}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("count", "0 … 10"),
        ("at_least", "at least 3"),
        ("often", "auto | 1 … 10"),
        ("later", "auto | at least 0"),
        ("part", "auto | 0 … 1"),
        ("any_number", ""),
        ("flag", ""),
        ("kind", "average | keep"),
    ],
)
def test_ranges_in_words(name: str, text: str) -> None:
    assert span(fields(Sample)[name]) == text


def test_nearest_name() -> None:
    assert nearest("perod", ["period", "seconds"]) == golden.text("plan.mean_period")
    assert nearest("zzz", ["b", "a"]) == "known: a, b"


@pytest.mark.parametrize(
    ("period", "local_period"),
    [(64, 48), (16, 64), (1, 2)],
)
def test_local_period_divides_period(period: int, local_period: int) -> None:
    problem = golden.pattern("plan.set_local_period", period=period, local_period=local_period)
    with pytest.raises(ConfigError, match=problem):
        LeaderSettings(period=period, local_period=local_period)


def test_a_delay_ends_before_the_next_round() -> None:
    assert LeaderSettings(delay=15).delay == 15
    assert LeaderSettings(period=1, local_period=1).delay == 0
    with pytest.raises(ConfigError, match=golden.pattern("plan.delay_too_long")):
        LeaderSettings(delay=16)


def test_a_numeric_setting_is_changed_in_a_running_run() -> None:
    settings = LeaderSettings(period=32)
    assert changed(settings, {"pull_global": "0.3"}) == LeaderSettings(period=32, pull_global=0.3)
    assert changed(settings, {"period": "48"}) == LeaderSettings(period=48)
    together = changed(settings, {"period": "20", "local_period": "10"})
    assert together == LeaderSettings(period=20, local_period=10)
    assert settings.period == 32


def test_a_switch_is_changed_in_a_running_run_unless_what_is_kept_depends_on_it() -> None:
    settings = LocalSettings()
    other = changed(settings, {"drop_outliers": "false", "rescale": "no"})
    assert (other.drop_outliers, other.rescale) == (False, False) and same_form(settings, other)
    assert not same_form(settings, LocalSettings(hierarchical=False))
    with pytest.raises(ConfigError, match=golden.pattern("plan.fixed")):
        changed(settings, {"hierarchical": "false"})


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("compression", "minmax8", golden.text("plan.fixed_setting", setting="compression")),
        ("delay", "3", golden.text("plan.fixed_setting", setting="delay")),
        ("pul_global", "0.3", "pul_global is unknown; did you mean 'pull_global'?"),
        ("pull_global", "3", "lsgd set: pull_global = '3' is not in 0 … 1"),
        ("period", "20", golden.text("plan.no_multiple_20")),
    ],
)
def test_what_cannot_be_changed_in_a_running_run(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        changed(LeaderSettings(), {name: text})
    assert str(error.value).startswith(problem)
