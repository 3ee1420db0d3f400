"""One deal that all workers agree on: what they tell of it is equal where they deal alike, and only there."""

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from lsgd.client.data.deals import facts_of, facts_of_stream, place_in_script, rows_of
from lsgd.client.data.samplers import shard_of
from lsgd.client.data.shards import ShardLoader, shard_loader
from lsgd.client.data.trainers import TrainerData
from lsgd.protocol.messages import Dealt, Join
from lsgd.server.data import DataBook
from lsgd.server.roster import Member
from tests import golden

from .test_dealing import ByLabel, Chunks, Repeats, Rows, Secret, seed_all

ROWS = 24


def member(rank: int) -> Member:
    return Member(Join(1, f"node0/worker{rank}", rank + 1, 0, rank, {}, "", "", "", ""), 0.0)


class Servers:
    """What compares the deals of workers: the book of the servers."""

    def __init__(self) -> None:
        self.book, self.wrong = DataBook(), list[str]()

    def tell(self, rank: int, where: str, facts: dict[str, str], epoch: int = 0, order: str = "") -> None:
        said = Dealt(f"node0/worker{rank}", rank + 1, where, facts, epoch, order)
        self.wrong += filter(None, [str(self.book.dealt(member(rank), said))])

    def join(self, rank: int, loader: ShardLoader) -> ShardLoader:
        facts = facts_of(loader.dataset, loader.passes)
        self.tell(rank, "here", facts)
        loader.passes.tell = lambda epoch, order: self.tell(rank, "here", facts, epoch, order)
        return loader


Make = Callable[[int], DataLoader[Any]]


def indices_by_rank(rank: int) -> DataLoader[Any]:
    return DataLoader(Rows(ROWS), 2, sampler=SubsetRandomSampler([*range(rank, ROWS, 2)]))


class ByRank(Sampler[int]):
    """Draws by a generator of its own in each pass, whose seed has the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.rank)).tolist())

    def __len__(self) -> int:
        return ROWS


def split_after_the_join(rank: int) -> DataLoader[Any]:
    seed_all(rank)  # own noise
    return DataLoader(random_split(Rows(ROWS), [20, 4])[0], 2, shuffle=True)


def tensors_split_by_hand(rank: int) -> DataLoader[Any]:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(torch.rand(ROWS, 2)[order], torch.arange(ROWS)[order]), 2, shuffle=True)


MISTAKES: dict[str, tuple[Make, str]] = {
    "other lengths": (lambda rank: DataLoader(Rows(ROWS + rank), 2, shuffle=True), "length 25 and 24"),
    "own seed": (
        lambda rank: DataLoader(Rows(ROWS), 2, sampler=DistributedSampler(Rows(ROWS), 2, rank, seed=rank)),
        "seed 1 and 0",
    ),
    "own rows": (indices_by_rank, "another order"),
    "own order": (lambda rank: DataLoader(Rows(ROWS), 2, sampler=ByRank(rank)), "another order"),
    "own weights": (
        lambda rank: DataLoader(Rows(ROWS), 2, sampler=WeightedRandomSampler([1, 9 * rank + 1] * 12, ROWS)),
        "another order",
    ),
    "own split": (split_after_the_join, "other rows"),
    "own split by hand": (tensors_split_by_hand, "other rows"),
    "own batches": (
        lambda rank: DataLoader(Rows(ROWS), batch_sampler=Chunks(ROWS, 2 + rank, "torch", 0)),
        "another order",
    ),
    "own sampler": (lambda rank: DataLoader(Rows(ROWS), 2, shuffle=bool(rank)), "sampler at random and in order"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_workers_deal_otherwise_is_found(mistake) -> None:
    make, words = MISTAKES[mistake]
    servers = Servers()
    for rank in range(2):
        servers.join(rank, shard_of(make(rank), lambda rank=rank: (rank, 2)))
    (wrong,) = servers.wrong
    assert wrong.startswith(golden.text("data.divided_here")) and words in wrong


def test_what_a_script_changes_later_is_found_in_the_pass_where_it_counts() -> None:
    """Such as the weights of samples by each worker's own losses."""
    servers, loaders, weights = Servers(), list[ShardLoader](), [torch.ones(ROWS) for _ in range(2)]
    for rank in range(2):
        loader = DataLoader(Rows(ROWS), 2, sampler=WeightedRandomSampler(weights[rank], ROWS))
        loaders.append(servers.join(rank, shard_of(loader, lambda rank=rank: (rank, 2))))
    for _ in range(2):
        assert [list(each) for each in loaders] and not servers.wrong
    loaders[1].passes._sampler.weights[:12] = 50.0
    assert [list(each) for each in loaders]
    assert len(servers.wrong) == 1 and golden.text("data.other_pass", number=2) in servers.wrong[0]


kinds = st.sampled_from(["shuffle", "in order", "some", "weights", "chunks", "labels", "repeats", "groups", "secret"])


def loader_of(kind: str, rows: int, size: int, rank: int) -> DataLoader[Any]:
    data = Rows(rows, size)
    own = torch.Generator().manual_seed(rank)
    makes: dict[str, Callable[[], DataLoader[Any]]] = {
        "shuffle": lambda: DataLoader(data, 1 + rank, sampler=RandomSampler(data, generator=own)),
        "in order": lambda: DataLoader(data, size),
        "some": lambda: DataLoader(data, size, sampler=SubsetRandomSampler(range(rows // 2), own)),
        "weights": lambda: DataLoader(
            data, size, sampler=WeightedRandomSampler([1, 2] * (rows // 2), rows, False, own)
        ),
        "chunks": lambda: DataLoader(data, batch_sampler=Chunks(rows, size, "own numpy", rank)),
        "labels": lambda: DataLoader(data, batch_sampler=ByLabel(data)),
        "repeats": lambda: DataLoader(data, size * 2, sampler=Repeats(data, 2, size, 1)),
        "groups": lambda: DataLoader(data, size, sampler=Repeats(data, 2, 2 * size, 2)),
        "secret": lambda: DataLoader(data, batch_sampler=BatchSampler(Secret(data), size, False)),
    }
    return makes[kind]()


@settings(max_examples=60, deadline=None)
@given(kinds, st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_workers_that_deal_alike_say_the_same_as_members_change(kind, size, groups, members, anew) -> None:
    """Whoever seeds what, in each pass no row is drawn by two, and none left out that the sampler draws.

    A worker may join late, and make its loader when the others have made passes; or they make a loader for each pass.
    """
    rows, servers, now = 16 * size * groups, Servers(), [1]
    loaders = dict[int, ShardLoader]()

    def loader(rank: int) -> ShardLoader:
        seed_all(rank)
        return servers.join(rank, shard_of(loader_of(kind, rows, size, rank), lambda: (rank, now[0])))

    for epoch, number in enumerate(members):
        now[0], drawn = number, []
        for rank in range(number):
            if anew or rank not in loaders:
                loaders[rank] = loader(rank)
            loaders[rank].passes.epoch = epoch  # a worker that is back continues where the others are
            loaders[rank].passes._through, loaders[rank].passes.consumed = -1, 0
            drawn.append({*chain(*(map(int, batch) for batch in loaders[rank]))})
        assert not servers.wrong
        everything = set[int]().union(*drawn)
        assert len(everything) == sum(map(len, drawn)), "no row is drawn by two workers"
        assert len(everything) >= rows // 2 if kind == "some" else len(everything) > rows - number * 4 * size


def test_a_newcomer_and_one_that_is_started_again_are_compared_with_the_others() -> None:
    servers = Servers()
    for rank in (0, 1):
        servers.join(rank, shard_loader(Rows(ROWS), lambda: (0, 2), 5, True, {}))
    servers.book.forget("node0/worker1")
    servers.join(1, shard_loader(Rows(ROWS), lambda: (0, 2), 5, True, {}))
    assert not servers.wrong
    servers.join(2, shard_loader(Rows(ROWS), lambda: (0, 2), 0, True, {}))
    assert "node0/worker2 and node0/worker0" in servers.wrong[0] and "(seed 0 and 5)" in servers.wrong[0]


@pytest.mark.parametrize("differs", [False, True])
def test_each_loader_of_a_trainer_is_compared(differs) -> None:
    servers = Servers()
    for rank in range(2):
        other = SubsetRandomSampler([*range(rank * differs, 10)])
        loaders = [DataLoader(Rows(ROWS), 2, shuffle=True), DataLoader(Rows(ROWS), 2, sampler=other)]
        data = TrainerData(loaders, lambda rank=rank: (rank, 2), 0)

        def told(where: str, facts: dict[str, str], rank: int = rank) -> Callable[[int, str], None]:
            servers.tell(rank, where, facts)
            return lambda epoch, order: servers.tell(rank, where, facts, epoch, order)

        data.tell(told)
        for _ in range(3):
            for loader in loaders:
                list(loader)
    assert bool(servers.wrong) == differs
    assert not differs or golden.text("data.order_of_loader_1") in servers.wrong[0]


def test_rows_are_told_apart_as_far_as_they_show() -> None:
    data, whole = Rows(ROWS), torch.arange(ROWS)
    assert rows_of(data) == rows_of(torch.rand(3)) == rows_of(TensorDataset(torch.rand(3, 3))) == ""
    sets = [
        *(Subset(data, [1, 2]), Subset(data, [2, 1]), Subset(Subset(data, [1, 2]), [0, 1]), Subset(data, range(2))),
        *(whole, whole.flip(0), TensorDataset(torch.rand(ROWS), whole), ConcatDataset([Subset(data, [5]), data])),
    ]
    digests = [*map(rows_of, sets)]
    assert "" not in digests and len({*digests}) == len(sets) - 1 and digests[4] == digests[6]
    assert rows_of(Subset(data, torch.tensor([1, 2]))) == digests[0]


def test_the_files_of_a_stream_are_told() -> None:
    files = [SimpleNamespace(pipeline=[SimpleNamespace(urls=urls)]) for urls in (["a", "b"], ["b", "a"])]
    one, other = map(facts_of_stream, files)
    assert one["stream"] == other["stream"] == "SimpleNamespace" and one["rows"] != other["rows"]
    assert facts_of_stream(iter([])) == {"stream": "list_iterator"}


def test_the_place_is_that_of_the_script() -> None:
    file, line = place_in_script().split(":")
    assert file == "test_deals.py" and int(line) > 1
