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
from lsgd.protocol import wants
from lsgd.protocol.messages import Generation, Go, Met, Request, Round
from tests import golden

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

    def next(self, want: wants.Want) -> Any:
        self.grants.ask_for(want)
        return self.grants.next((0, 0), lockstep=False, look=None, again=False)


def test_each_request_of_a_call_has_the_mean_of_the_processes() -> None:
    bench = Bench({"val": 3.0})
    bench.answers += [Go(1, ROUND, 0.5), Met(1, {"val": 5.0}, 2)]
    call = bench.grants.call({"val": 1.0}, aside=False)
    decision = bench.next(call)
    assert decision.answer == Go(1, ROUND, 0.5)
    bench.grants.take(decision.answer)
    assert bench.next(call).answer == Met(1, {"val": 5.0}, 2)
    assert [r.wants for r in bench.asked] == [wants.Call(1, {"val": 2.0})] * 2
    assert [r.seq for r in bench.asked] == [1, 2]


def test_no_numbers_of_the_processes_are_too_much_for_their_head() -> None:
    bench = Bench({"up": -math.inf, "far": 1.7e308})
    bench.answers.append(Met(1, {}, 2))
    bench.next(bench.grants.call({"up": math.inf, "far": 1.7e308}, aside=False))
    asked = bench.asked[0].wants
    assert isinstance(asked, wants.Call)
    assert asked.numbers == pytest.approx({"up": math.nan, "far": math.inf}, nan_ok=True)


def test_after_a_call_requests_are_as_before_and_the_next_call_has_a_higher_number() -> None:
    bench = Bench({})
    bench.answers += [Met(1, {}, 2), Go(2, None, 0.5)]
    bench.next(bench.grants.call({}, aside=False))
    decision = bench.grants.next((0, 0), lockstep=False, look=None, again=False)
    assert decision.answer == Go(2, None, 0.5)
    assert (bench.asked[-1].seq, bench.asked[-1].wants) == (2, wants.STEP)
    bench.grants.take(decision.answer)
    assert bench.grants.call({}, aside=True) == wants.Call(3, {}, aside=True)


def test_processes_that_average_different_numbers_are_an_error() -> None:
    bench = Bench({"other": 3.0})
    call = bench.grants.call({"val": 1.0}, aside=False)
    with pytest.raises(LsgdError, match=golden.pattern("calls.other_names")):
        bench.next(call)
