"""Samplers of scripts: no sample twice, none left out, groups whole, whoever seeds what, and as members change."""

import random
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler

from lsgd.client.data.parts import again_over
from lsgd.client.data.passes import Passes, rows_of
from lsgd.client.data.randomness import common
from lsgd.client.data.samplers import ROWS_BY_HAND, EveryNth, WholeBatches, WithinPart, runs_of, shard_of
from lsgd.client.data.shards import ShardLoader, ShardSampler
from lsgd.errors import ConfigError
from tests import golden

from ..samplers import Turning


class Rows:
    """A dataset of row numbers, with a label for each."""

    def __init__(self, length: int, group: int = 1) -> None:
        self.labels = [row // group for row in range(length)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> int:
        return index


class Repeats(Sampler[int]):
    """Each row some times in a row, for a group of completions, and chunks of rows some times: as for GRPO."""

    def __init__(self, data_source: Rows, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1) -> None:
        self.data_source, self.num_samples = data_source, len(data_source)
        self.mini_repeat_count, self.batch_size, self.repeat_count = mini_repeat_count, batch_size, repeat_count
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        rows = torch.randperm(self.num_samples, generator=self.generator).tolist()
        chunks = [rows[first : first + self.batch_size] for first in range(0, len(rows), self.batch_size)]
        for chunk in (chunk for chunk in chunks if len(chunk) == self.batch_size):
            for _ in range(self.repeat_count):
                yield from (row for row in chunk for _ in range(self.mini_repeat_count))

    def __len__(self) -> int:
        chunks = self.num_samples // self.batch_size
        return chunks * self.batch_size * self.mini_repeat_count * self.repeat_count


class ByLabel(BatchSampler):
    """One batch of each label of the dataset, in an order by Python's generator."""

    def __init__(self, dataset: Rows) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[list[int]]:
        labels = [*dict.fromkeys(self.dataset.labels)]
        random.shuffle(labels)
        for label in labels:
            yield [row for row, its in enumerate(self.dataset.labels) if its == label]

    def __len__(self) -> int:
        return len(set(self.dataset.labels))


class Chunks(Sampler[list[int]]):
    """Batches of neighbours, in an order of a generator; holds indices, and no dataset."""

    def __init__(self, rows: int, size: int, kind: str, seed: int) -> None:
        self.batches = [[*range(first, min(first + size, rows))] for first in range(0, rows, size)]
        self.kind, self.numpys, self.pythons = kind, np.random.default_rng(seed), random.Random(seed)

    def __iter__(self) -> Iterator[list[int]]:
        orders: dict[str, Callable[[], list[int]]] = {
            "torch": lambda: torch.randperm(len(self)).tolist(),
            "numpy": lambda: np.random.permutation(len(self)).tolist(),
            "python": lambda: random.sample(range(len(self)), len(self)),
            "own numpy": lambda: self.numpys.permutation(len(self)).tolist(),
            "own python": lambda: self.pythons.sample(range(len(self)), len(self)),
        }
        return (self.batches[place] for place in orders[self.kind]())

    def __len__(self) -> int:
        return len(self.batches)


class Run:
    """Workers with a loader of the same data each, but other seeds."""

    def __init__(self, make: Callable[[int], DataLoader[int]], most: int) -> None:
        self.size, self.loaders = most, list[ShardLoader]()
        for rank in range(most):
            seed_all(rank)
            self.loaders.append(shard_of(make(rank), lambda rank=rank: (rank % self.size, self.size)))

    def draw(self, size: int) -> list[list[list[int]]]:
        """Return each worker's batches of a pass of so many."""
        self.size = size
        drawn = []
        for rank, loader in enumerate(self.loaders):
            seed_all(100 + rank)
            before = random.random(), np.random.rand(), torch.rand(1).item()
            seed_all(100 + rank)
            batches = [x.tolist() for x in loader]
            assert len(batches) == len(loader) or rank >= size
            after = random.random(), np.random.rand(), torch.rand(1).item()
            assert after[:2] == before[:2], "the order of a pass costs the script none of its random numbers"
            drawn.append(batches)
        return drawn[:size]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


kinds = st.sampled_from(["torch", "numpy", "python", "own numpy", "own python"])
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=30)
@given(st.integers(8, 40), sizes, st.integers(1, 5), kinds)
def test_batches_of_the_script_are_dealt_once_each(rows, members, size, kind) -> None:
    rows = max(rows, 4 * size)
    run = Run(lambda rank: DataLoader(Rows(rows), batch_sampler=Chunks(rows, size, kind, rank)), 4)
    for number in members:
        drawn = run.draw(number)
        assert sorted(chain(*chain(*drawn))) == [*range(rows)]
        assert all(batch[0] % size == 0 and len(batch) in (size, rows % size) for each in drawn for batch in each)
        assert max(map(len, drawn)) - min(map(len, drawn)) <= 1


@settings(max_examples=30)
@given(st.integers(4, 40), sizes, st.integers(1, 5), st.booleans())
def test_rows_are_dealt_once_each(rows, members, size, whole) -> None:
    indices = range(rows) if whole else random.Random(rows).sample(range(rows), max(4, rows // 2))

    def make(rank: int) -> DataLoader[int]:
        generator = torch.Generator().manual_seed(rank)
        sampler = RandomSampler(Rows(rows), generator=generator) if whole else SubsetRandomSampler(indices, generator)
        return DataLoader(Rows(rows), size, sampler=sampler)

    run, orders = Run(make, 4), []
    for number in members:
        drawn = run.draw(number)
        assert sorted(chain(*chain(*drawn))) == sorted(indices)
        orders.append([*chain(*chain(*drawn))])
    assert rows < 20 or len({tuple(each) for each in orders}) == len(orders), "each pass has an order of its own"


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 3), sizes)
def test_groups_that_a_sampler_makes_by_the_data_stay_whole(group, groups, members) -> None:
    rows = 4 * group * groups
    run = Run(lambda rank: DataLoader(data := Rows(rows, group), batch_sampler=ByLabel(data)), 4)
    for number in members:
        drawn = run.draw(number)
        assert sorted(chain(*chain(*drawn))) == [*range(rows)]
        assert all(len(batch) == group and batch[0] % group == 0 for each in drawn for batch in each)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), sizes)
def test_repeats_for_a_group_stay_together(repeats, chunk, times, chunks, parts, members) -> None:
    """Each worker draws whole groups of its own prompts, in chunks that it sees as often as the sampler says.

    Also if the loader has several batches in a chunk, so that the sampler comes back to each.
    """
    chunk, rows = chunk * parts, 4 * chunk * chunks * parts

    def make(rank: int) -> DataLoader[int]:
        data = Rows(rows)
        return DataLoader(data, chunk * repeats // parts, sampler=Repeats(data, repeats, chunk, times))

    run = Run(make, 4)
    for number in members:
        drawn = run.draw(number)
        mine = [{row for batch in each for row in batch} for each in drawn]
        assert len(set.union(*mine)) == sum(map(len, mine)), "no prompt is in two workers"
        assert sum(map(len, mine)) > rows - number * chunk, "only an incomplete chunk is left out"
        for each in drawn:
            assert len(each) % (times * parts) == 0
            for first in range(0, len(each), times * parts):
                again = each[first : first + times * parts]
                batch = [*chain(*again[:parts])]
                assert all([*chain(*again[k : k + parts])] == batch for k in range(0, len(again), parts))
                assert all(len({*batch[k : k + repeats]}) == 1 for k in range(0, len(batch), repeats))


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(4, 20), sizes)
def test_repeats_that_do_not_show_how_they_were_made_stay_together_too(repeats, size, groups, members) -> None:
    """Also where a batch ends in the middle of a group."""

    class Hidden(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return (row for row in range(4 * groups * size) for _ in range(repeats))

        def __len__(self) -> int:
            return 4 * groups * size * repeats

    run = Run(lambda rank: DataLoader(Rows(4 * groups * size), size, sampler=Hidden()), 4)
    for number in members:
        mine = [set(chain(*each)) for each in run.draw(number)]
        assert len(set.union(*mine)) == sum(map(len, mine)) == 4 * groups * size


@pytest.mark.parametrize("size", [2, 3])
def test_the_processes_of_an_island_get_equally_many_batches(size) -> None:
    loaders = [
        shard_of(DataLoader(Rows(40), batch_sampler=Chunks(40, 4, "torch", 0)), lambda r=r: (r, 2 * size), size)
        for r in range(2 * size)
    ]
    drawn = [[x.tolist() for x in each] for each in loaders]
    assert [len(each) for each in drawn] == [len(each) for each in loaders]
    assert all(len(drawn[rank]) == len(drawn[rank % 2]) for rank in range(2 * size))
    rows = [*chain(*chain(*drawn))]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda data: DataLoader(data, 4, shuffle=True), ShardSampler),
        (lambda data: DataLoader(data, 4, sampler=SubsetRandomSampler(range(10))), EveryNth),
        (lambda data: DataLoader(data, 4, sampler=Turning(data)), WholeBatches),
        (lambda data: DataLoader(data, 4, sampler=Turning(range(20))), WholeBatches),
        (lambda data: DataLoader(data, 4, sampler=Repeats(data, 2)), WholeBatches),
        (lambda data: DataLoader(data, 2, sampler=Repeats(data, 2, 2, 2)), WithinPart),
        (lambda data: DataLoader(data, 4, sampler=Secret(data)), WithinPart),
        (lambda data: DataLoader(data, batch_sampler=ByLabel(data)), WholeBatches),
        (lambda data: DataLoader(data, batch_sampler=Chunks(20, 2, "torch", 0)), WholeBatches),
        (lambda data: DataLoader(data, batch_size=None, sampler=Chunks(20, 2, "torch", 0)), WholeBatches),
        (lambda data: DataLoader(data, batch_sampler=Backwards(RandomSampler(data), 4, False)), WholeBatches),
        (lambda data: DataLoader(data, batch_sampler=Backwards(Secret(data), 4, False)), WithinPart),
        (lambda data: DataLoader(data, batch_sampler=Backwards(SubsetRandomSampler(range(9)), 4, False)), WholeBatches),
    ],
)
def test_what_a_sampler_is_says_how_it_is_dealt(make, kind) -> None:
    loaders = [shard_of(make(Rows(20, 5)), lambda rank=rank: (rank, 2)) for rank in range(2)]
    assert type(loaders[0].passes) is kind
    drawn = [list(chain(*([*map(int, x)] for x in each))) for each in loaders]
    assert drawn[0] and not {*drawn[0]} & {*drawn[1]}
    assert isinstance(loaders[0].batch_sampler or loaders[0].sampler, Passes | BatchSampler)


class Secret(Sampler[int]):
    """Draws by numbers that nobody can know."""

    def __init__(self, data_source: object) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(len(self)), len(self)))

    def __len__(self) -> int:
        return len(self.data_source)


class InPlace(Chunks):
    """Shuffles its batches where they are, so that each pass begins with the order of the last."""

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


def test_no_pass_depends_on_those_before_it() -> None:
    """A worker that joins late has not made them."""
    early, late = (
        shard_of(DataLoader(Rows(40), batch_sampler=InPlace(40, 2, "", 0)), lambda r=rank: (r, 2)) for rank in range(2)
    )
    for _ in range(3):
        passes = [x.tolist() for x in early]
    late.passes.set_epoch(2)
    assert sorted(chain(*passes, *([*x.tolist()] for x in late))) == [*range(40)]


class Backwards(BatchSampler):
    """A subclass, as sentence-transformers has them."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([*super().__iter__()][::-1])


def test_a_part_is_not_taken_of_indices_or_of_what_has_other_rows() -> None:
    data = Rows(8)

    class Labelled(ByLabel):
        def __init__(self, dataset: Rows, labels: list[int]) -> None:
            super().__init__(dataset)
            self.labels = labels

    class Counted(ByLabel):
        def __init__(self, dataset: Rows, number: int) -> None:
            super().__init__(dataset)
            self.number = number

    assert again_over(ByLabel(data), data) is not None and again_over(Counted(data, 3), data) is not None
    assert again_over(Turning([*range(8)]), data) is None, "a list may be of indices"
    assert again_over(Labelled(data, [0] * 8), data) is None
    assert again_over(Counted(data, 8), data) is None, "a number that may be that of rows"
    assert again_over(Chunks(8, 2, "torch", 0), data) is None


@pytest.mark.parametrize("made", [lambda: Chunks(24, 2, "own numpy", 3), lambda: ByLabel(Rows(24, 4))])
def test_a_position_is_kept_and_a_new_number_of_workers_deals_anew(made) -> None:
    def loader(rank: int, size: int) -> ShardLoader:
        return shard_of(DataLoader(Rows(24, 4), batch_sampler=made()), lambda: (rank, size))

    first = loader(1, 2)
    list(first)
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(2)]
    saved = first.position()
    again, other = loader(1, 2), loader(0, 3)
    assert again.fits(saved) and other.fits(saved)
    assert not loader_of_rows(1, 2).fits(saved)
    again.take_position(saved)
    other.take_position(saved)
    assert [x.tolist() for x in again] == [x.tolist() for x in batches] and seen
    assert again.state_dict() == {"epoch": 2, "consumed": 0, "seed": 0} == other.state_dict()


def loader_of_rows(rank: int, size: int) -> ShardLoader:
    return shard_of(DataLoader(Rows(24), 2), lambda: (rank, size))


def test_a_samplers_epochs_go_on_and_never_back() -> None:
    """A worker that was started again has its place from the run, whatever its own loop counts."""
    data = Rows(10)
    shard = shard_of(DataLoader(data, 1, sampler=Turning([*range(10)])), lambda: (0, 1))
    passes = []
    for epoch in (0, 1, 5, 0):
        shard.sampler.set_epoch(epoch)
        passes.append(next(iter([x.tolist() for x in shard]))[0])
    assert passes == [0, 1, 5, 6]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_by_hand_are_all_rows_and_others_in_each_epoch(size) -> None:
    epochs = [[rows_of(10, (rank, size), epoch) for rank in range(size)] for epoch in range(size)]
    assert all(sorted(chain(*parts)) == [*range(10)] for parts in epochs)
    assert all(sorted(chain(*(parts[rank] for parts in epochs))) == [*range(10)] for rank in range(size))
    with pytest.raises(ConfigError, match="10 samples for 11 workers"):
        rows_of(10, (0, 11), 0)


def test_runs_end_where_other_rows_begin() -> None:
    assert runs_of([[0, 1], [1, 0], [2, 3], [3, 4], [5]]) == [[[0, 1], [1, 0]], [[2, 3], [3, 4]], [[5]]]
    assert runs_of([1, 1, 2]) == [[1, 1], [2]]


class Strange(Secret):
    def __iter__(self) -> Iterator[int]:
        return iter([len(self.data_source), random.SystemRandom().randrange(1 << 60)])


class Longer(Secret):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Strange, "over 4 samples draws 4"),
        (Longer, golden.pattern("data.no_end_of_8")),
        (lambda data: Secret([*range(8)]), golden.pattern("data.another_order")),
    ],
)
def test_what_neither_way_divides_is_refused_with_the_lines_that_do_it(sampler, message) -> None:
    data = Rows(8)
    with pytest.raises(ConfigError, match=message) as refused:
        list(shard_of(DataLoader(data, 1, sampler=sampler(data)), lambda: (0, 2)))
    assert ROWS_BY_HAND in str(refused.value)


def test_too_few_batches_for_the_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=golden.pattern("data.fewer_batches")):
        shard_of(DataLoader(Rows(8), batch_sampler=Chunks(8, 4, "torch", 0)), lambda: (2, 3))


def test_the_common_stream_leaves_all_generators_as_they_were() -> None:
    generators = Chunks(8, 2, "torch", 5), SubsetRandomSampler(range(4), torch.Generator().manual_seed(5))

    def numbers() -> list[object]:
        own = generators[0].numpys.random(), generators[0].pythons.random()
        return [*own, torch.rand(1, generator=generators[1].generator).item(), torch.rand(1).item(), random.random()]

    seed_all(1)
    states = torch.get_rng_state(), random.getstate()
    with common(0, 0, generators[0]), common(0, 0, generators[1]):
        first = numbers()
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    seed_all(2)
    with common(0, 0, generators[0]), common(0, 0, generators[1]):
        assert numbers() == first
    with common(0, 1, generators[0]), common(0, 1, generators[1]):
        assert all(one != other for one, other in zip(numbers(), first, strict=True))
