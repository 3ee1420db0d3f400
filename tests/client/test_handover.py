"""What newcomers and all others take from the source: only what differs, from the nearest; no lie is believed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lsgd.client.groups.base import Members, Traffic
from lsgd.client.groups.store import store_of
from lsgd.client.groups.torch_group import torch_group
from lsgd.client.iteration import chunks, following, handover
from lsgd.client.iteration.chunks import Chunk, chunks_of, digests_of
from lsgd.client.iteration.following import Following
from lsgd.client.iteration.handover import Handover, Hop, Inventory, parcels_of, slots_of, ways_of
from lsgd.client.iteration.packing import most_nbytes, pack
from lsgd.digests import CHUNK_NBYTES
from lsgd.errors import ExchangeError
from lsgd.plan.plan import Plan
from lsgd.plan.run import RunSettings
from lsgd.protocol.messages import Round
from tests import golden

from .bench import Switchboard, generation, together
from .meshes import Clock, all_at_once, members

NUMEL = 3 * CHUNK_NBYTES // 4 + 5
"""Of a tensor of four chunks."""


@pytest.fixture(autouse=True)
def link(monkeypatch) -> None:
    """A link on which chunks do not travel packed, however long they take."""
    monkeypatch.setattr(handover, "PACKS_FROM_S", math.inf)


def order(*node_sizes: int, new: tuple[int, ...] = (), source: int = 0) -> Round:
    return Round(7, generation(*node_sizes), "global", 0, (0,) * len(node_sizes), 3, new, source, False)


def tensor(value: float, numel: int = NUMEL) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + value


def run(order: Round, models, shared, work=Handover.run) -> tuple[list[object], list[Traffic]]:
    """Carry out a hand-over over TCP; return each member's result, and its traffic."""
    groups, _ = members(len(models), [b""] * len(models))

    def member(group):
        return work(Handover(group, order), Inventory(models[group.rank], [], shared[group.rank]))

    return all_at_once(groups, member), [group._traffic for group in groups]


def test_members_with_equal_bits_send_only_digests() -> None:
    models, shared = [[tensor(1)] for _ in range(3)], [[tensor(2)] for _ in range(3)]
    results, traffic = run(order(1, 1, 1, new=(1, 2)), models, shared)
    assert results == [{}] * 3
    assert [each.sent_nbytes for each in traffic] == [2 * 2 * 16] * 3


def test_only_chunks_that_differ_travel() -> None:
    models, shared = [[tensor(1)] for _ in range(2)], [[tensor(2)] for _ in range(2)]
    models[1][0][0] = shared[1][0][-1] = -1.0
    _, traffic = run(order(1, 1, new=(1,)), models, shared)
    assert CHUNK_NBYTES < traffic[1].received_nbytes < CHUNK_NBYTES + 1000
    assert all(torch.equal(x[0], tensor(1)) for x in models)
    assert all(torch.equal(x[0], tensor(2)) for x in shared)


def test_bytes_that_the_model_and_the_shared_state_have_in_common_travel_once() -> None:
    models, shared = [[tensor(rank)] for rank in range(2)], [[tensor(rank)] for rank in range(2)]
    _, traffic = run(order(1, 1, new=(1,)), models, shared)
    assert torch.equal(models[1][0], tensor(0))
    assert torch.equal(shared[1][0], tensor(0))
    assert 4 * NUMEL < traffic[1].received_nbytes < 4 * NUMEL + 1000


def test_those_who_stay_keep_their_models_and_send_none_of_the_state() -> None:
    models, shared = [[tensor(rank)] for rank in range(3)], [[tensor(5)], [tensor(5)], [tensor(6)]]
    _, traffic = run(order(1, 1, 1, new=(2,), source=1), models, shared)
    assert [float(x[0][0]) for x in models] == [0.0, 1.0, 1.0]
    assert [float(x[0][0]) for x in shared] == [5.0, 5.0, 5.0]
    assert traffic[0].received_nbytes < 1000
    assert traffic[1].received_nbytes < 1000
    assert min(traffic[0].sent_nbytes, traffic[1].sent_nbytes) > CHUNK_NBYTES  # both send what both have


def odd(value: int) -> list[torch.Tensor]:
    return [
        torch.full((3, 5), value, dtype=torch.bfloat16),
        torch.full((2, 3, 4, 5), value, dtype=torch.float64).to(memory_format=torch.channels_last),
        torch.tensor(value),
        torch.tensor([True, value > 1]),
        torch.empty(0),
        torch.full((4, 6), value, dtype=torch.float16)[:, ::2],
        torch.full((7,), value, dtype=torch.complex64),
    ]


def test_tensors_of_any_kind_are_taken_over() -> None:
    models = [odd(1), odd(2), odd(3)]
    run(order(2, 1, new=(0, 2), source=1), models, [[], [], []])
    for model in models:
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(model, odd(2), strict=True))


def test_what_nothing_arrives_for_is_not_written() -> None:
    """Of tensors that are not contiguous there are copies, and training goes on while a newcomer follows."""
    teacher, expanded = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(1, 4).expand(3, 4)
    inventory = Inventory([teacher], [expanded], [])
    teacher.fill_(7.0)
    inventory.change({})
    assert teacher.eq(7.0).all()


def test_over_a_group_of_torch(tmp_path) -> None:
    models, shared = [[tensor(rank)] for rank in range(3)], [[tensor(3 + rank)] for rank in range(3)]
    round_ = order(1, 2, new=(1, 2))
    with Switchboard(tmp_path) as switchboard:
        plan = Plan(RunSettings(exchange_timeout_s=20.0))
        joined = [switchboard.member(name, plan) for name in round_.generation.members]

        def member(rank: int) -> None:
            membership, formed = joined[rank], round_.generation
            those = Members.of(formed, membership.join.worker)
            group = torch_group(those, membership, store_of(formed, membership), backend="gloo")
            try:
                Handover(group, round_).run(Inventory(models[rank], [], shared[rank]))
            finally:
                group.close()

        assert together(member, range(3)) == [None] * 3
    assert all(torch.equal(x[0], tensor(0)) for x in models)
    assert all(torch.equal(x[0], tensor(3)) for x in shared)


# -- lies ------------------------------------------------------------------------------------------------------


def lying(rank: int, number: int, digest: bytes):
    """Return a hand-over in which a member announces a digest that is not that of its chunk."""

    def work(handed: Handover, own: Inventory) -> None:
        if handed._me == rank:
            own.digests[number] = digest
        handed.run(own)

    return work


def test_a_chunk_that_is_not_what_was_announced_is_refused_and_nothing_changes() -> None:
    models = [[tensor(1)], [tensor(2)]]
    results, _ = run(order(1, 1, new=(1,)), models, [[], []], lying(0, 1, b"x" * 16))
    assert isinstance(results[1], ExchangeError)
    assert golden.text("handover.other_bytes") in str(results[1])
    assert isinstance(results[0], ExchangeError)
    assert torch.equal(models[1][0], tensor(2))


def test_who_says_to_have_a_chunk_that_it_does_not_have_is_found_by_the_digest_of_the_result() -> None:
    models = [[tensor(1)], [tensor(2)]]
    right = digests_of(chunks_of([tensor(1)]))
    results, _ = run(order(1, 1, new=(1,)), models, [[], []], lying(1, 2, right[2]))
    assert all(golden.text("handover.other_bytes_after") in str(result) for result in results)
    assert torch.equal(models[1][0], tensor(2))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda data: data[:-1], "a chunk with"),
        (lambda data: data.repeat(4), "announces"),
        (lambda data: data.index_fill(0, torch.tensor([40]), 255), "the model"),
    ],
    ids=["short", "long", "changed"],
)
def test_a_packed_chunk_that_is_spoilt_is_refused(monkeypatch, spoil, error) -> None:
    monkeypatch.setattr(handover, "PACKS_FROM_S", -1.0)
    models = [[tensor(1)], [tensor(2)]]

    def work(handed: Handover, own: Inventory) -> None:
        packed, post = handed.post._packed, handed.post
        post._packed = lambda chunks: spoil(packed(chunks)) if post.packs else packed(chunks)
        handed.run(own)

    results, _ = run(order(1, 1, new=(1,)), models, [[], []], work)
    assert error in str(results[1])
    assert torch.equal(models[1][0], tensor(2))


def test_on_a_slow_link_chunks_travel_packed(monkeypatch) -> None:
    torch.manual_seed(0)
    weights = torch.randn(4 * CHUNK_NBYTES // 4) * 0.02
    plain = run(order(1, 1, new=(1,)), [[weights], [tensor(1, len(weights))]], [[], []])[1][0].sent_nbytes
    monkeypatch.setattr(handover, "PACKS_FROM_S", -1.0)
    models = [[weights], [tensor(1, len(weights))]]
    _, traffic = run(order(1, 1, new=(1,)), models, [[], []])
    assert torch.equal(models[1][0], weights)
    assert traffic[0].sent_nbytes < plain - 0.4 * CHUNK_NBYTES  # of three chunks: the first shows how slow it is


# -- digests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_code_of_many_small_chunks_is_as_long_as_allowed_at_most(itemsize) -> None:
    """Each has a length for each place in its numbers."""
    chunks = [torch.randint(256, (itemsize,), dtype=torch.uint8) for _ in range(1000)]
    code = b"".join(pack(chunk, itemsize) for chunk in chunks)
    assert len(code) == most_nbytes([(itemsize, itemsize)] * 1000)


def test_digests_are_fixed() -> None:
    found = Chunk(torch.arange(8, dtype=torch.uint8), torch.float32).digest()
    assert found.hex() == "747fc54aeba393412830585073403485"
    assert found != Chunk(torch.arange(8, dtype=torch.uint8), torch.int32).digest()


def test_chunks_are_parts_of_one_tensor_in_order() -> None:
    found = chunks_of([tensor(1), torch.empty(0), torch.zeros(3, dtype=torch.bfloat16)])
    assert [len(chunk.data) for chunk in found] == [CHUNK_NBYTES] * 3 + [20, 6]
    assert [chunk.dtype for chunk in found] == [torch.float32] * 4 + [torch.bfloat16]


# -- ways ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "needs", "homes", "ways"),
    [
        ("100", "111", "012", [(0, 1, 2)]),
        ("010", "111", "012", [(1, 2, 0)]),
        ("101", "111", "011", [(2, 1)]),
        ("1000", "1011", "0011", [(0, 2, 3)]),
        ("1010", "1111", "0011", [(0, 1), (2, 3)]),
        ("11", "11", "01", []),
    ],
)
def test_a_chunk_comes_from_the_own_node_or_passes_each_once(has, needs, homes, ways) -> None:
    flags = ([digit == "1" for digit in text] for text in (has, needs))
    assert ways_of(*flags, [int(node) for node in homes], turn=0) == tuple(ways)


def test_several_who_have_it_take_turns() -> None:
    found = [ways_of([True, True, False], [True] * 3, [0, 1, 2], turn) for turn in range(4)]
    assert found == [((0, 2),), ((1, 2),), ((0, 2),), ((1, 2),)]


def test_small_chunks_with_the_same_ways_travel_together() -> None:
    ways = {0: ((0, 1),), 1: ((0, 1),), 2: (), 3: ((0, 1),), 4: ((0, 2),), 5: ((0, 2),)}
    sizes = {number: CHUNK_NBYTES // 2 for number in ways}
    assert parcels_of(ways, sizes) == [(0, 1), (3,), (4, 5)]


def test_a_chain_carries_several_parcels_at_a_time() -> None:
    ways = {number: ((0, 1, 2),) for number in range(3)}
    slots = slots_of([(0,), (1,), (2,)], ways)
    assert slots == [
        [Hop(0, 1, (0,))],
        [Hop(1, 2, (0,)), Hop(0, 1, (1,))],
        [Hop(1, 2, (1,)), Hop(0, 1, (2,))],
        [Hop(1, 2, (2,))],
    ]


ranks = st.integers(1, 6)
kinds = st.lists(st.tuples(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 63)), min_size=1, max_size=9)


@given(size=ranks, nodes=st.lists(st.integers(0, 3), min_size=6, max_size=6), kinds=kinds)
def test_all_who_need_a_chunk_get_it_from_one_who_has_it(size, nodes, kinds) -> None:
    homes = sorted(nodes[:size])
    has, ways, needs = {}, {}, {}
    for number, (flags, needing) in enumerate(kinds):
        here = flags[:size]
        here[number % size] = True
        has[number], needs[number] = here, [bool(needing >> rank & 1) for rank in range(size)]
        ways[number] = ways_of(here, needs[number], homes, number)
    for slot in slots_of(parcels_of(ways, dict.fromkeys(ways, CHUNK_NBYTES // 3)), ways):
        assert len({hop.sender for hop in slot}) == len(slot)
        assert all(has[number][hop.sender] and not has[number][hop.receiver] for hop in slot for number in hop.parcel)
        for hop in slot:
            for number in hop.parcel:
                has[number][hop.receiver] = True
    assert all(here or not need for n in has for here, need in zip(has[n], needs[n], strict=True))


# -- progress --------------------------------------------------------------------------------------------------


def test_its_progress_is_told_with_bytes_rate_and_time_left(monkeypatch) -> None:
    monkeypatch.setattr(handover, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(handover, "TELL_EVERY_S", 0.0)
    said: list[str] = []

    def work(handed: Handover, own: Inventory) -> None:
        meet = handed._meet

        def noting(seconds: float) -> float:
            said.append(handed.progress())
            return meet(seconds)

        handed._meet = noting
        handed.run(own)
        assert not handed.progress()

    assert run(order(1, 1, new=(1,)), [[tensor(0)], [tensor(1)]], [[], []], work)[0] == [None, None]
    assert any(golden.text("handover.progress") in text and "s left" in text for text in said)


def test_how_fast_it_goes_beside_the_training_is_told_with_figures(caplog, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(following, "time", clock)
    groups, _ = members(2, [b""] * 2)
    handed, own = Handover(groups[0], order(1, 1, new=(1,))), Inventory([], [], [tensor(1, 10 * NUMEL)])
    handed.nbytes_per_s = 1e6 / 8
    with caplog.at_level("INFO", "lsgd"):
        followed = Following(handed, own, {1: range(len(own.chunks))}, pause_s=2.0)
    assert (golden.text("handover.takes_model")) in caplog.messages
    clock.now += 40.0  # the time of a round, an exchange and 10 s of training
    followed._note(1, 8.4)
    followed._plan(10.0)
    assert followed.progress() == golden.text("handover.slow_progress")
    for group in groups:
        group.close()


def test_members_meet_every_few_seconds_and_take_the_slowest_for_it() -> None:
    turns: list[list[int]] = [[], []]

    def work(handed: Handover, own: Inventory) -> None:
        meet, carry, me = handed._meet, handed._carry, handed._me
        times = iter([0.1, 0.1, 2.0, 9.0, 9.0, 2.0] + [2.0] * 20)

        def counting(*arguments) -> None:
            turns[me][-1] += 1
            carry(*arguments)

        def slow(seconds: float) -> float:
            turns[me].append(0)
            return meet(next(times) if me else 0.0)

        turns[me].append(0)
        handed._meet, handed._carry = slow, counting
        handed.run(own)

    assert run(order(1, 1, new=(1,)), [[tensor(0, 5 * NUMEL)], [tensor(1, 5 * NUMEL)]], [[], []], work)[0] == [None] * 2
    assert turns[0] == turns[1] == [1, 2, 4, 4, 2, 1, 1, 1, 0]


def test_digests_are_computed_in_threads_alike() -> None:
    assert chunks.in_threads(str, range(20)) == [str(number) for number in range(20)]
