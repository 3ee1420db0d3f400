"""Exchanges in stages: what overlaps, and in which order."""

import pytest

from lsgd.collectives.pipeline import Pipeline
from lsgd.errors import ExchangeError


def test_each_new_one_takes_those_before_it_one_stage_further():
    done = []

    def exchange(name):
        done.append(f"{name}0")
        yield
        done.append(f"{name}1")
        yield
        done.append(f"{name}2")

    pipeline = Pipeline()
    for name in "abc":
        pipeline.start(exchange(name))
    assert done == ["a0", "b0", "a1", "c0", "b1", "a2"]
    pipeline.complete()
    assert done[6:] == ["c1", "b2", "c2"]
    pipeline.complete()
    assert len(done) == 9


def test_what_was_under_way_when_one_failed_is_dropped():
    done = []

    def exchange(failing):
        yield
        if failing:
            raise ExchangeError("the link broke")
        done.append("too much")

    pipeline = Pipeline()
    pipeline.start(exchange(True))
    with pytest.raises(ExchangeError, match="the link broke"):
        pipeline.start(exchange(False))
    pipeline.complete()
    assert done == []
