"""The processes of an island decide and vote together; here they are threads of one process."""

import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lsgd.algorithms.base import Commit
from lsgd.algorithms.local import LocalSettings
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control import island as module
from lsgd.client.control.island import ElsewhereError, FollowerChannel, Island
from lsgd.client.groups.base import Members
from lsgd.client.groups.mirror import HeadGroup, Mirror
from lsgd.client.iteration.following import Following
from lsgd.client.iteration.post import Post
from lsgd.client.iteration.replica import Look, Replica
from lsgd.client.iteration.rounds import Rounds
from lsgd.client.iteration.step import Step
from lsgd.collectives.group import Transfer
from lsgd.errors import ConfigError, ExchangeError, IslandError, LsgdError
from lsgd.flat import FlatParameters, describe
from lsgd.plan.plan import Phase, Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Round
from tests import golden

from ..integration.running import until
from .bench import Switchboard, generation, together


@contextmanager
def island(size: int, *, replicas: bool = False) -> Iterator[list[Island]]:
    """Make the processes of an island, which leave it at the end."""
    pipes = [Pipe() for _ in range(size - 1)]
    links = [[(rank, ours) for rank, (ours, _) in enumerate(pipes, 1)], *([(0, theirs)] for _, theirs in pipes)]
    made = [Island(rank, size, each, replicas=replicas) for rank, each in enumerate(links)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_get_what_the_head_decides_from_all_reports(size) -> None:
    with island(size) as processes:
        ranks = range(size)
        decided = together(lambda rank: processes[rank].decide("adds", lambda: rank, lambda all: sum(all())), ranks)
        assert decided == [sum(ranks)] * size
        assert together(lambda rank: processes[rank].gather("lists", rank), ranks) == [list(ranks)] * size

        def refuse() -> int:
            raise ConfigError("no")

        assert [str(error) for error in together(lambda rank: processes[rank].share("asks", refuse), ranks)] == [
            "no"
        ] * size
        assert together(lambda rank: processes[rank].share("asks", lambda: 7), ranks) == [7] * size


@pytest.mark.parametrize("asks", [True, False])
def test_reports_may_wait_until_the_head_asks(asks) -> None:
    made: list[int] = []

    def report(rank: int) -> int:
        made.append(rank)
        return rank

    def decide(rank: int) -> int:
        return processes[rank].decide(
            "adds", partial(report, rank), lambda all: sum(all()) if asks else 7, reports=False
        )

    with island(3) as processes:
        assert together(decide, range(3)) == [3 if asks else 7] * 3
        assert sorted(made) == ([0, 1, 2] if asks else [])
        assert together(lambda rank: processes[rank].gather("lists", rank), range(3)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("replicas", "counted"), [(False, [6.0, 3.0]), (True, [2.0, 1.0])])
def test_what_replicas_have_judged_alike_counts_once(replicas: bool, counted: list[float]) -> None:
    """Else a worker of many processes has longer changes than one of a single process."""
    with island(3, replicas=replicas) as processes:
        assert together(lambda rank: processes[rank].vote([2.0, 1.0]), range(3)) == [counted] * 3


def test_a_failure_in_one_process_fails_the_vote_of_all_once() -> None:
    with island(3) as processes:
        votes: list[list[float] | ExchangeError] = [[1.0, True], ExchangeError("it is cut"), [3.0, False]]
        head, failed, other = together(lambda rank: processes[rank].vote(votes[rank]), range(3))
        assert failed == [] and isinstance(head, ElsewhereError) and isinstance(other, ElsewhereError)
        assert "it is cut" in str(head) and "it is cut" in str(other)
        assert head is not other
        assert processes[0].vote(head) == []  # this was its vote already
        assert together(lambda rank: processes[rank].vote([rank, rank > 0]), range(3)) == [[3, 2]] * 3


def test_nobody_waits_for_a_process_that_makes_another_call_or_none() -> None:
    with island(2) as processes:
        one, other = together(lambda rank: processes[rank].share(("pauses", "saves")[rank], lambda: 1), range(2))
        assert isinstance(one, LsgdError) and isinstance(other, LsgdError)
    with island(2) as processes:
        processes[1].close()
        for _ in range(2):
            with pytest.raises(LsgdError, match=golden.pattern("island.left_run")):
                processes[0].gather("votes", 1)


@pytest.mark.parametrize("call", ["votes", "saves"])
def test_the_head_waits_for_a_process_that_works_and_says_so(monkeypatch, caplog, call) -> None:
    monkeypatch.setattr(module, "SAID_AFTER_S", 0.01)

    def work(rank: int) -> object:
        if rank == 1:
            until(lambda: caplog.text.count(golden.text("island.for_process_1")) > 1, "it has said so twice")
        return processes[rank].gather(call if rank == 1 else "votes", rank)

    with island(3) as processes:
        results = together(work, range(3))
        if call == "votes":
            assert results == [[0, 1, 2]] * 3
        else:
            assert all(isinstance(result, LsgdError) for result in results)
            assert golden.text("island.other_vote") in str(results[0])
    waited = re.findall(r"this process votes, and has waited ([\d.]+) s for process (\d)", caplog.text)
    assert waited[:2] == [("0.01", "1"), ("0.02", "1")]


def test_the_head_does_not_wait_for_a_process_that_falls_silent(monkeypatch, caplog) -> None:
    monkeypatch.setattr(module, "SAID_AFTER_S", 0.01)
    monkeypatch.setattr(module, "STUCK_AFTER_S", 600.0)  # else this process, which is both, would end
    with island(2) as processes:

        def fall_silent() -> int:
            until(lambda: "for process 1 of its island, which runs" in caplog.text, "the head waits")
            processes[0].has_joined(0.0)
            return 1

        with ThreadPoolExecutor(1) as other:
            asked = other.submit(fall_silent)
            with pytest.raises(IslandError, match=golden.pattern("island.process_silent")):
                processes[0].gather("votes", 0)
            assert asked.result() == 1


def test_a_process_that_takes_nothing_any_more_ends_the_island(monkeypatch) -> None:
    """Its connection is full, so whoever sends it something waits."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", ended.set_result)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    for name in ("CONNECT_WITHIN_S", "STUCK_AFTER_S"):
        monkeypatch.setattr(module, name, 0.0)
    ours, theirs = Pipe()
    os.set_blocking(ours.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(ours.fileno(), bytes(1 << 16))
    os.set_blocking(ours.fileno(), True)
    head = Island(0, 2, [(1, ours)])
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(head._peers[0].send, "frame", b"")
        try:
            until(sending.running, "its thread sends")
            assert ended.result(20) == IslandError.exit_code
            with pytest.raises(IslandError, match=golden.pattern("island.process_silent")):
                head._peers[0].receive((1, "votes"))
            assert sending.running()
        finally:
            theirs.close()


@pytest.mark.parametrize("numel", [3, 100_003])
def test_the_head_hands_tensors_of_any_kind_to_the_others(numel) -> None:
    sent = [torch.randn(numel).bfloat16(), torch.empty(0), torch.randn(2, numel).double(), torch.ones(numel).byte()]
    with island(3) as processes:
        processes[0].hand((1, "world", 1), sent)
        for process in processes[1:]:
            got = [torch.zeros_like(x) for x in sent]
            process.handed.take((1, "world", 1), got)
            assert all(torch.equal(x, y) for x, y in zip(sent, got, strict=True))


def test_nobody_waits_for_tensors_that_do_not_come() -> None:
    x = [torch.zeros(3)]
    with island(2) as (head, other):
        head.hand((1, "world", 1), None)
        with pytest.raises(ExchangeError, match=golden.pattern("island.head_failed")):
            other.handed.take((1, "world", 1), x)
        head.hand((1, "world", 2), x)
        head.end_generation(1)
        head.hand((1, "world", 3), x)
        with pytest.raises(ExchangeError, match=golden.pattern("island.head_generation_over")):
            other.handed.take((1, "world", 3), x)
        head.close()
        with pytest.raises(LsgdError, match=golden.pattern("island.head_left")):
            other.handed.take((2, "world", 1), x)


def test_what_the_head_gives_may_come_in_the_middle_of_an_exchange() -> None:
    members = Members.apart(("node0/worker0", "node1/worker0"), 0)
    carrier: Any = SimpleNamespace(
        device=torch.device("cpu"), transport="tcp", all_reduce=lambda x: Transfer(lambda: None)
    )
    model, total = torch.zeros(3), torch.zeros(3)
    with island(2, replicas=True) as (head, other):
        group, mirror = HeadGroup(head, 1, members, carrier), Mirror(other, 1, members, torch.device("cpu"))
        group.take_heads([torch.ones(3)])
        group.all_reduce(torch.full((3,), 2.0)).wait()
        mirror.all_reduce(total).wait()
        mirror.take_heads([model])
        assert model.tolist() == [1.0] * 3 and total.tolist() == [2.0] * 3


@pytest.mark.parametrize("came", [1, 4])
def test_the_processes_of_a_source_end_a_transfer_together(came) -> None:
    """Each would find by its own clock that a round is due; the head's clock decides."""
    members = Members.apart(("node0/worker0", "node1/worker0"), 0)
    cpu = torch.device("cpu")
    carrier: Any = SimpleNamespace(
        device=cpu, transport="tcp", _begin_exchange=lambda sends, receives: Transfer(lambda: None)
    )
    chunk = SimpleNamespace(data=torch.zeros(8, dtype=torch.uint8), dtype=torch.float32)
    own: Any = SimpleNamespace(chunks=[chunk] * 4, nbytes=lambda numbers: 8 * len([*numbers]))
    with island(2, replicas=True) as (head, other):
        groups = HeadGroup(head, 1, members, carrier), Mirror(other, 1, members, cpu)
        sources = []
        for group in groups:
            handover: Any = SimpleNamespace(
                post=Post(group, ["node0/worker0", "node1/worker0"]), source=0, nbytes_per_s=1e9
            )
            sources.append(Following(handover, own, {1: range(4)}, pause_s=1.0))
        turns = [source._turn for source in sources]
        turns[0].stop_at, turns[1].stop_at = (-math.inf, math.inf) if came == 1 else (math.inf, -math.inf)
        assert together(lambda rank: sources[rank]._transfer({1: range(4)}), range(2)) == [None, None]
        assert [turn.came for turn in turns] == [came, came]


class Member:
    """A process of a worker with its part of the model, in an island with another one."""

    def __init__(self, membership, settings, stack: ExitStack, value: float) -> None:
        self.model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
        nn.init.constant_(self.model[0].weight, value)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        checkpoints = Checkpoints(self.model, [optimizer], {}, None, None, membership.island)
        checkpoints.load(membership.join.worker, *describe(self.model))
        self.replica = Replica(membership, FlatParameters(self.model), self.model, [optimizer], checkpoints)
        self.rounds = Rounds(membership, self.replica, checkpoints, Step())
        stack.callback(self.rounds.groups.leave, cut=True)

    @property
    def state(self) -> list[float]:
        """All numbers of its part."""
        return [float(x) for tensor in self.model.state_dict().values() for x in tensor.flatten()]


@contextmanager
def islands(tmp_path, settings, *, replicas: bool = False) -> Iterator[list[list[Member]]]:
    """Make two islands of two processes each, with weights of 1, 2, 3 and 4, or replicas of 1 and 3."""
    plan = Plan(RunSettings(exchange_timeout_s=20.0), (Phase(settings),))
    with Switchboard(tmp_path) as switchboard, ExitStack() as stack:
        made = []
        for worker in range(2):
            processes = stack.enter_context(island(2, replicas=replicas))
            head = replace(switchboard.member(f"node0/worker{worker}", plan), island=processes[0])
            processes[0].connect(head.channel)
            channel = FollowerChannel(head.channel.address, head.join.incarnation, processes[1])
            other = replace(head, island=processes[1], channel=channel)
            values = (2 * worker + 1.0, 2 * worker + (1.0 if replicas else 2.0))
            made.append([Member(each, settings, stack, v) for each, v in zip((head, other), values, strict=True)])
        yield made


def order(id: int, number: int = 1) -> Round:
    return Round(id, generation(2, number=number), "global", 0, (0,), id - 1, (), 0, False)


def run(members: list[list[Member]], order: Round, looks: Sequence[Sequence[Look]] = ((), ())) -> list[object]:
    everyone = [(member, looked) for worker, looked in zip(members, looks, strict=True) for member in worker]
    return together(lambda index: everyone[index][0].rounds.carry_out(order, looks=everyone[index][1]), range(4))


LOCAL = LocalSettings(period=4, compression="none", rescale=False)


@pytest.mark.parametrize("failing", ["before_forward", "exchange_buffers"])
def test_a_round_that_fails_in_one_process_changes_nothing_in_its_island(tmp_path, monkeypatch, failing) -> None:
    with islands(tmp_path, LOCAL) as members:
        before = [member.state for member in members[0]]
        broken = members[0][1].replica
        target = broken if failing == "exchange_buffers" else broken.algorithm
        exchange = getattr(target, failing)

        def fail(*arguments: object) -> Commit:
            exchange(*arguments)
            raise ExchangeError("its link is cut")

        monkeypatch.setattr(target, failing, fail)
        results = run(members, order(1))
        assert isinstance(results[0], ElsewhereError) and isinstance(results[1], ExchangeError)
        assert [member.state for member in members[0]] == before
        assert [member.rounds.last.dropped for member in members[0]] == [1, 1]
        monkeypatch.undo()
        assert run(members, order(2, number=2)) == [None] * 4
        (a, b), (c, d) = members
        assert a.state == c.state and b.state == d.state and a.state != b.state


def test_a_number_that_is_none_in_one_part_counts_for_all(tmp_path) -> None:
    with islands(tmp_path, LOCAL) as members:
        assert run(members, order(1)) == [None] * 4  # all parts have a common model now
        common = [member.state for member in members[0]]
        with torch.no_grad():
            members[0][1].model[0].weight[0, 0] = float("nan")
            for member in (*members[0], *members[1]):
                member.model[0].weight[0, 1] += 1.0
        assert run(members, order(2)) == [None] * 4
        # The island with the NaN contributes nothing, in both parts: half of the other one's change is left.
        assert [member.state[1] - was[1] for member, was in zip(members[0], common, strict=True)] == [0.5, 0.5]


def test_a_delayed_transfer_lands_in_all_processes_or_in_none(tmp_path, monkeypatch) -> None:
    with islands(tmp_path, replace(LOCAL, delay=2)) as members:
        assert run(members, order(1)) == [None] * 4
        before = [member.state for member in members[0]]
        everyone = [member for worker in members for member in worker]

        def step(_: int) -> list[object]:
            return together(lambda index: everyone[index].rounds.after_step(), range(4))

        step(1)
        assert [member.state for member in members[0]] == before
        background = members[0][1].replica.algorithm._background
        monkeypatch.setattr(background, "succeeded", partial(bool, False))
        step(2)
        assert [member.state for member in members[0]] == before
        assert [member.state for member in members[1]] != before


@pytest.mark.parametrize("reported", [True, False])
def test_replicas_that_differ_get_the_model_of_the_head(tmp_path, reported, caplog) -> None:
    with islands(tmp_path, LOCAL, replicas=True) as members:
        for worker in members:
            with torch.no_grad():
                worker[1].model[0].weight[0, 0] *= 1.0 + 1e-6
        looks = [[member.replica.look(compares=True) for member in worker] for worker in members]
        assert run(members, order(1), looks if reported else [(), ()]) == [None] * 4
        assert len({tuple(member.state) for worker in members for member in worker}) == 1
        # They compare, if they have not reported, say how far they are apart, look at the model, and commit.
        assert [member.rounds._island._calls for worker in members for member in worker] == [4 - reported] * 4
    assert "different models, by" in caplog.text
