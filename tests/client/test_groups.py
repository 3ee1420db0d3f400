"""Groups of torch.distributed, over Gloo in NCCL's place: every verb, subgroups, and what a missing member does."""

import gc
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lsgd.client.groups import store
from lsgd.client.groups import torch_group as groups
from lsgd.client.groups.base import INSIDE_PATIENCE
from lsgd.client.groups.form import form
from lsgd.client.groups.tcp_group import RELAYED_NBYTES
from lsgd.client.groups.torch_group import TorchGroup, gloo_group, torch_group
from lsgd.errors import ExchangeError
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from tests import golden

from ..integration.running import LIGHT, until
from ..speed import scaled
from .bench import Switchboard, generation, together


@pytest.fixture
def switchboard(tmp_path):
    with Switchboard(tmp_path) as made:
        yield made


TIMEOUT_S = scaled(20.0)


def run(switchboard, node_sizes, work, *, missing=(), timeout_s: float = TIMEOUT_S, certificate=b"", **fields):
    """Return what ``work(group)`` returns on every member that is not missing; ``fields``: of the generation.

    Gloo is in NCCL's place.
    """
    members = generation(*node_sizes, **{"transport": "nccl", **fields})
    plan = Plan(RunSettings(exchange_timeout_s=timeout_s))
    ranks = [rank for rank in range(len(members.members)) if rank not in missing]
    memberships = {rank: switchboard.member(members.members[rank], plan, certificate) for rank in ranks}

    def member(rank: int):
        group = form(members, memberships[rank])
        try:
            return work(group)
        finally:
            group.close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lsgd.client.groups.form.torch_group", partial(torch_group, backend="gloo"))
        return together(member, ranks)


HOUR_S = 3600.0
"""A deadline that a test which passes does not wait for."""

GLOO_WITHIN_S = scaled(60.0)


def test_the_bytes_that_each_member_sends_and_receives_are_counted(switchboard) -> None:
    def work(group: TorchGroup) -> list[tuple[int, int]]:
        traffic, counted = group._traffic, []

        def count() -> None:
            counted.append((traffic.sent_nbytes, traffic.received_nbytes))
            traffic.sent_nbytes = traffic.received_nbytes = 0

        group.all_reduce(torch.ones(9)).wait()
        count()
        group.broadcast(torch.ones(9), 1)
        count()
        group.all_to_all([torch.empty(group.rank) for _ in range(3)], [torch.ones(r) for r in range(3)]).wait()
        count()
        if group.across is not None:  # its subgroups count as well
            group.across.exchange({}, {})
            group.across.all_reduce(torch.ones(8)).wait()
        count()
        return counted

    first, second, third = run(switchboard, [2, 1], work)
    assert first == [(48, 48), (0, 36), (4 + 8, 0), (32, 32)]
    assert second == [(48, 48), (36, 0), (8, 4 + 4), (0, 0)]
    assert third == [(48, 48), (36, 36), (4, 8 + 8), (32, 32)]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8]


def every_verb(group: TorchGroup) -> bool:
    rank, size = group.rank, group.size
    for dtype in DTYPES:
        x = torch.full((5,), rank + 1, dtype=dtype)
        group.all_reduce(x).wait()
        assert x.tolist() == [size * (size + 1) / 2] * 5
        # A small one, and, of numbers of one byte and of four, one that is passed on from member to member.
        lengths = (5, size * RELAYED_NBYTES + 3) if dtype in (torch.float32, torch.uint8) else (5,)
        for source, length in product(range(size), lengths):
            expected = (torch.arange(length) % 251 + source).to(dtype)
            x = expected.clone() if rank == source else torch.full((length,), rank, dtype=dtype)
            group.broadcast(x, source)
            assert x.equal(expected)
        # Sizes differ, one of them is large enough for several pieces, and one is empty.
        lengths = [0 if r == 1 else 100_003 if r == 0 else 7 * r for r in range(size)]
        outputs = [torch.empty(n, dtype=dtype) for n in lengths]
        group.all_gather(outputs, torch.full((lengths[rank],), rank, dtype=dtype)).wait()
        assert all(bool((x == r).all()) for r, x in enumerate(outputs))
        inputs = [torch.full((3 + r,), 10 * rank + r, dtype=dtype) for r in range(size)]
        outputs = [torch.empty(3 + rank, dtype=dtype) for _ in range(size)]
        group.all_to_all(outputs, inputs).wait()
        assert all(x.tolist() == [10 * r + rank] * (3 + rank) for r, x in enumerate(outputs))
    # Several under way at a time, in several pieces each: none takes another's place.
    under_way = []
    for number in range(4):
        inputs = [torch.full((RELAYED_NBYTES * (number + 1),), 100 * number + 10 * rank + r) for r in range(size)]
        outputs = [torch.empty_like(x) for x in inputs]
        under_way.append((outputs, group.all_to_all(outputs, inputs)))
    for number, (outputs, transfer) in enumerate(under_way):
        transfer.wait()
        assert all(bool((x == 100 * number + 10 * r + rank).all()) for r, x in enumerate(outputs))
    sums = [torch.full((10_000 * (5 - number),), float(number + rank)) for number in range(5)]
    for transfer in [group.all_reduce(x) for x in sums]:
        transfer.wait()
    assert all(bool((x == size * number + size * (size - 1) / 2).all()) for number, x in enumerate(sums))
    if size > 1 and rank < 2:  # only those named take part
        received = torch.empty(4)
        group.exchange({1 - rank: torch.full((4,), float(rank))}, {1 - rank: received})
        assert received.tolist() == [1.0 - rank] * 4
    return True


@pytest.mark.parametrize("node_sizes", [(1,), (2,), (2, 1), (3, 1, 1)])
def test_every_verb_on_the_world_and_its_subgroups(switchboard, node_sizes) -> None:
    firsts = [sum(node_sizes[:i]) for i in range(len(node_sizes))]

    def work(group: TorchGroup) -> bool:
        assert (group.size, group.node_sizes) == (sum(node_sizes), node_sizes)
        assert every_verb(group)
        node = next(i for i in reversed(range(len(firsts))) if firsts[i] <= group.rank)
        assert (group.node.rank, group.node.size) == (group.rank - firsts[node], node_sizes[node])
        assert group.node.node_sizes == (node_sizes[node],)
        assert every_verb(group.node)
        assert group.node._timeout_s == TIMEOUT_S * (INSIDE_PATIENCE if len(node_sizes) > 1 else 1)
        if group.rank in firsts:
            assert group.across is not None
            assert (group.across.rank, group.across.size) == (node, len(node_sizes))
            assert every_verb(group.across)
        else:
            assert group.across is None
        return True

    assert run(switchboard, node_sizes, work) == [True] * sum(node_sizes)


def test_a_subset_in_an_order_of_its_own(switchboard) -> None:
    def work(group: TorchGroup) -> float:
        x = torch.tensor([float(group.rank)])
        if group.rank != 1:
            group._subgroup("some", [2, 0], one_node=False).broadcast(x, 0)
        return x.item()

    assert run(switchboard, (2, 1), work) == [2.0, 1.0, 2.0]


def test_each_generation_has_groups_of_its_own(switchboard) -> None:
    for number in (1, 2, 5):
        assert run(switchboard, (2,), every_verb, number=number) == [True, True]


def test_a_member_that_never_comes_ends_the_others_in_time(switchboard) -> None:
    errors = run(switchboard, (2, 1), lambda g: g.all_reduce(torch.ones(1)).wait(), missing=[2], timeout_s=1.0)
    assert [type(error) for error in errors] == [ExchangeError] * 2


def test_a_member_that_goes_frees_its_neighbours_at_once(switchboard) -> None:
    def work(group: TorchGroup):
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == 0:
            return None
        with pytest.raises(ExchangeError, match=golden.pattern("groups.gave_up")):
            group.all_reduce(torch.ones(1)).wait()
        return True

    assert run(switchboard, (2,), work, timeout_s=HOUR_S) == [None, True]


def waited_s(said: str) -> float:
    """Return how long the error of a group says that it has waited."""
    found = re.search(golden.pattern("groups.gave_up_after"), said)
    assert found is not None, said
    return float(found[1])


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_peer_that_is_silent_runs_into_the_deadline_and_is_named(switchboard, length) -> None:
    over = threading.Event()

    def work(group: TorchGroup):
        group.all_reduce(torch.ones(1)).wait()
        group._timeout_s, group._timeout = 1.0, timedelta(seconds=1.0)  # no longer, now that all have met
        if group.rank == 1:
            return over.wait(scaled(20))
        try:
            group.broadcast(torch.ones(length), 1)
        except ExchangeError as error:
            return str(error)
        finally:
            over.set()

    told, ended = run(switchboard, (1, 1), work, timeout_s=HOUR_S)
    assert told.startswith("broadcast from node1/worker0: ") and waited_s(told) >= 1.0
    assert ended is True, "the deadline ended it, not its peer"


class LikeNccl:
    """A process group over Gloo whose ``abort`` frees who waits in it, as NCCL's does, and Gloo's own does not."""

    def __init__(self, store, rank, size, timeout_s, address) -> None:
        self._group = gloo_group(store, rank, size, GLOO_WITHIN_S, address)
        self._aborted: Future[None] = Future()
        self._waits = ThreadPoolExecutor(1)
        if rank == 0:  # the other one goes first, and so ends what still waits in this one's threads
            KEPT.append(self._group)

    def abort(self) -> None:
        self._aborted.set_result(None)  # raises if it is called twice

    def allreduce(self, tensors, options):
        options.timeout = timedelta(seconds=GLOO_WITHIN_S)
        ends = [self._waits.submit(self._group.allreduce(tensors, options).wait), self._aborted]
        return SimpleNamespace(wait=lambda: wait(ends, return_when=FIRST_COMPLETED))


KEPT: list[Any] = []


def silent_peer(switchboard, meanwhile) -> str:
    """Return the error of a member that reduces with one that does not; ``meanwhile`` is called with its group."""
    over = threading.Event()

    def work(group: TorchGroup) -> str:
        group.all_reduce(torch.ones(3)).wait()
        if group.rank == 1:
            return str(over.wait(scaled(30)))
        transfer = group.all_reduce(torch.ones(3))
        meanwhile(group)
        with pytest.raises(ExchangeError) as raised:
            transfer.wait()
        over.set()
        return str(raised.value)

    said, _ = run(switchboard, (2,), work, timeout_s=HOUR_S)
    KEPT.clear()
    return said


def test_a_cut_aborts_the_groups_and_so_frees_who_waits(switchboard, monkeypatch) -> None:
    """Long before the deadline, and without the peer's doing anything."""
    monkeypatch.setattr(groups, "gloo_group", LikeNccl)
    said = silent_peer(switchboard, lambda group: threading.Timer(0.2, group.cut).start())
    assert said.startswith("all_reduce: waited") and golden.text("groups.its_generation_over") in said


def test_the_deadline_aborts_the_groups(switchboard, monkeypatch) -> None:
    """NCCL itself waits for ever."""
    monkeypatch.setattr(groups, "gloo_group", LikeNccl)
    said = silent_peer(switchboard, lambda group: setattr(group, "_timeout_s", 1.0))
    assert said.startswith("all_reduce: ") and waited_s(said) >= 1.0


def test_a_cut_aborts_subgroups_and_groups_that_are_built_meanwhile(switchboard, monkeypatch) -> None:
    aborted: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            aborted.append(self.name)

    going, cut = threading.Event(), threading.Event()

    def make(name: str, ranks) -> Named:
        if name == "late":
            going.set()
            assert cut.wait(scaled(20))
        return Named(name)

    made = groups.ProcessGroups(make, 20.0)
    made.build("world", [0, 1])
    made.build("world/node0", [0])
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(made.build, "late", [0, 1])
        assert going.wait(scaled(20))
        made.cut()
        assert isinstance(late.exception(20), ConnectionAbortedError)
    cut.set()
    made.end()
    assert aborted[:2] == ["world/node0", "world"] and aborted[2:] == ["late"]
    with pytest.raises(ConnectionAbortedError, match=golden.pattern("groups.its_generation_over")):
        made.build("next", [0])


@pytest.mark.parametrize("silent", [0, 1])
def test_a_cut_frees_who_waits_for_a_member_that_does_not_connect(switchboard, monkeypatch, silent) -> None:
    """A member that dies when it has published its address leaves the other side of Gloo nothing to notice."""
    freed = threading.Event()
    get = store.ServerStore.get

    def get_or_hang(store, key):
        if store._identity[0] == f"node0/worker{silent}":
            assert freed.wait(scaled(30))
            raise ExchangeError("it dies")
        return get(store, key)

    monkeypatch.setattr(store.ServerStore, "get", get_or_hang)

    def work(group: TorchGroup) -> bool:
        if group.rank != silent:
            threading.Timer(0.2, group.cut).start()
        with pytest.raises(ExchangeError, match="all_reduce: waited" if group.rank != silent else "it dies"):
            group.all_reduce(torch.ones(3)).wait()
        freed.set()
        return True

    assert run(switchboard, (2,), work, timeout_s=3.0) == [True, True]
    until(lambda: all(t.name != "lsgd-build" for t in threading.enumerate()), "what was left to itself ends too")


def test_the_end_of_a_generation_ends_the_forming_of_its_groups(switchboard) -> None:
    with switchboard.ending(1, "node0/worker1 left"):
        (error,) = run(switchboard, (2,), lambda g: g.all_reduce(torch.ones(1)).wait(), missing=[1])
    assert isinstance(error, ExchangeError)
    assert golden.text("reasons.generation_over", number=1, worker="node0/worker1") in str(error)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_twenty_generations_leave_no_descriptor(switchboard) -> None:
    run(switchboard, (2,), every_verb)
    before = descriptors()
    for number in range(2, 22):  # each of the members has one more channel
        assert run(switchboard, (2,), lambda g: bool(g.all_reduce(torch.ones(1)).wait()) or True, number=number)
    channels = switchboard._channels
    while len(channels) > 2:
        channels.pop().close()
    until(lambda: descriptors() <= before, "the descriptors of the last groups to be closed")  # by torch's own threads


def test_no_thread_is_left_when_a_group_that_forms_is_cut(switchboard) -> None:
    def work(group: TorchGroup) -> bool:
        threading.Timer(0.2, group.cut).start()
        with pytest.raises(ExchangeError, match=golden.pattern("groups.its_generation_over")):
            group.all_reduce(torch.ones(1)).wait()
        group.close()
        return all(thread.name != "lsgd-build" for thread in threading.enumerate())

    assert run(switchboard, (2,), work, missing=[1], timeout_s=60.0) == [True]


@pytest.mark.slow
def test_a_process_that_ends_while_a_group_forms_keeps_its_exit_code() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.client._forming", "2"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **LIGHT},
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    codes = dict(line.split(": ") for line in said.stdout.splitlines())
    assert len(codes) == 3, said.stderr
    assert set(codes.values()) == {"7 7"}, said.stderr
