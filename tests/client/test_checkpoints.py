"""Checkpoints as files: what comes back, what is refused, and what a failed write leaves."""

import errno
import functools
import os
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from lsgd.algorithms import ALGORITHMS
from lsgd.algorithms.leader import LeaderSettings
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.checkpoint.file import DamagedError, Packed, digest, pack, read, unpack, write
from lsgd.client.checkpoint.finite import clear
from lsgd.client.control.island import Island
from lsgd.client.data.shards import ShardLoader, shard_loader
from lsgd.errors import ConfigError
from lsgd.flat import FlatParameters, describe
from lsgd.protocol.messages import Origin
from lsgd.run_folder import CHECKPOINTS, checkpoint_path, claimed, counts, find_run, is_live, is_unfinished, runs
from tests import golden

WORKER = "node0/worker1"
RUN = "5e55"
ABOUT = {"model": "m", "model_summary": "2 tensors"}


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.tensor(1.5), 0: [1, 2.5, None, True], "b": ("x", {"c": torch.eye(2).bool()})},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(2, 0)}},
        [torch.full((2,), float("nan"), dtype=torch.bfloat16), float("inf"), 1 << 80, {}, (), ""],
        {"milestones": Counter({80: 1, 120: 2})},
    ],
)
def test_a_state_comes_back_as_it_was(tmp_path: Path, state: object) -> None:
    path = write(tmp_path, RUN, 7, WORKER, pack(state), ABOUT)
    assert path == tmp_path / "run-5e55" / "7" / "node0-worker1.safetensors"
    assert repr(read(path, "m", "")) == repr(state)  # NaN is not equal to itself


class Quantized(torch.Tensor):
    """A state in 8 bits that, like torchao's, allows few operations."""

    @staticmethod
    def __new__(cls, codes, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes, scale, dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts, context, shape=None, strides=None):
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten._to_copy.default:
            (x,) = args
            return cls(x.codes.clone(), x.scale.clone(), x.dtype)
        raise NotImplementedError(f"unimplemented: {func}")

    def __repr__(self) -> str:
        return f"Quantized({self.codes}, {self.scale}, {self.dtype})"


class Closed(Quantized):
    """One that cannot be taken apart."""

    def __tensor_flatten__(self):
        raise NotImplementedError("not yet")


class Refusing(torch.Tensor):
    """One that refuses all operations."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.detach:
            raise NotImplementedError("no detach")
        return super().__torch_function__(func, types, args, kwargs)


def quantized(kind=Quantized):
    return kind(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.tensor([0.5]), torch.bfloat16)


def test_a_tensor_that_wraps_others_is_saved_by_its_own_means(tmp_path: Path) -> None:
    state = {"a": [quantized()], "b": quantized().codes}
    packed = pack(state)
    state["a"][0].codes.zero_()
    back = read(write(tmp_path, RUN, 7, WORKER, packed, ABOUT), "m", "")
    assert repr(back) == repr({"a": [quantized()], "b": quantized().codes})
    assert all(type(x) is torch.Tensor for x in packed.tensors.values())


def test_what_is_not_finite_is_cleared_in_a_tensor_that_wraps_others_too() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = quantized()
    wrapped.scale.fill_(float("nan"))
    optimizer.state[model.weight] = {"a": wrapped, "b": [torch.full((2,), float("inf"))]}
    clear([optimizer])
    assert wrapped.scale.tolist() == [0.0] and optimizer.state[model.weight]["b"][0].tolist() == [0.0, 0.0]


def test_only_a_class_that_the_script_has_imported_is_made(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path, RUN, 7, WORKER, pack([quantized()]), ABOUT)
    for module, kind in ((__name__, None), (__name__, os.system)):
        monkeypatch.setattr(sys.modules[module], "Quantized", kind)
        with pytest.raises(ConfigError, match=golden.pattern("checkpoints.quantized", path=path, module=module)):
            read(path, "m", "")


def test_what_is_packed_is_a_copy() -> None:
    x = torch.zeros(3)
    packed = pack([x])
    x += 1
    assert unpack(packed)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, object()]}, "a/1 is a object"),
        ({"a": {1.5: 2}}, golden.pattern("checkpoints.float_key")),
        ({"a": quantized(Closed)}, golden.pattern("checkpoints.not_taken_apart")),
        ({"a": [torch.ones(2).as_subclass(Refusing)]}, golden.pattern("checkpoints.not_copied")),
        ({"a": torch.ones(1, dtype=torch.complex128)}, r"a is a Tensor of torch\.complex128"),
    ],
)
def test_what_no_file_can_hold_is_named(state: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(state)


def test_the_last_two_of_a_worker_are_kept_and_others_left_alone(tmp_path: Path) -> None:
    put = functools.partial(write, packed=pack({"a": 1}), about=ABOUT)
    put(tmp_path, RUN, 10, "node0/worker0")
    for count in (90, 10, 20, 30):
        put(tmp_path, RUN, count, WORKER)
    assert counts(tmp_path, RUN, WORKER) == [20, 30, 90]
    assert counts(tmp_path, RUN) == [10, 20, 30, 90]
    put(tmp_path, RUN, 100, WORKER)
    assert counts(tmp_path, RUN, WORKER) == [90, 100]
    assert not (tmp_path / "run-5e55" / "20").exists()


def test_no_file_of_another_run_is_ever_deleted(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    before = [saved(tmp_path, model, run="old", count=count) for count in (100, 200)]
    before.append(write(tmp_path, "", 300, WORKER, pack({}), ABOUT))  # as an earlier lsgd did
    for count in (7, 150, 160, 400):
        saved(tmp_path, model, run="new", count=count)
    assert all(path.exists() for path in before)
    assert counts(tmp_path, "old", WORKER) == [100, 200]
    assert counts(tmp_path, "new", WORKER) == [160, 400]


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
    checkpoints = started(model, tmp_path)
    algorithm = LeaderSettings().create(FlatParameters(model).buffers)
    path = checkpoints.save(checkpoints.take(5, algorithm, [], 5))
    assert path is not None
    before = path.read_bytes()
    for count in (5, 6):
        snapshot = checkpoints.take(count, algorithm, [], count)
        with disk_of(1000):
            assert checkpoints.save(snapshot) is None
    assert golden.text("checkpoints.not_written", path=tmp_path) in caplog.text
    assert path.read_bytes() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert checkpoints.save(None) is None
    assert checkpoints.save(checkpoints.take(8, algorithm, [], 8)) is not None
    assert counts(tmp_path, RUN, WORKER) == [5, 8]


def test_what_a_killed_process_left_half_written_is_deleted(tmp_path: Path) -> None:
    left = [
        tmp_path / "node0-worker1.safetensors.0a1b2c3d.tmp",
        tmp_path / "run-5e55" / "9" / "node0-worker1.safetensors.tmp",
    ]
    others = tmp_path / "node0-worker11.safetensors.0a1b2c3d.tmp"
    left[1].parent.mkdir(parents=True)
    for path in (*left, others):
        path.write_bytes(b"half")
    started(nn.Linear(3, 2), tmp_path)
    assert [path.exists() for path in (*left, others)] == [False, False, True]
    left[0].write_bytes(b"half")
    write(tmp_path, RUN, 1, WORKER, pack({}), ABOUT)
    assert not left[0].exists()


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    packed = pack({"a": torch.zeros(100)})
    path = write(tmp_path, RUN, 1, WORKER, packed, ABOUT)
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.other_model", path=path)):
        read(path, "other", "3 tensors")
    write(tmp_path, RUN, 1, WORKER, packed, {**ABOUT, "lsgd": "3"})
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.of_format", number=3, path=path)):
        read(path, "m", "")
    write(tmp_path, RUN, 1, WORKER, Packed(packed.tensors, "{"), ABOUT)
    with pytest.raises(DamagedError, match=f"{path} cannot be read"):
        read(path, "m", "")
    whole = path.read_bytes()
    for length in (0, 4, 50, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=f"{path} cannot be read"):
            read(path, "m", "")


def test_files_of_an_earlier_lsgd_are_refused_in_words(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = tmp_path / "1280" / "node0-worker1.safetensors"
    path.parent.mkdir()
    save_file({"model/weight": torch.zeros(2, 3)}, path, {"lsgd": "1", "model": describe(model)[0], "state": "{}"})
    assert runs(tmp_path) == [""]
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.older_format", path=path)):
        resumed(tmp_path, model)


def test_any_flipped_bit_is_noticed_and_the_file_before_is_taken(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before, last = (saved(tmp_path, model, count=count) for count in (5, 6))
    whole, worker = last.read_bytes(), describe(model)
    header = 8 + int.from_bytes(whole[:8], "little")
    numbers = random.Random(0)
    places = [numbers.randrange(8 * header) for _ in range(400)]
    places += [numbers.randrange(8 * header, 8 * len(whole)) for _ in range(400)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        last.write_bytes(flipped)
        with pytest.raises(DamagedError, match=f"{last} cannot be read: "):
            read(last, *worker)
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    origin = resumed(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert origin == (5, RUN) and before.exists()
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_digest_covers_every_dtype_and_shape() -> None:
    dtypes = (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)
    tensors = [torch.ones(size).to(dtype) for dtype in dtypes for size in ((), (2, 2), (4,), (0,))]
    assert len({digest({"x": x}, {}) for x in tensors}) == len(tensors)


def started(
    model: nn.Module, folder: Path, *optimizers: torch.optim.Optimizer, run: str = RUN, **extra: nn.Module
) -> Checkpoints:
    checkpoints = Checkpoints(model, optimizers, extra, folder, None, Island())
    checkpoints.load(WORKER, *describe(model))
    checkpoints.start(run)
    return checkpoints


def saved(folder: Path, model: nn.Module, *, run: str = RUN, count: int = 5, **extra: nn.Module) -> Path:
    checkpoints = started(model, folder, torch.optim.SGD(model.parameters(), lr=0.1), run=run, **extra)
    algorithm = LeaderSettings().create(FlatParameters(model).buffers)
    path = checkpoints.save(checkpoints.take(count, algorithm, [0.5], 3))
    assert path is not None
    return path


def resumed(folder: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, **extra: nn.Module) -> Origin:
    return Checkpoints(model, optimizers, extra, None, folder, Island()).load(WORKER, *describe(model))


def test_the_last_whole_file_is_taken_and_none_but_damaged_ones_are_an_error(tmp_path: Path, caplog) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    for count in (5, 6):
        saved(tmp_path, model, count=count)
    last = checkpoint_path(tmp_path, RUN, 6, WORKER)
    last.write_bytes(last.read_bytes()[:-1])
    assert resumed(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1)) == (5, RUN)
    assert f"{last} cannot be read" in caplog.text
    assert torch.equal(other.weight, model.weight)
    checkpoint_path(tmp_path, RUN, 5, WORKER).write_bytes(b"")
    with pytest.raises(DamagedError, match=f"{checkpoint_path(tmp_path, RUN, 5, WORKER)} cannot be read"):
        resumed(tmp_path, other)
    again = Checkpoints(other, [], {}, None, tmp_path, Island())
    again.restarted = True  # the run goes on, and has the model
    assert again.load(WORKER, *describe(other)) == (0, "")
    assert resumed(tmp_path / "elsewhere", other) == (0, "")


def test_a_folder_whose_name_is_no_utf8_is_read_too(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    folder = tmp_path / os.fsdecode(b"run\xff")
    saved(folder, model)
    assert resumed(folder, other, torch.optim.SGD(other.parameters(), lr=0.1)) == (5, RUN)
    assert torch.equal(other.weight, model.weight)


def test_the_state_of_an_algorithm_that_is_unknown_here_is_left_and_the_model_taken(tmp_path, caplog, monkeypatch):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    saved(tmp_path, model)
    others = {name: cls for name, cls in ALGORITHMS.items() if name != "leader"}
    monkeypatch.setattr(ALGORITHMS, "classes", others)  # one that is taken out comes back as the last one
    assert resumed(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1)) == (5, RUN)
    assert torch.equal(other.weight, model.weight)
    assert (
        golden.text("checkpoints.unknown_algorithm") in caplog.text
        and golden.text("checkpoints.state_not_used") in caplog.text
    )


def test_what_cannot_be_divided_among_other_processes_is_refused_in_words(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    checkpoints = started(model, tmp_path, optimizer)
    path = checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 5))
    assert path is not None
    path.rename(path.with_name("node0-worker1.0-of-2.safetensors"))
    refused = golden.pattern("checkpoints.not_divided")
    with pytest.raises(ConfigError, match=refused):
        resumed(tmp_path, model, optimizer)
    before = write(tmp_path, "earlier", 9, f"{WORKER}.0-of-2", pack({}), ABOUT)
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.earlier_layout", before=before)):
        resumed(tmp_path, model, optimizer)


def written_at(path: Path, time_s: float) -> None:
    os.utime(path, (time_s, time_s))


def test_the_run_that_was_written_last_is_taken_and_then_the_one_before(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for time_s, (run, count) in enumerate((("c", 50), ("a", 900), ("a", 1000), ("b", 700))):
        written_at(saved(tmp_path, model, run=run, count=count), time_s)
    assert runs(tmp_path) == ["b", "a", "c"]
    last = checkpoint_path(tmp_path, "b", 700, WORKER)
    assert started(model, tmp_path).last() == last
    assert resumed(tmp_path, model, optimizer) == (700, "b")
    last.write_bytes(b"")
    assert resumed(tmp_path, model, optimizer) == (1000, "a")
    assert f"{last} cannot be read" in caplog.text
    last.rename(last.with_name("node0-worker0.safetensors"))  # of the newest run, another worker has the only one
    written_at(last.parent / "node0-worker0.safetensors", 9)
    assert runs(tmp_path) == ["b", "a", "c"]
    assert resumed(tmp_path, model, optimizer) == (1000, "a")


def test_a_worker_knows_its_last_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = saved(tmp_path, model, run="a")
    assert started(model, tmp_path, run="b").last() == path
    nowhere = Checkpoints(model, [], {}, None, None, Island())
    nowhere.load(WORKER, *describe(model))
    nowhere.start("a")
    assert nowhere.last() is None


@pytest.mark.parametrize("run", ["..", "../../x", "1280"])
def test_no_name_of_a_run_leads_out_of_the_folder(tmp_path: Path, run: str) -> None:
    path = write(tmp_path / "checkpoints", run, 1, WORKER, pack({}), ABOUT)
    assert path.resolve().parents[2] == (tmp_path / "checkpoints").resolve()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))


@pytest.mark.parametrize("tensor", ["layer.weight", "norm.running_var"])
def test_a_model_that_is_not_finite_is_not_saved_and_the_last_one_that_is_stays(
    tmp_path: Path, caplog, tensor: str
) -> None:
    model = Masked()
    checkpoints = started(model, tmp_path)
    algorithm = LeaderSettings().create(FlatParameters(model).buffers)
    values = model.state_dict()[tensor].view(-1)  # where it is now
    good = values.clone()
    for count, value in ((1, 1.0), (2, float("nan")), (3, float("inf")), (4, 1.0), (5, float("nan"))):
        values.copy_(good)
        values[:2] = value
        assert (checkpoints.save(checkpoints.take(count, algorithm, [], count)) is None) == (value != 1.0)
    assert golden.text("checkpoints.nonfinite", tensor=tensor) in str(checkpoints.non_finite_error())
    assert counts(tmp_path, RUN, WORKER) == [1, 4]
    said = [message for message in caplog.messages if "is not finite" in message]
    assert said == [
        golden.text(
            "checkpoints.none_written", count=count, tensor=tensor, newest=checkpoint_path(tmp_path, RUN, last, WORKER)
        )
        for count, last in ((2, 1), (5, 4))
    ]


def test_a_buffer_that_training_has_made_longer_comes_back(tmp_path: Path) -> None:
    """Quantization-aware training does so in its first step, and tables of positions with longer inputs."""
    model, other = Masked(), Masked()
    checkpoints = started(model, tmp_path)
    model.register_buffer("mask", torch.arange(6.0))
    assert checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3))
    assert resumed(tmp_path, other) == (5, RUN)
    assert other.mask.tolist() == [0, 1, 2, 3, 4, 5] and torch.equal(other.layer.weight, model.layer.weight)


@pytest.mark.parametrize("made", ["extra", "before", "after"])
@pytest.mark.parametrize("kind", [partial(lr_scheduler.CosineAnnealingLR, T_max=9), lr_scheduler.ReduceLROnPlateau])
def test_a_scheduler_that_is_attended_to_brings_its_rates_back(tmp_path: Path, made: str, kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = kind(optimizer)
    checkpoints = started(model, tmp_path, optimizer, schedule=scheduler)
    for loss in (1.0, *[2.0] * 12):  # a plateau's patience is 10
        optimizer.step()
        scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    assert checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3))
    rate = optimizer.param_groups[0]["lr"]
    assert rate < 0.1

    again = torch.optim.SGD(model.parameters(), lr=0.1)
    other = kind(again) if made != "after" else None
    resuming = Checkpoints(model, [again], {"schedule": other} if made == "extra" else {}, None, tmp_path, Island())
    resuming.load(WORKER, *describe(model))
    if made != "extra":
        other = other or kind(again)
        resuming.extras.attend("schedule", other)
    assert other is not None
    assert again.param_groups[0]["lr"] == rate and other.last_epoch == scheduler.last_epoch


def test_an_average_of_the_model_and_a_scale_come_back(tmp_path: Path) -> None:
    """Of the weights' moving average: the weights and how many it has seen; of GradScaler, after the join or before."""
    model = nn.Linear(3, 2)
    average, scaler = AveragedModel(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=32.0)
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update_parameters(model)
    saved(tmp_path, model, average=average, scaler=scaler)
    again, other = AveragedModel(nn.Linear(3, 2)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resuming = Checkpoints(model, [optimizer], {"average": again}, None, tmp_path, Island())
    resuming.load(WORKER, *describe(model))
    resuming.extras.attend("scaler", other)
    assert again.n_averaged == 3 and torch.equal(again.module.weight, average.module.weight)
    assert not torch.equal(again.module.weight, model.weight)
    assert float(other.scale(torch.ones(()))) == 32.0


def test_other_optimizers_and_extras_are_named(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    saved(tmp_path, model, ema=model)
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.optimizers_count")):
        resumed(tmp_path, model)
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.unfit_optimizer")):
        resumed(tmp_path, model, torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.other_optimizer")):
        resumed(tmp_path, model, torch.optim.Adam(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = nn.Linear(3, 2)
    assert resumed(tmp_path, model, optimizer, ema=ema, other=ema) == (5, RUN)
    assert torch.equal(ema.weight, model.weight)
    assert golden.text("checkpoints.no_extra") in caplog.text
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.extra_without_state_dict")):
        Checkpoints(model, [], {"x": 1}, None, None, Island())  # type: ignore[dict-item]


def test_another_optimizer_of_the_same_name_is_refused_in_words(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    momentum.step()
    checkpoints = started(model, tmp_path, momentum)
    checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [0.5], 3))
    other = type("SGD", (torch.optim.Adam,), {})(model.parameters())
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.no_step")):
        resumed(tmp_path, model, other)


def test_a_run_folder_that_this_user_may_not_look_into_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    closed, glob = tmp_path / "others", Path.glob

    def closed_glob(folder: Path, pattern: str) -> Iterator[Path]:  # tests may run as root, who may look everywhere
        if folder.is_relative_to(closed):
            raise PermissionError(errno.EACCES, "Permission denied")
        return glob(folder, pattern)

    for time_s, run in enumerate(("mine", "others")):
        written_at(write(tmp_path / run / "checkpoints", RUN, 1, WORKER, pack({"a": torch.ones(1)}), ABOUT), time_s)
    monkeypatch.setattr(Path, "glob", closed_glob)
    assert find_run(tmp_path, 0) == tmp_path / "mine"
    assert runs(closed / "checkpoints") == [] and not is_live(closed)


def test_a_name_that_is_too_long_is_an_error_in_words(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 100)
    assert runs(folder / CHECKPOINTS) == [] and not is_unfinished(folder)
    with (
        pytest.raises(ConfigError, match=golden.pattern("checkpoints.name_too_long")),
        claimed(folder, 0, "ipc://"),
    ):
        pass


def test_the_newest_run_with_checkpoints_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("checkpoints.nothing_to_resume", path=tmp_path)):
        find_run(tmp_path, 0)
    packed = pack({"a": torch.ones(1)})
    for time_s, run in enumerate(("b", "a")):
        written_at(write(tmp_path / run / "checkpoints", RUN, 1, WORKER, packed, ABOUT), time_s)
    write(tmp_path / "c" / "checkpoints", RUN, 2, "node1/worker0", packed, ABOUT)
    assert find_run(tmp_path, 0) == tmp_path / "a"
    assert find_run(tmp_path, 1) == tmp_path / "c"
    assert find_run(tmp_path / "b", 0) == tmp_path / "b"


def loader_of(length: int, place: tuple[int, int]) -> ShardLoader:
    return shard_loader(TensorDataset(torch.arange(length)), lambda: place, 0, True, {"batch_size": 4})


def test_a_loader_goes_on_where_it_was_if_the_shards_are_the_same(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    checkpoints = started(model, tmp_path)
    before = checkpoints.data.attend(loader_of(40, (1, 2)))
    batches = iter(before)
    for _ in range(2):
        next(batches)
    algorithm = LeaderSettings().create(FlatParameters(model).buffers)
    checkpoints.save(checkpoints.take(5, algorithm, [], 3))
    third = before.sampler.shard()[8:12].tolist()

    def after(length: int, place: tuple[int, int]) -> ShardLoader:
        again = Checkpoints(model, [], {}, None, tmp_path, Island())
        again.load(WORKER, *describe(model))
        loader = again.data.attend(loader_of(length, place))
        assert again.data.attend(loader_of(40, (1, 2))).state_dict()["epoch"] == 0  # one more than there was
        return loader

    assert next(iter(after(40, (1, 2))))[0].tolist() == third
    assert not caplog.messages
    assert after(40, (1, 3)).state_dict() == {"epoch": 1, "consumed": 0, "seed": 0}
    assert golden.text("checkpoints.dealt_again") in caplog.text
    assert after(44, (1, 2)).state_dict() == {"epoch": 0, "consumed": 0, "seed": 0}
    assert golden.text("checkpoints.other_data") in caplog.text


def test_loaders_that_are_made_anew_in_each_epoch_find_their_own_places(tmp_path: Path, caplog) -> None:
    """At a checkpoint in the second one, the first epoch's loader for the tests is older than that for the training."""
    model = nn.Linear(3, 2)
    checkpoints = started(model, tmp_path)
    tests, training = (checkpoints.data.attend(loader_of(length, (0, 1))) for length in (20, 40))
    next(iter(training))
    checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3))
    again = Checkpoints(model, [], {}, None, tmp_path, Island())
    again.load(WORKER, *describe(model))
    found = [again.data.attend(loader_of(length, (0, 1))).state_dict()["consumed"] for length in (40, 20)]
    assert found == [4, 0] and not caplog.messages
    assert tests.state_dict()["consumed"] == 0


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.random())

    model = nn.Linear(3, 2)
    saved(tmp_path, model)
    expected = draw()
    again = Checkpoints(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, None, tmp_path, Island())
    again.load(WORKER, *describe(model))
    draw()
    again.data.restore_random()
    assert draw() == expected
    again.data.restore_random()
    assert draw() != expected


def test_of_a_generator_that_the_script_has_given_numpy_nothing_is_saved(tmp_path: Path) -> None:
    usual, model = np.random.get_bit_generator(), nn.Linear(3, 2)
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        saved(tmp_path, model)
        expected = torch.rand(()).item(), random.random()
        again = Checkpoints(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, None, tmp_path, Island())
        again.load(WORKER, *describe(model))
        following = np.random.get_state(legacy=False)
        again.data.restore_random()
        assert np.random.get_state(legacy=False) == following
        assert (torch.rand(()).item(), random.random()) == expected
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("drawn", [0, 2])
def test_what_a_script_draws_for_a_step_is_drawn_again(drawn: int, tmp_path: Path) -> None:
    """A checkpoint comes between two steps, or when numbers were drawn for the next one; both are drawn again."""
    model = nn.Linear(3, 2)
    checkpoints = started(model, tmp_path)
    checkpoints.data.note()
    expected = [torch.rand(()).item() for _ in range(drawn)]
    checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3))
    expected += [torch.rand(()).item() for _ in range(4)]
    again = Checkpoints(model, [], {}, None, tmp_path, Island())
    again.load(WORKER, *describe(model))
    again.data.restore_between()
    found = [torch.rand(()).item() for _ in range(2)]
    again.data.restore_random()
    assert [*found, *(torch.rand(()).item() for _ in range(2 + drawn))] == expected


def test_what_is_drawn_beside_a_loader_stays_as_it_is(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    checkpoints = started(model, tmp_path)
    checkpoints.data.note()
    loader = checkpoints.data.attend(loader_of(40, (0, 1)))
    checkpoints.save(checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3))
    expected = torch.rand(()).item()
    again = Checkpoints(model, [], {}, None, tmp_path, Island())
    again.load(WORKER, *describe(model))
    before = torch.get_rng_state()
    again.data.restore_between()
    assert torch.equal(torch.get_rng_state(), before)
    again.data.restore_random()
    assert torch.rand(()).item() == expected
    assert loader.state_dict()["consumed"] == 0


def test_a_state_that_no_file_can_hold_is_a_warning(tmp_path: Path, caplog) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["why"] = object()
    checkpoints = started(model, tmp_path, optimizer)
    assert checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3) is None
    assert golden.text("checkpoints.object_in_state") in caplog.text
    optimizer.state_dict = lambda: torch.ones(2).dequantize().missing
    assert checkpoints.take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3) is None
    assert golden.text("checkpoints.state_dict_failed") in caplog.text
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["momentum_buffer"] = quantized()
    assert started(model, tmp_path, optimizer).take(5, LeaderSettings().create(FlatParameters(model).buffers), [], 3)
