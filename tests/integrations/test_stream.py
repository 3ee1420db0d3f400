"""ShardStream: what a worker draws through a trainer of another library."""

from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any

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
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lsgd.client.data.shards import ShardSampler
from lsgd.client.data.trainers import Endless, TrainerData
from lsgd.errors import ConfigError, ExchangeError
from lsgd.integrations.shared import is_saver, state_of_run
from tests import golden

from ..samplers import Turning


def stream(rank: int = 0, size: int = 2, length: int = 20, per_pass: int = 20) -> Endless:
    return Endless(ShardSampler(length, lambda: (rank, size), 3, True), per_pass)


def test_each_epoch_of_the_run_is_dealt_to_its_workers_whatever_a_pass_is():
    drawn = [list(chain(*(stream_of for stream_of in [s, s, s]))) for s in map(stream, range(2))]
    for epoch in range(6):
        dealt = [mine[epoch * 10 : epoch * 10 + 10] for mine in drawn]
        assert sorted(chain(*dealt)) == list(range(20))
    assert drawn[0][:10] != drawn[0][20:30]


def test_a_pass_has_whole_batches():
    batches = BatchSampler(stream(length=21, per_pass=24), batch_size=8, drop_last=False)
    assert len(batches) == 3 and [len(batch) for batch in batches] == [8, 8, 8]


@pytest.mark.parametrize("trained", [0, 6, 10, 24, 40])
def test_it_goes_on_behind_what_was_trained_on_and_not_behind_what_was_drawn(trained):
    first = stream()
    drawn = [*first, *first, *first]
    for _ in range(trained // 2):
        first.consume(2)
    again = stream()
    again.load_state_dict(first.state_dict())
    assert list(again)[: len(drawn) - trained] == drawn[trained : trained + 20]


@pytest.mark.parametrize(("size", "length", "epoch"), [(4, 40, 1), (2, 44, 0)])
def test_another_number_of_workers_or_other_data_begins_a_new_epoch(size, length, epoch, caplog):
    """Where the shards are others, the position in the old one says nothing."""
    first = stream(length=40)
    assert len(list(first)) == 20
    first.consume(12)
    again = stream(size=size, length=length)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    drawn = next(iter(again))
    expected = ShardSampler(length, lambda: (0, size), 3, True)
    expected.epoch = epoch
    assert drawn == expected.shard()[0]
    again.consume(1)
    assert again.state_dict() == {"epoch": epoch, "consumed": 1, "seed": 3, "length": length, "place": [0, size]}
    assert golden.text("data.dealt_from", epoch=epoch) in caplog.text


def test_a_worker_goes_on_in_its_own_shard_where_the_one_that_saved_was(caplog) -> None:
    first, again = stream(), stream(rank=1)
    drawn = list(first)
    first.consume(6)
    again.load_state_dict(first.state_dict())
    rest = list(again)[:4]
    assert rest == list(stream(rank=1))[6:10] and not {*rest} & {*drawn[:10]} and not caplog.messages


def alone() -> tuple[int, int]:
    return 0, 1


def deal(sampler: Sampler[int], dataset: Dataset[int], size: int = 2) -> tuple[list[list[int]], TrainerData]:
    """Return what each of ``size`` workers draws in a pass through a trainer, and the last one's data."""
    drawn = []
    for rank in range(size):
        torch.manual_seed(0)  # all workers' samplers draw alike
        loader = DataLoader(dataset, 4, sampler=sampler)
        data = TrainerData(loader, lambda rank=rank: (rank, size), 0)
        drawn.append([int(index) for batch in loader for index in batch])
    return drawn, data


def test_what_a_sampler_of_the_script_leaves_out_is_left_out():
    (one, other), _ = deal(SubsetRandomSampler(range(16)), range(20))
    assert len(one) == len(other) == 16 and {*one[:8]} | {*other[:8]} == {*range(16)} == {*one} | {*other}


@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler])
def test_what_a_sampler_of_a_part_leaves_out_is_left_out(sampler):
    drawn, _ = deal(sampler(range(16)), range(20))
    assert {*chain(*drawn)} == {*range(16)}


def test_the_weights_of_a_sampler_count():
    drawn, _ = deal(WeightedRandomSampler([1.0] * 4 + [0.0] * 16, 40), range(20))
    assert [len(each) for each in drawn] == [40, 40] and {*drawn[0], *drawn[1]} == {*range(4)}


def test_a_sampler_with_fewer_samples_than_workers_is_an_error():
    with pytest.raises(ConfigError, match=golden.pattern("data.fewer_samples")):
        deal(SubsetRandomSampler([7]), range(20))


@pytest.mark.parametrize("sampler", [RandomSampler(range(20)), SequentialSampler(range(20))])
def test_a_sampler_that_draws_each_sample_once_makes_way_for_shards(sampler):
    (one, other), data = deal(sampler, range(20))
    assert sorted(one[:10] + other[:10]) == [*range(20)] and isinstance(data.parts[0].passes, ShardSampler)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_says_whether_shards_are_shuffled(shuffle):
    loader = DataLoader(range(20), 4, sampler=DistributedSampler(range(20), 1, 0, shuffle))
    TrainerData(loader, alone, 0)
    drawn = [int(index) for batch in loader for index in batch]
    assert sorted(drawn) == [*range(20)] and (drawn == sorted(drawn)) is not shuffle


def test_a_samplers_own_epochs_follow_one_another():
    """Two workers draw its batches in one pass of a trainer: those of two epochs; the second begins a sample later."""
    (one, other), _ = deal(Turning(range(16)), range(16))
    assert one == [0, 1, 2, 3, 8, 9, 10, 11, 1, 2, 3, 4, 9, 10, 11, 12]
    assert other == [4, 5, 6, 7, 12, 13, 14, 15, 5, 6, 7, 8, 13, 14, 15, 0]


def test_a_loader_of_two_trainings_is_dealt_from_the_scripts_sampler_in_both():
    loader = DataLoader(range(20), 4, sampler=SubsetRandomSampler(range(16)))
    sampler = loader.sampler
    for _ in range(2):
        TrainerData(loader, alone, 0)
        assert loader.batch_sampler.sampler.replaces is sampler and sorted(map(int, chain(*loader))) == [*range(16)]


class Eight(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Buckets(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])


def through_a_trainer(make: Callable[[], Any], size: int = 2, passes: int = 1) -> list[list[Any]]:
    """Return the batches that each worker's trainer draws in some passes over what ``make`` returns."""
    drawn = []
    for rank in range(size):
        loaders = make()
        torch.manual_seed(rank)
        TrainerData(loaders, lambda rank=rank: (rank, size), 0)
        batches = loaders.values() if isinstance(loaders, dict) else [loaders]
        drawn.append([[x.tolist() for _ in range(passes) for x in each] for each in batches])
    return drawn


def test_a_stream_is_dealt_sample_by_sample():
    assert through_a_trainer(lambda: DataLoader(Eight(), 2)) == [[[[0, 2], [4, 6]]], [[[1, 3], [5, 7]]]]


def test_batches_of_the_script_stay_whole_and_a_pass_as_long_as_it_was():
    one, other = through_a_trainer(lambda: DataLoader(range(8), batch_sampler=Buckets(range(8), 2, False)))
    assert one == [[[0, 1], [4, 5]] * 2] and other == [[[2, 3], [6, 7]] * 2]


def test_each_loader_of_several_is_dealt():
    drawn = through_a_trainer(lambda: {"a": DataLoader(range(16), 4, shuffle=True), "b": DataLoader(range(8), 2)})
    for name, size in enumerate((16, 8)):
        halves = [sorted(chain(*each[name]))[: size // 2] for each in drawn]
        passes = [each[name][: len(each[name]) // 2] for each in drawn]
        assert sorted(chain(*chain(*passes))) == [*range(size)], halves


def test_positions_of_several_loaders_are_those_of_what_was_trained_on():
    def begun() -> tuple[TrainerData, list[Iterator[Any]]]:
        buckets = Buckets(range(8), 2, False)
        loaders = [DataLoader(range(16), 4, shuffle=True), DataLoader(range(8), batch_sampler=buckets)]
        return TrainerData(loaders, lambda: (1, 2), 0), [iter(each) for each in loaders]

    (first, loaders), (again, loaders_again) = begun(), begun()
    drawn = [[next(each).tolist() for _ in range(3)] for each in loaders]
    first.consume()
    again.load_state_dict(first.state_dict())
    assert [[next(each).tolist() for _ in range(2)] for each in loaders_again] == [each[1:] for each in drawn]


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24).tolist())


@pytest.mark.parametrize("trained", [0, 1, 2, 5, 6, 8])
def test_a_stream_goes_on_behind_what_was_trained_on_and_not_behind_what_was_read_ahead(trained):
    """Also if its Trainer counts its passes from 0 again, and after the last batch of a pass."""

    def begun() -> tuple[TrainerData, DataLoader[int]]:
        loader = DataLoader(Shuffled(), 2)
        return TrainerData(loader, lambda: (1, 2), 0), loader

    def batches(loader: DataLoader[int]) -> Iterator[list[int]]:
        while True:
            yield from ([*batch.tolist()] for batch in loader)

    (first, loader), (again, loader_again) = begun(), begun()
    source = batches(loader)
    drawn = [next(source)]
    for _ in range(trained):
        if len(drawn) % 6:  # of a pass: the next one begins when all of it was trained on
            drawn.append(next(source))
            first.consume()
        else:
            first.consume()
            drawn.append(next(source))
    again.load_state_dict(first.state_dict())
    again.parts[0].set_epoch(0)
    wanted = [*drawn[trained:], *(next(source) for _ in range(3))]
    ahead = batches(loader_again)
    assert [next(ahead) for _ in wanted] == wanted
    assert again.state_dict() != {"loaders": [None]}


def test_a_stream_that_other_processes_read_has_no_position_and_says_so(caplog):
    data = TrainerData(DataLoader(Shuffled(), 2, num_workers=1), lambda: (0, 2), 0)
    data.consume()
    assert data.state_dict() == {"loaders": [None]}
    assert not caplog.messages
    data.load_state_dict({"loaders": [None]})
    assert golden.text("data.begins_again") in caplog.text


class NoEnd(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[1, 2], [3, 4]], golden.pattern("data.not_divided")),
        (DataLoader(range(8), 2, sampler=NoEnd()), golden.pattern("data.no_len_no_end")),
        (DataLoader(range(8), batch_sampler=NoEnd()), golden.pattern("data.no_len_no_end")),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_lines_that_do_it(data, message):
    with pytest.raises(ConfigError, match=message) as refused:
        TrainerData(data, alone, 0)
    assert "Subset(dataset, worker.rows(len(dataset)))" in str(refused.value)


class Unanswered:
    """A worker whose servers do not answer."""

    name, progress, consensus_distance, stopped = "node0/worker0", 0.25, None, False

    def status(self, timeout_s: float) -> None:
        raise ExchangeError(f"waiting for the status for {timeout_s:g} s: no answer")


def test_a_log_goes_on_without_the_servers():
    assert state_of_run(Unanswered()) == {"lsgd_progress": 0.25}
    assert not is_saver(Unanswered())


def test_a_dataset_smaller_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match="1 samples for 2 workers"):
        list(stream(rank=1, length=1))
