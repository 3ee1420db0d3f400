"""Checkpoints as files: what comes back, what is refused, and what a failed write leaves."""

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lsgd.algorithms import create
from lsgd.client.checkpoint_file import DamagedError, Packed, pack, read, unpack, write
from lsgd.client.checkpoints import Checkpoints
from lsgd.client.loader import ShardLoader, shard_loader, track
from lsgd.client.run_folder import checkpoint_path, counts, find_run
from lsgd.errors import ConfigError
from lsgd.flat import FlatParameters, describe
from lsgd.settings import LeaderSettings

WORKER = "node0/worker1"
ABOUT = {"model": "m", "model_summary": "2 tensors"}


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.tensor(1.5), 0: [1, 2.5, None, True], "b": ("x", {"c": torch.eye(2).bool()})},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(2, 0)}},
        [torch.full((2,), float("nan"), dtype=torch.bfloat16), float("inf"), 1 << 80, {}, (), ""],
    ],
)
def test_a_state_comes_back_as_it_was(tmp_path: Path, state: object) -> None:
    path = write(tmp_path, 7, WORKER, pack(state), ABOUT)
    assert path == tmp_path / "7" / "node0-worker1.safetensors"
    assert repr(read(path, "m", "")) == repr(state)  # NaN is not equal to itself


def test_what_is_packed_is_a_copy() -> None:
    x = torch.zeros(3)
    packed = pack([x])
    x += 1
    assert unpack(packed)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "message"),
    [({"a": [1, object()]}, "a/1 is a object"), ({"a": {1.5: 2}}, "a has a key that is a float")],
)
def test_what_no_file_can_hold_is_named(state: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(state)


def test_the_last_two_of_a_worker_are_kept_and_others_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 10, "node0/worker0", pack({"a": 1}), ABOUT)
    for count in (90, 10, 20, 30):
        write(tmp_path, count, WORKER, pack({"a": count}), ABOUT)
    assert counts(tmp_path, WORKER) == [20, 30]
    assert counts(tmp_path) == [10, 20, 30]
    assert not (tmp_path / "90").exists()


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_in_the_middle_leaves_what_was_there(tmp_path: Path, caplog) -> None:
    model = nn.Linear(64, 64)
    checkpoints = Checkpoints(model, [], {}, tmp_path, None)
    checkpoints.load(WORKER, *describe(model))
    algorithm = create(LeaderSettings(), FlatParameters(model).buffers)
    checkpoints.take(5, algorithm, [], 5)
    path = checkpoints.save(5)
    assert path is not None
    before = path.read_bytes()
    for count in (5, 6):
        checkpoints.take(count, algorithm, [], count)
        with disk_of(1000):
            assert checkpoints.save(count) is None
    assert f"the checkpoint of 6 iterations cannot be written to {tmp_path}: " in caplog.text
    assert path.read_bytes() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    checkpoints.take(7, algorithm, [], 7)
    assert checkpoints.save(8) is None  # of another round
    checkpoints.take(8, algorithm, [], 8)
    assert checkpoints.save(8) is not None
    assert counts(tmp_path, WORKER) == [5, 8]


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    packed = pack({"a": torch.zeros(100)})
    path = write(tmp_path, 1, WORKER, packed, ABOUT)
    with pytest.raises(ConfigError, match=f"{path} is of another model: 2 tensors, and this is 3 tensors"):
        read(path, "other", "3 tensors")
    write(tmp_path, 1, WORKER, packed, {**ABOUT, "lsgd": "0"})
    with pytest.raises(ConfigError, match=f"{path} has format 0, this lsgd reads 1"):
        read(path, "m", "")
    write(tmp_path, 1, WORKER, Packed(packed.tensors, "{"), ABOUT)
    with pytest.raises(DamagedError, match=f"{path} cannot be read"):
        read(path, "m", "")
    whole = path.read_bytes()
    for length in (0, 4, 50, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=f"{path} cannot be read"):
            read(path, "m", "")


def saved(folder: Path, model: nn.Module, *, count: int = 5, **extra: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(model, [optimizer], extra, folder, None)
    checkpoints.load(WORKER, *describe(model))
    checkpoints.take(count, create(LeaderSettings(), FlatParameters(model).buffers), [0.5], 3)
    assert checkpoints.save(count) is not None


def resumed(folder: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, **extra: nn.Module) -> int:
    return Checkpoints(model, optimizers, extra, None, folder).load(WORKER, *describe(model))


def test_the_last_whole_file_is_taken_and_none_but_damaged_ones_are_an_error(tmp_path: Path, caplog) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for count in (5, 6):
        saved(tmp_path, model, count=count)
    last = checkpoint_path(tmp_path, 6, WORKER)
    last.write_bytes(last.read_bytes()[:-1])
    assert resumed(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1)) == 5
    assert f"{last} cannot be read" in caplog.text
    assert torch.equal(other.weight, model.weight)
    checkpoint_path(tmp_path, 5, WORKER).write_bytes(b"")
    with pytest.raises(DamagedError, match=f"{checkpoint_path(tmp_path, 5, WORKER)} cannot be read"):
        resumed(tmp_path, other)
    assert resumed(tmp_path / "elsewhere", other) == 0


def test_other_optimizers_and_extras_are_named(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    saved(tmp_path, model, ema=model)
    with pytest.raises(ConfigError, match="has the state of 1 optimizers, and this worker has 0"):
        resumed(tmp_path, model)
    with pytest.raises(ConfigError, match=r"does not fit the optimizer: .*parameter group"):
        resumed(tmp_path, model, torch.optim.SGD([model.weight], lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = nn.Linear(3, 2)
    assert resumed(tmp_path, model, optimizer, ema=ema, other=ema) == 5
    assert torch.equal(ema.weight, model.weight)
    assert "has no extra 'other'" in caplog.text
    with pytest.raises(ConfigError, match=r"extra\['x'\] is a int, without state_dict"):
        Checkpoints(model, [], {"x": 1}, None, None)  # type: ignore[dict-item]


def test_the_newest_run_with_checkpoints_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"nothing to resume: no checkpoint of node 0 lies in {tmp_path}"):
        find_run(tmp_path, 0)
    for written_at, run in enumerate(("b", "a")):
        write(tmp_path / run / "checkpoints", 1, WORKER, pack({"a": torch.ones(1)}), ABOUT)
        os.utime(tmp_path / run / "checkpoints", (written_at, written_at))
    write(tmp_path / "c" / "checkpoints", 2, "node1/worker0", pack({"a": torch.ones(1)}), ABOUT)
    assert find_run(tmp_path, 0) == tmp_path / "a"
    assert find_run(tmp_path, 1) == tmp_path / "c"
    assert find_run(tmp_path / "b", 0) == tmp_path / "b"


def loader_of(length: int, place: tuple[int, int]) -> ShardLoader:
    return shard_loader(TensorDataset(torch.arange(length)), lambda: place, 0, True, {"batch_size": 4})


def test_a_loader_goes_on_where_it_was_if_the_shards_are_the_same(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    checkpoints = Checkpoints(model, [], {}, tmp_path, None)
    checkpoints.load(WORKER, *describe(model))
    before = checkpoints.attend(loader_of(40, (1, 2)))
    batches = track(before)
    for _ in range(3):
        next(batches)
    checkpoints.drawn_from = before  # the third waits for its iteration
    checkpoints.take(5, create(LeaderSettings(), FlatParameters(model).buffers), [], 3)
    checkpoints.save(5)
    third = before.sampler.shard()[8:12].tolist()

    def after(length: int, place: tuple[int, int]) -> ShardLoader:
        again = Checkpoints(model, [], {}, None, tmp_path)
        again.load(WORKER, *describe(model))
        loader = again.attend(loader_of(length, place))
        assert again.attend(loader_of(40, (1, 2))).state_dict()["epoch"] == 0  # one more than there was
        return loader

    assert next(track(after(40, (1, 2))))[0].tolist() == third
    assert not caplog.messages
    assert after(40, (1, 3)).state_dict() == {"epoch": 1, "consumed": 0, "seed": 0}
    assert "the data is dealt out anew, and begins with epoch 1" in caplog.text
    assert after(44, (1, 2)).state_dict() == {"epoch": 0, "consumed": 0, "seed": 0}
    assert "a loader is for other data than that of the checkpoint" in caplog.text


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.random())

    model = nn.Linear(3, 2)
    saved(tmp_path, model)
    expected = draw()
    again = Checkpoints(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, None, tmp_path)
    again.load(WORKER, *describe(model))
    draw()
    again.restore_random()
    assert draw() == expected
    again.restore_random()
    assert draw() != expected


def test_a_state_that_no_file_can_hold_is_a_warning(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["why"] = object()
    checkpoints = Checkpoints(model, [optimizer], {}, tmp_path, None)
    checkpoints.load(WORKER, *describe(model))
    checkpoints.take(5, create(LeaderSettings(), FlatParameters(model).buffers), [], 3)
    assert checkpoints.save(5) is None
    assert "no checkpoint is written: optimizers/0/param_groups/0/why is a object" in caplog.text
