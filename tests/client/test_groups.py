"""Process groups over Gloo: every verb, subgroups, and what a missing member does."""

import socket
import threading
from itertools import product

import pytest
import torch

from lsgd.client.groups import gloo, store
from lsgd.client.groups import torch_group as groups
from lsgd.client.groups.form import form
from lsgd.client.groups.torch_group import TorchGroup
from lsgd.errors import ExchangeError
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings

from ..integration.running import until
from .bench import Switchboard, generation, together


@pytest.fixture
def switchboard(tmp_path):
    with Switchboard(tmp_path) as made:
        yield made


def run(switchboard, node_sizes, work, *, number=1, missing=(), timeout_s=20.0, transport="gloo", certificate=b""):
    """Return what ``work(group)`` returns on every member that is not missing."""
    members = generation(*node_sizes, number=number, transport=transport)
    plan = Plan(RunSettings(exchange_timeout_s=timeout_s))
    ranks = [rank for rank in range(len(members.members)) if rank not in missing]
    memberships = {rank: switchboard.member(members.members[rank], plan, certificate) for rank in ranks}

    def member(rank: int):
        group = form(members, memberships[rank])
        try:
            return work(group)
        finally:
            group.close()

    return together(member, ranks)


HOUR_S = 3600.0
"""A deadline that a test which passes does not wait for."""


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
        # A small one, and one that is passed on from member to member.
        for source, length in product(range(size), (5, size * groups.PIECE_NBYTES + 3)):
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
        inputs = [torch.full((groups.PIECE_NBYTES * (number + 1),), 100 * number + 10 * rank + r) for r in range(size)]
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
            group.subset("some", [2, 0]).broadcast(x, 0)
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
        with pytest.raises(ExchangeError, match=r"all_reduce: waited .* then gave up"):
            group.all_reduce(torch.ones(1)).wait()
        return True

    assert run(switchboard, (2,), work, timeout_s=HOUR_S) == [None, True]


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_peer_that_is_silent_runs_into_the_deadline_and_is_named(switchboard, length) -> None:
    over = threading.Event()

    def work(group: TorchGroup):
        group.all_reduce(torch.ones(1)).wait()
        if group.rank == 1:
            over.wait(20)
            return None
        try:
            group.broadcast(torch.ones(length), 1)
        except ExchangeError as error:
            return str(error)
        finally:
            over.set()

    told, _ = run(switchboard, (1, 1), work, timeout_s=4.0)  # in which they meet, too
    assert told.startswith("broadcast from node1/worker0: waited 4.")


def test_a_cut_frees_who_waits_for_a_silent_peer(switchboard) -> None:
    """Long before the deadline, and without the peer's doing anything."""
    was_cut, freed = threading.Event(), threading.Event()

    def work(group: TorchGroup) -> bool:
        def cut() -> None:
            was_cut.set()
            group.cut()

        group.all_reduce(torch.ones(3)).wait()
        if group.rank == 1:
            return freed.wait(30)
        threading.Timer(0.2, cut).start()
        with pytest.raises(ExchangeError, match="all_reduce: waited"):
            group.all_reduce(torch.ones(3)).wait()
        assert was_cut.is_set()
        freed.set()
        return True

    assert run(switchboard, (2,), work, timeout_s=HOUR_S) == [True, True]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_cut_frees_who_waits_for_a_member_that_does_not_connect(switchboard, monkeypatch, silent) -> None:
    """A member that dies when it has published its address leaves the other side of Gloo nothing to notice."""
    freed = threading.Event()
    get = store.ServerStore.get

    def get_or_hang(store, key):
        if store._identity[0] == f"node0/worker{silent}":
            assert freed.wait(30)
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

    assert run(switchboard, (2,), work, timeout_s=20.0) == [True, True]
    until(lambda: all(t.name != "lsgd-build" for t in threading.enumerate()), "what was left to itself ends too")


def test_the_end_of_a_generation_ends_the_forming_of_its_groups(switchboard) -> None:
    with switchboard.ending(1, "node0/worker1 left"):
        (error,) = run(switchboard, (2,), lambda g: g.all_reduce(torch.ones(1)).wait(), missing=[1])
    assert isinstance(error, ExchangeError)
    assert "generation 1 is over: node0/worker1 left" in str(error)


def test_groups_listen_on_the_address_they_are_given(switchboard, monkeypatch) -> None:
    """The host name plays no part, though it is what torch would look up."""

    def refuse(*_):
        raise AssertionError("a host name was looked up")

    monkeypatch.setattr(socket, "gethostname", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    asked = []
    create = gloo.ProcessGroupGloo.create_device
    monkeypatch.setattr(gloo.ProcessGroupGloo, "create_device", lambda **kw: asked.append(kw) or create(**kw))
    assert run(switchboard, (2,), every_verb) == [True, True]
    assert asked == [{"hostname": "127.0.0.1"}] * 2
