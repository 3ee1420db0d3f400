"""What machines are worth on a link; tests/test_benchmarks.py compares it with what was measured."""

import pytest

from lsgd.errors import ConfigError
from lsgd.plan.estimate import lines, link_of, number_of, worth_of
from tests import golden


def test_a_slower_link_is_worth_less_and_a_hopeless_one_is_said() -> None:
    fast, slow = (worth_of(25_000_000, 0.1, link_of(text), 10_000) for text in ("1gbit", "10mbit"))
    assert all(a.times > b.times for a, b in zip(fast, slow, strict=True))
    assert "not worth it" in lines(100_000_000, 0.001, link_of("1mbit"), 1000)[1]


def test_texts() -> None:
    assert str(link_of("100mbit,20ms")) == "100 Mbit/s, 20 ms" and link_of("1gbit").bits_per_s == 1e9
    assert (number_of("100M"), number_of("1.5B"), number_of("1000")) == (100_000_000, 1_500_000_000, 1000)
    for wrong in ("fast", "0mbit", "1.2.3mbit", "...mbit", "٣mbit"):
        with pytest.raises(ConfigError, match=golden.pattern("check.no_such_link")):
            link_of(wrong)
    for wrong in ("many", "1.2.3M", ".", "0", "٣M"):
        with pytest.raises(ConfigError, match="is no number"):
            number_of(wrong)
