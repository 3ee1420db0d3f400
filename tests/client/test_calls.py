"""A call that all workers make together, as one worker's requests say it: with the mean of its processes."""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lsgd.client.iteration.grants import GrantClient, Report
from lsgd.client.iteration.reports import Stopwatch
from lsgd.errors import LsgdError
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Generation, Go, Met, Request, Round

ROUND = Round(7, Generation.of(1, [(0, 0)], "tcp"), "global", 0, (0,), 0, (), 0, False)


class Bench:
    """The head of an island of two, whose servers answer as the test says."""

    def __init__(self, other: dict[str, float]) -> None:
        self.asked: list[Request] = []
        self.answers: deque[Any] = deque()
        island = SimpleNamespace(is_head=True, decide=self.decide)
        channel = SimpleNamespace(ask=self.ask, recalled=lambda: False)
        plan = SimpleNamespace(run=RunSettings())
        welcome = SimpleNamespace(world_size=1)
        membership: Any = SimpleNamespace(island=island, channel=channel, plan=plan, welcome=welcome, who=("w", 1))
        election: Any = SimpleNamespace(loss=lambda done, committed: None, rate=lambda done: None)
        self.other = other
        self.grants = GrantClient(membership, election, Stopwatch())

    def decide(self, what: str, report: Any, decision: Any, *, reports: bool) -> Any:
        return decision(lambda: [report(), Report(None, 0, None, self.other)])

    def ask(self, request: Request, *_: Any, **__: Any) -> Any:
        self.asked.append(request)
        return self.answers.popleft()

    def next(self) -> Any:
        self.grants.want_only_round()
        return self.grants.next((0, 0), lockstep=False, look=None, again=False)


def test_each_request_of_a_call_has_the_mean_of_the_processes() -> None:
    bench = Bench({"val": 3.0})
    bench.answers += [Go(1, ROUND, 0.5), Met(1, {"val": 5.0}, 2)]
    bench.grants.call({"val": 1.0})
    decision = bench.next()
    assert bench.grants.take(decision.answer) and bench.grants.met is None
    bench.next()
    assert bench.grants.met == Met(1, {"val": 5.0}, 2)
    assert [(r.call, r.numbers, r.last) for r in bench.asked] == [(1, {"val": 2.0}, True)] * 2
    assert [r.seq for r in bench.asked] == [1, 2]


def test_no_numbers_of_the_processes_are_too_much_for_their_head() -> None:
    bench = Bench({"up": -math.inf, "far": 1.7e308})
    bench.answers.append(Met(1, {}, 2))
    bench.grants.call({"up": math.inf, "far": 1.7e308})
    bench.next()
    assert bench.asked[0].numbers == pytest.approx({"up": math.nan, "far": math.inf}, nan_ok=True)


def test_after_a_call_requests_are_as_before() -> None:
    bench = Bench({})
    bench.answers += [Met(1, {}, 2), Go(2, None, 0.5)]
    bench.grants.call({})
    bench.next()
    assert bench.grants.next((0, 0), lockstep=False, look=None, again=False).answer == Go(2, None, 0.5)
    assert (bench.asked[-1].seq, bench.asked[-1].call, bench.asked[-1].last) == (2, 0, False)


def test_a_call_that_was_interrupted_is_not_made_in_the_next_request() -> None:
    bench = Bench({})
    bench.answers += [Go(1, ROUND, 0.5), Go(2, None, 0.5)]
    bench.grants.call({})
    bench.next()
    bench.grants.end_call()
    bench.grants.next((0, 0), lockstep=False, look=None, again=False)
    assert [(r.call, r.last) for r in bench.asked] == [(1, True), (0, False)]


def test_processes_that_average_different_numbers_are_an_error() -> None:
    bench = Bench({"other": 3.0})
    bench.grants.call({"val": 1.0})
    with pytest.raises(LsgdError, match="numbers of different names"):
        bench.next()
