"""Streams: each worker's part, with the libraries that read them, at their end, and where a checkpoint was."""

import functools
import gc
import importlib
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from lsgd.algorithms.leader import LeaderSettings
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.island import Island
from lsgd.client.data.deals import rows_of
from lsgd.client.data.first import FirstData, FirstSteps
from lsgd.client.data.streams import Part, StreamLoader
from lsgd.errors import ConfigError, LsgdError
from lsgd.flat import FlatParameters, describe
from tests import golden

LENGTH = 23


class Own(IterableDataset[int]):
    """A stream as torch's documentation has it: the processes of a loader divide it among themselves."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(LENGTH) if info is None else range(info.id, LENGTH, info.num_workers))


class Counted:
    """A stream that knows its place, and how many elements were read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.at, self.read = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.length:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plain:
    """Any object that can be read from its beginning."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def part(stream: Any, rank: int = 0, size: int = 1) -> Part:
    return Part(stream, lambda: (rank, size))


def loader(stream: Any, rank: int = 0, size: int = 1, **options: Any) -> StreamLoader:
    return StreamLoader(part(stream, rank, size), bool, {"batch_size": 2, **options})


def values(batches: Iterable[torch.Tensor]) -> list[int]:
    return [int(x) for batch in batches for x in batch]


def pass_over(stream: Any, size: int, workers: int) -> list[list[int]]:
    return [values(loader(stream, rank, size, num_workers=workers)) for rank in range(size)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Own, Plain, lambda: map(abs, range(LENGTH))], ids=["torch's", "iterable", "iterator"])
def test_parts_are_disjoint_and_cover_the_stream(make, workers: int) -> None:
    parts = [values(loader(make(), rank, 3, num_workers=workers)) for rank in range(3)]
    assert sorted(x for each in parts for x in each) == list(range(LENGTH))
    assert all(6 <= len(each) <= 8 + workers for each in parts)


def test_a_change_of_members_counts_from_the_next_element_on() -> None:
    place = [0, 2]
    elements = iter(Part(Plain(), lambda: (place[0], place[1])))
    assert [next(elements) for _ in range(3)] == [0, 2, 4]
    place[:] = [2, 3]
    assert list(elements) == [5, 8, 11, 14, 17, 20]


def test_a_change_of_members_reaches_the_processes_of_a_loader() -> None:
    place = [0, 2]
    mine = Part(Thousand(), lambda: (place[0], place[1]))
    batches = iter(DataLoader(mine, batch_size=1, num_workers=1, prefetch_factor=1))
    assert values([next(batches)]) == [0]
    place[:] = [2, 3]
    mine.follow()
    drawn = values(batches)
    assert all(x % 3 == 2 for x in drawn[10:]) and len(drawn) > 300  # but for those that were drawn ahead


class Thousand:
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


def test_a_pass_that_was_left_early_is_over() -> None:
    mine = part(Counted())
    next(iter(mine))
    assert mine.epoch == 0
    list(mine)
    assert mine.epoch == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_the_passes_of_a_loader_are_counted_for_its_stream(workers: int) -> None:
    class Shuffled(Own):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 4)

    data = loader(Shuffled(), num_workers=workers)
    assert [values(data) for _ in range(3)] == [[0] * 4, [1] * 4, [2] * 4]
    next(iter(data))
    assert values(data) == [4] * 4


def test_the_processes_of_an_island_end_a_pass_together() -> None:
    others = iter([True, True, False])
    data = StreamLoader(part(Plain()), lambda has: has and next(others), {"batch_size": 2})
    assert values(data) == [0, 1, 2, 3]
    assert data.part.epoch == 0 and len(list(data.part)) == LENGTH and data.part.epoch == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: part(TensorDataset(torch.ones(3))), golden.pattern("data.tensor_dataset")),
        (lambda: part([1, 2]), "a list is none"),
        (lambda: part(7), "a int is none"),
        (lambda: loader(Own(), sampler=[1]), golden.pattern("data.no_sampler")),
    ],
)
def test_what_is_no_stream_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_data_that_has_ended_for_good_is_an_error_and_not_an_endless_loop() -> None:
    data = FirstData(FirstSteps(lambda *digests: None))
    once = map(float, range(3))
    assert list(data.of(once, 1)) == [0.0, 1.0, 2.0]
    assert list(data.of(once, 1)) == []  # the rest of a pass, after a resume, may have none
    with pytest.raises(LsgdError, match=golden.pattern("data.no_batch")):
        list(data.of(once, 1))


@pytest.mark.parametrize(("data", "compared"), [(part, False), (loader, False), (lambda stream: stream, True)])
def test_what_lsgd_has_divided_is_not_compared(data, compared: bool) -> None:
    """A newcomer that takes the place of another draws what that one has drawn."""

    class Tensors:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2), torch.zeros(2)])

    told: list[tuple[str, ...]] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = FirstSteps(lambda *digests: told.append(digests))
    first.watch(model.parameters(), [optimizer], exchanged=False)
    for batch in FirstData(first).of(data(Tensors()), 2):
        model(batch).sum().backward()
        optimizer.step()
    assert bool(told) == compared


# -- the place in a stream --------------------------------------------------------------------------------------


class Run:
    """A worker's checkpoints, and the one that they resume from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, nn.Linear(3, 2)

    def joins(self) -> Checkpoints:
        joined = Checkpoints(self.model, [], {}, self.folder, self.folder, Island())
        joined.load("node0/worker0", *describe(self.model))
        joined.start("5e55")
        return joined

    def saves(self, joined: Checkpoints) -> None:
        algorithm = LeaderSettings().create(FlatParameters(nn.Linear(3, 2)).buffers)
        assert joined.save(joined.take(5, algorithm, [], 3)) is not None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def rest_after(run: Run, data: Any, batches: int, again: Any) -> tuple[list[int], list[int]]:
    """Return what a loader yields after some batches, and what another one does that resumes there."""
    joined = run.joins()
    source = iter(joined.data.attend(data))
    for _ in range(batches):
        next(source)
    run.saves(joined)
    return values(source), values(run.joins().data.attend(again))


@pytest.mark.parametrize(("make", "workers"), [(Own, 0), (Plain, 0), (Counted, 0), (Own, 2), (Plain, 2)])
def test_a_loader_of_a_stream_goes_on_where_it_was(run, make, workers: int) -> None:
    rest, resumed = rest_after(
        run, loader(make(), 1, 2, num_workers=workers), 2, loader(make(), 1, 2, num_workers=workers)
    )
    assert resumed == rest and len(rest) > 4


@pytest.mark.parametrize(("make", "workers"), [(Own, 0), (Plain, 0), (Counted, 0), (Own, 2), (Plain, 2)])
def test_after_the_end_of_a_pass_the_next_one_begins(run, make, workers: int) -> None:
    def mine() -> Any:
        return loader(make(), 1, 2, num_workers=workers)

    whole = [list(x) for x in mine()]
    rest, resumed = rest_after(run, mine(), len(whole), mine())
    assert rest == [] and resumed == [int(x) for batch in whole for x in batch]


def test_a_stream_that_knows_its_place_is_not_read_again(run) -> None:
    again = Counted()
    rest_after(run, loader(Counted()), 4, loader(again))
    assert again.read == LENGTH - 8


def test_every_nth_element_goes_on_with_other_members(run) -> None:
    _, resumed = rest_after(run, loader(Plain(), 0, 2), 3, loader(Plain(), 1, 3))
    assert resumed == [13, 16, 19, 22]  # after 10, which was the last that any worker had drawn


def test_with_processes_a_loader_skips_as_much_as_all_had_read(run, caplog) -> None:
    caplog.set_level("INFO")
    options = {"num_workers": 1}
    _, resumed = rest_after(run, loader(Thousand(), 0, 2, **options), 30, loader(Thousand(), 0, 3, **options))
    assert resumed[0] == 120  # two workers had read 60 each; now three share the rest
    assert golden.text("data.reads_again") in caplog.text


def test_the_position_of_other_data_is_not_taken(run, caplog) -> None:
    joined = run.joins()
    mine = joined.data.attend(part(Plain()))
    run.saves(joined)
    del mine
    assert values(run.joins().data.attend(loader(Plain()))) == list(range(LENGTH))
    assert golden.text("checkpoints.other_data") in caplog.text


def test_an_object_attended_after_the_join_comes_back(run, caplog) -> None:
    joined, stream = run.joins(), Counted()
    joined.extras.attend("data", stream)
    stream.at = 9
    run.saves(joined)
    run.saves(run.joins())  # a checkpoint before the object is there again loses nothing
    caplog.clear()
    again, other = run.joins(), Counted()
    again.extras.attend("data", other)
    assert other.at == 9 and not caplog.messages
    again.extras.attend("more", Counted())
    assert golden.text("data.extra_stays") in caplog.text
    with pytest.raises(ConfigError, match=golden.pattern("data.taken_name")):
        again.extras.attend("data", stream)
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.extra_without_state_dict")):
        again.extras.attend("x", 1)  # type: ignore[arg-type]


# -- real libraries ---------------------------------------------------------------------------------------------


@functools.cache
def library(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=f"pip install {name}")


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[list[str]]:
    """Six files of webdataset: the first has 0 to 3, the second 10 to 13."""
    wds, paths = library("webdataset"), [str(tmp_path / f"{file}.tar") for file in range(6)]
    for file, path in enumerate(paths):
        with wds.TarWriter(path) as writer:
            for sample in range(4):
                writer.write({"__key__": f"{file}-{sample}", "x.cls": 10 * file + sample})
    yield paths
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files open
        gc.collect()


ALL = [10 * file + sample for file in range(6) for sample in range(4)]


def web(shards: list[str], **options: Any) -> Any:
    made = library("webdataset").WebDataset(shards, **{"shardshuffle": False, **options})
    return made.decode().to_tuple("x.cls").map(lambda sample: sample[0])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_webdataset_is_dealt_by_files(shards, workers: int) -> None:
    parts = pass_over(web(shards), 3, workers)
    assert [sorted({x // 10 for x in each}) for each in parts] == [[0, 3], [1, 4], [2, 5]]
    assert sorted(x for each in parts for x in each) == ALL


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_with_fewer_files_than_readers_is_dealt_by_samples(shards, caplog) -> None:
    parts = pass_over(web(shards), 7, 0)
    assert sorted(x for each in parts for x in each) == ALL and min(map(len, parts)) == 3
    assert golden.text("data.more_readers") in caplog.text
    parts = pass_over(web(shards), 4, 2)
    assert sorted(x for each in parts for x in each) == ALL


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_whose_files_are_drawn_at_random_stays_whole(shards) -> None:
    endless = web(shards, resampled=True)
    files = {next(iter(part(endless, 0, 6))) // 10 for _ in range(60)}
    assert len(files) > 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_goes_on_where_it_was(shards, run, caplog) -> None:
    rest, resumed = rest_after(run, loader(web(shards), 1, 2), 2, loader(web(shards), 1, 2))
    assert resumed == rest == [30, 31, 32, 33, 50, 51, 52, 53]
    _, resumed = rest_after(run, loader(web(shards), 1, 2), 2, loader(web(shards), 1, 3))
    assert resumed == [10, 11, 12, 13, 40, 41, 42, 43]
    assert golden.text("data.files_dealt_again") in caplog.text


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_without_reading_again(run, workers: int) -> None:
    stateful = importlib.import_module(f"{library('torchdata').__name__}.stateful_dataloader").StatefulDataLoader

    def made() -> Any:
        return stateful(part(Tokens(), 0, 2), batch_size=2, num_workers=workers)

    joined, data = run.joins(), made()
    joined.extras.attend("data", data)
    source = iter(data)
    first = [next(source) for _ in range(3)]
    run.saves(joined)
    again = made()
    run.joins().extras.attend("data", again)
    assert values(again) == values(source)
    assert len(first) == 3


class Tokens(Own):
    """A stream with a place, in each process of a loader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        mine = list(super().__iter__())
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]
        self.at = 0

    state_dict = Counted.state_dict
    load_state_dict = Counted.load_state_dict


@pytest.fixture(scope="module")
def rows() -> Any:
    """Six files' worth of rows of ``datasets``, as it reads them from a stream."""
    made = library("datasets").Dataset.from_dict({"x": ALL}).to_iterable_dataset(num_shards=6)
    return made.map(lambda row: {"x": row["x"]})


def xs(source: Iterable[Any]) -> list[int]:
    return values(batch["x"] for batch in source)


@pytest.mark.parametrize(("size", "workers"), [(3, 0), (2, 2), (4, 0)])
def test_datasets_are_dealt_by_files_or_rows(rows, size: int, workers: int) -> None:
    parts = [xs(loader(rows, rank, size, num_workers=workers)) for rank in range(size)]
    assert sorted(x for each in parts for x in each) == ALL
    if 6 % size == 0:
        assert [len({x // 10 for x in each}) for each in parts] == [6 // size] * size


def test_datasets_go_on_where_they_were_and_shuffle_each_pass(rows, run) -> None:
    shuffled = rows.shuffle(seed=1, buffer_size=1)
    data, joined = loader(shuffled, 1, 2), run.joins()
    first = xs(joined.data.attend(data))
    source = iter(data)
    begun = xs([next(source), next(source)])
    run.saves(joined)
    rest = xs(source)
    assert xs(run.joins().data.attend(loader(shuffled, 1, 2))) == rest
    assert first != begun + rest and data.part.epoch == 2


@pytest.fixture(scope="module")
def mosaic() -> Any:
    """mosaicml-streaming, without its image data sets: they need torchvision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "streaming.vision", ModuleType("streaming.vision"))
        yield pytest.importorskip("streaming", reason="pip install --no-deps mosaicml-streaming, and .[dev]")


@pytest.fixture
def samples(mosaic, tmp_path: Path) -> Callable[[], Any]:
    """A function that opens a stream of ALL in three shards, shuffled, as each worker does."""
    with mosaic.MDSWriter(out=str(tmp_path / "mds"), columns={"x": "int"}, size_limit=280) as writer:
        for x in ALL:
            writer.write({"x": x})
    assert len(list((tmp_path / "mds").glob("*.mds"))) == 3
    return lambda: mosaic.StreamingDataset(local=str(tmp_path / "mds"), shuffle=True, shuffle_seed=1, batch_size=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_mosaics_stream_is_dealt_by_samples(samples, workers: int) -> None:
    parts = [xs(loader(samples(), rank, 3, num_workers=workers)) for rank in range(3)]
    assert sorted(x for each in parts for x in each) == ALL and min(map(len, parts)) >= 8 - workers


def test_mosaics_stream_in_islands_is_dealt_by_itself_among_their_processes(samples, mosaic, monkeypatch) -> None:
    """Two workers of two processes."""
    monkeypatch.setattr("streaming.base.dataset.maybe_init_dist", bool)  # an island has its group
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for worker, process in itertools.product(range(2), range(2)):
        monkeypatch.setenv("RANK", str(process))
        parts.append(xs(loader(samples(), worker + 2 * process, 4)))
    assert [len(each) for each in parts] == [6] * 4 and sorted(x for each in parts for x in each) == ALL


def test_mosaics_stream_goes_on_where_it_was_and_shuffles_each_pass(samples, run) -> None:
    data, joined = loader(samples(), 1, 2), run.joins()
    first = xs(joined.data.attend(data))
    source = iter(data)
    begun = xs([next(source), next(source)])
    run.saves(joined)
    rest = xs(source)
    again = loader(samples(), 1, 2)
    resumed = run.joins().data.attend(again)
    assert xs(resumed) == rest and len(begun + rest) == 12 and first != begun + rest
    assert xs(data) == xs(again) != first


def test_a_newcomer_draws_mosaics_pass_of_its_own_count(samples) -> None:
    """Others are in their third pass: the parts of a pass fit together."""
    here, late = loader(samples(), 0, 2), loader(samples(), 1, 2)
    for _ in range(2):
        xs(here)
    late.part.set_epoch(2)
    assert sorted(xs(here) + xs(late)) == ALL


def test_the_rows_of_a_split_of_datasets_are_told() -> None:
    rows = library("datasets").Dataset.from_dict({"x": [*range(20)]})
    assert rows_of(rows) == ""
    one, same, other = (rows.train_test_split(0.5, seed=seed)["train"] for seed in (1, 1, 2))
    assert rows_of(one) == rows_of(same) != rows_of(other)
