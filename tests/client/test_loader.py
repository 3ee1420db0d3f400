"""Shards: disjoint, reshuffled, counted by what was consumed; and the warnings about data that is not sharded."""

import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lsgd.client.data.first import digest, warn_if_unsharded
from lsgd.client.data.samplers import shard_of
from lsgd.client.data.shards import length, shard_loader
from lsgd.client.data.streams import Part
from lsgd.errors import ConfigError
from tests import golden

from ..samplers import Turning


def dataset(length: int = 23) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def loader(rank: int = 0, size: int = 1, *, length: int = 23, shuffle: bool = True, seed: int = 0, **options):
    return shard_loader(dataset(length), lambda: (rank, size), seed, shuffle, {"batch_size": 4, **options})


def epoch(loader) -> list[int]:
    return [int(x) for (batch,) in loader for x in batch]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 23])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_are_disjoint_and_cover_the_dataset(size, shuffle) -> None:
    shards = [epoch(loader(rank, size, shuffle=shuffle)) for rank in range(size)]
    assert sorted(x for shard in shards for x in shard) == list(range(23))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert [len(loader(rank, size).sampler) for rank in range(size)] == [len(shard) for shard in shards]
    assert shuffle or all(shard == sorted(shard) for shard in shards)


def test_the_processes_of_an_island_have_equally_many_samples() -> None:
    places = [lambda rank=rank: (rank, 6) for rank in range(6)]  # 0, 2 and 4 are one of two workers
    loaders = [shard_loader(dataset(23), place, 0, True, {"batch_size": 2}, 3) for place in places]
    shards = [epoch(each) for each in loaders]
    assert list(map(len, shards)) == [4, 3, 4, 3, 4, 3]
    assert [len(each) for each in loaders] == [2] * 6
    drawn = [x for shard in shards for x in shard]
    assert len(set(drawn)) == len(drawn)
    assert {x for each in loaders for _ in range(8) for x in epoch(each)} == set(range(23))


def test_islands_of_different_sizes_share_no_samples() -> None:
    places = {(0, 4): 2, (2, 4): 2, (1, 2): 1}  # a worker of two processes and one of one
    shards = [epoch(shard_loader(dataset(22), lambda p=p: p, 0, True, {}, size)) for p, size in places.items()]
    assert list(map(len, shards)) == [5, 5, 11]
    assert len({x for shard in shards for x in shard}) == 21


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_deals_anew_so_that_each_worker_sees_all_data(shuffle) -> None:
    loaders = [loader(rank, 3, shuffle=shuffle) for rank in range(3)]
    epochs = [[epoch(each) for each in loaders] for _ in range(16)]
    assert all(sorted(x for shard in shards for x in shard) == list(range(23)) for shards in epochs)
    for rank in range(3):
        assert {x for shards in epochs for x in shards[rank]} == set(range(23))
    assert sorted(epochs[0][0]) != sorted(epochs[1][0])


def test_a_worker_at_another_epoch_has_a_shard_of_that_epoch() -> None:
    """Workers run at their own speed: the slow one goes on with the shards that are its own, one after the other."""
    fast, slow = loader(0, 2), loader(1, 2)
    first, second = epoch(fast), epoch(fast)
    assert sorted(first + epoch(slow)) == sorted(second + epoch(slow)) == list(range(23))


def test_each_epoch_has_an_order_of_its_own_and_the_seed_gives_it() -> None:
    one, same, other = loader(), loader(), loader(seed=1)
    epochs = [epoch(one) for _ in range(3)]
    assert [epoch(same) for _ in range(3)] == epochs
    assert len({tuple(e) for e in (*epochs, epoch(other))}) == 4


def test_shards_and_streams_are_counted_in_host_memory_whatever_the_default_is() -> None:
    with torch.device("meta"):  # a tensor there has no numbers
        assert sorted(loader().sampler.shard().tolist()) == list(range(23))
        assert Part(iter(range(3)), lambda: (1, 3)).place == (1, 3)


def test_an_epoch_left_early_is_followed_by_another_order() -> None:
    data = loader()
    first = [next(iter(data))[0].tolist() for _ in range(3)]
    assert len({tuple(batch) for batch in first}) == 3


def test_loaders_that_are_made_for_each_epoch_deal_anew_in_each() -> None:
    one, samplers, seen = loader(), [], []
    for _ in range(3):
        made, other = loader(), loader(length=22)
        for each in (made, other):
            each.sampler.follow(samplers)
            samplers.append(each.sampler)
        seen.append(epoch(made))
    assert seen == [epoch(one) for _ in range(3)] and seen[0] != seen[1]
    samplers[-1].follow(samplers)
    assert samplers[-1].epoch == 0, "none of other data counts"


def test_shards_follow_the_membership_from_the_next_epoch_on() -> None:
    place = [0, 2]
    data = shard_loader(dataset(), lambda: (place[0], place[1]), 0, True, {"batch_size": 4})
    batches = iter(data)
    next(batches)
    place[:] = [2, 3]
    assert 4 + sum(len(batch) for (batch,) in batches) == 12
    assert epoch(data) == epoch(loader_at({"epoch": 1, "consumed": 0, "seed": 0}, 2, 3))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_that_is_resumed_keeps_its_length_and_knows_what_is_left(drop_last) -> None:
    """Else ``EPOCHS * len(loader)``, of which scripts make their steps, would be short after a resume."""
    first, again = loader(1, 2, length=43, drop_last=drop_last), loader(1, 2, length=43, drop_last=drop_last)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    again.load_state_dict(first.state_dict())
    assert len(again) == len(first) == (5 if drop_last else 6)
    assert length(again) == len(again) - 3 == len(list(again))
    assert length(again) == len(again)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_that_is_resumed_after_the_last_batch_of_a_pass_has_a_whole_one(drop_last) -> None:
    first, again = loader(1, 2, length=43, drop_last=drop_last), loader(1, 2, length=43, drop_last=drop_last)
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    again.load_state_dict(first.state_dict())
    assert length(again) == len(again)
    assert next(batches, None) is None
    assert epoch(again) == epoch(first)


class Backwards(SequentialSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


@pytest.mark.parametrize(
    ("sampler", "drawn"),
    [
        (RandomSampler(range(100), replacement=True, num_samples=10), 5),
        (RandomSampler(range(100), num_samples=10), 5),
        (RandomSampler(range(100)), 50),
        (Backwards(range(100)), [x for first in range(94, 0, -10) for x in range(first, first - 5, -1)]),
        (RandomSampler(range(40)), 20),
        (SequentialSampler(range(40)), list(range(1, 40, 2))),
    ],
)
def test_a_sampler_keeps_its_order_its_batches_and_its_number_of_samples(sampler, drawn) -> None:
    shard = shard_of(DataLoader(dataset(100), batch_size=5, sampler=sampler), lambda: (1, 2))
    assert len(epoch(shard)) == drawn if isinstance(drawn, int) else epoch(shard) == drawn


@pytest.mark.parametrize(("sampler", "moved"), [(Turning(range(10)), 3), (Backwards(range(10)), 0)])
def test_a_samplers_own_epochs_are_set_through_the_shard(sampler, moved) -> None:
    shard = shard_of(DataLoader(dataset(10), batch_size=1, sampler=sampler), lambda: (1, 2))
    before = epoch(shard)
    shard.sampler.set_epoch(3)
    assert epoch(shard) == [(index + moved) % 10 for index in before]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_counts_what_was_consumed_and_not_what_was_prefetched(workers) -> None:
    options = {"num_workers": workers, **({"prefetch_factor": 4} if workers else {})}
    data = loader(**options)
    epoch(data)
    expected = epoch(loader_at(data.state_dict()))
    batches = iter(data)
    seen = [int(x) for _ in range(2) for x in next(batches)[0]]
    state = data.state_dict()
    assert state == {"epoch": 1, "consumed": 8, "seed": 0}

    again = loader_at(state)
    assert seen + epoch(again) == expected
    assert again.state_dict() == {"epoch": 2, "consumed": 0, "seed": 0}
    assert [int(x) for (batch,) in batches for x in batch] == expected[8:]
    assert epoch(again) == epoch(data)


def loader_at(state, rank: int = 0, size: int = 1):
    data = loader(rank, size)
    data.load_state_dict(state)
    return data


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shard_of(DataLoader(NoLength()), lambda: (0, 1)), golden.pattern("data.dataset_without_length")),
        (lambda: shard_loader(Stream(), lambda: (0, 1), 0, True, {}), golden.pattern("data.dataset_without_length")),
        (lambda: loader(0, 24), "23 samples for 24 workers"),
        (lambda: loader(sampler=[1]), "makes the sampler itself"),
        (lambda: loader(0, 8, batch_size=4, drop_last=True), golden.pattern("data.no_whole_batch")),
    ],
)
def test_what_cannot_be_sharded_is_refused(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


class OwnBatches(BatchSampler):
    pass


def test_an_unsharded_loader_warns(caplog) -> None:
    data = dataset()
    sharded = DistributedSampler(data, num_replicas=2, rank=0)
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        warn_if_unsharded(loader(0, 2), 2)
        warn_if_unsharded(DataLoader(data, sampler=sharded), 2)
        warn_if_unsharded(DataLoader(data, batch_sampler=BatchSampler(sharded, 4, drop_last=False)), 2)
        warn_if_unsharded(DataLoader(data, batch_sampler=OwnBatches(RandomSampler(data), 4, drop_last=False)), 2)
        warn_if_unsharded(DataLoader(data), 1)
        warn_if_unsharded([1, 2], 2)
        assert caplog.messages == []
        warn_if_unsharded(DataLoader(data, shuffle=True), 2)
        warn_if_unsharded(DataLoader(data), 3)
    assert [m.partition(":")[0] for m in caplog.messages] == [golden.text("data.not_sharded")] * 2
    assert golden.text("data.whole_dataset") in caplog.messages[1]


def test_digests_tell_batches_apart() -> None:
    one = [torch.arange(6.0).view(2, 3), {"y": torch.tensor([1, 2])}]
    same = [torch.arange(6.0).view(2, 3), {"y": torch.tensor([1, 2])}]
    others = [
        [torch.arange(6.0).view(3, 2), {"y": torch.tensor([1, 2])}],
        [torch.arange(6.0).view(2, 3), {"y": torch.tensor([1, 3])}],
        [torch.arange(6).view(2, 3), {"y": torch.tensor([1, 2])}],
        torch.tensor(3.0),
        torch.tensor([True, False]),
        torch.eye(3).to(torch.bfloat16),
    ]
    assert digest(one) == digest(same)
    assert len({digest(batch) for batch in (one, *others)}) == 7
    assert digest("no tensor") == digest([torch.empty(0)]) == digest(torch.eye(3).to_sparse()) == ""


class Endless(Sampler):
    """Batches without an end."""

    def __iter__(self):
        while True:
            yield [0, 1]


def test_a_sampler_without_a_length_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=golden.pattern("data.no_len")):
        shard_of(DataLoader(dataset(), batch_sampler=Endless()), lambda: (0, 2))
    with pytest.raises(ConfigError, match=golden.pattern("data.no_length")):
        shard_of(DataLoader(dataset(), sampler=Endless()), lambda: (0, 2))
