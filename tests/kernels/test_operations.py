"""The public operations: arguments, outputs, and which path is taken."""

import logging
import subprocess
import sys

import pytest
import torch

from lsgd.errors import ConfigError
from lsgd.kernels import (
    Layout,
    dequantize,
    dequantize_add,
    dequantize_reduce,
    dequantize_reduce_quantize,
    dispatch,
    payload_nbytes,
    quantize,
)
from lsgd.kernels.reference import ReferencePath


@pytest.fixture
def x():
    return torch.randn(5000, generator=torch.Generator().manual_seed(3))


def rows_of(x, members=3):
    """Payloads as they lie in a receive buffer: the rows of one matrix."""
    rows = torch.empty(members, payload_nbytes(x.numel()), dtype=torch.uint8)
    return [quantize(x * (i + 1), out=rows[i]) for i in range(members)]


def test_shapes_views_and_gradients(x):
    flat = quantize(x).payload
    matrix = torch.nn.Parameter(x.view(50, 100))
    assert torch.equal(quantize(matrix).payload, flat)
    assert torch.equal(quantize(x.view(100, 50).t().contiguous().t()).payload, flat)
    assert torch.equal(quantize(x.repeat_interleave(2)[::2]).payload, flat)
    assert torch.equal(dequantize(quantize(x), out=torch.empty(50, 100)).view(-1), dequantize(quantize(x)))


def test_seed_and_rounding(x):
    nearest = quantize(x).payload
    stochastic = [quantize(x, rounding="stochastic", seed=seed).payload for seed in (1, 1, 2)]
    assert torch.equal(stochastic[0], stochastic[1])
    assert not torch.equal(stochastic[0], stochastic[2])
    assert torch.equal(quantize(x, seed=99).payload, nearest)


def test_add_changes_its_argument(x):
    q, y = quantize(x), x.clone()
    assert dequantize_add(q, y, alpha=-1.0) is y
    assert torch.equal(y, x - dequantize(q))


def test_reduce(x):
    qs = rows_of(x)
    total = dequantize(qs[0]) + dequantize(qs[1]) + dequantize(qs[2])
    assert torch.equal(dequantize_reduce(qs, op="sum"), total)
    mean = dequantize_reduce(qs)
    assert torch.equal(mean, total * torch.tensor(1 / 3))
    again = dequantize_reduce_quantize(qs, block=512, rounding="stochastic", seed=4)
    assert torch.equal(again.payload, quantize(mean, block=512, rounding="stochastic", seed=4).payload)


@pytest.mark.parametrize("block", [2048, None])
def test_nothing_is_allocated_when_outputs_are_given(block):
    x = torch.randn(600_000)
    q = quantize(x, block=block)
    qs, payload, y, z = [q] * 4, q.payload.clone(), torch.empty_like(x), torch.empty_like(x)

    def everything():
        quantize(x, block=block, out=payload)
        quantize(x, block=block, rounding="stochastic", out=payload)
        dequantize(q, out=y)
        dequantize_add(q, y)
        dequantize_reduce(qs, out=z)
        dequantize_reduce_quantize(qs, block=block, out=payload)

    everything()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        everything()
    assert sum(event.cpu_memory_usage > 0 for event in profile.events()) == 0


def test_arguments_that_are_refused(x):
    q = quantize(x)
    for call, message in [
        (lambda: quantize(x, rounding="up"), "'up'"),
        (lambda: quantize(x, seed=-1), "seed"),
        (lambda: quantize(x, seed=2**64), "seed"),
        (lambda: quantize(x, block=0), "block"),
        (lambda: quantize(x.double()), "float64"),
        (lambda: quantize(x, out=torch.empty(5000, dtype=torch.uint8)), "bytes"),
        (lambda: quantize(x, out=torch.empty(7000, dtype=torch.uint8)[1:]), "out must be aligned"),
        (lambda: dequantize(q, out=torch.empty(4999)), "5000 elements"),
        (lambda: dequantize(q, out=torch.empty(10000)[::2]), "contiguous"),
        (lambda: dequantize_add(q, torch.empty(5000, dtype=torch.float64)), "float64"),
        (lambda: dequantize_reduce([]), "nothing"),
        (lambda: dequantize_reduce([q], op="max"), "'max'"),
        (lambda: dequantize_reduce([q, quantize(x, block=7)]), "chunks to reduce differ"),
        (lambda: dequantize_reduce([q], out=torch.empty(5000, dtype=torch.float16)), "float32"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()


def test_importing_does_no_work():
    heavy = ("llvmlite", "numba", "cupy", "lsgd.kernels.cpu.path", "lsgd.kernels.cuda.path")
    code = f"import sys, lsgd.kernels; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.fixture
def fresh_paths():
    dispatch.path_for.cache_clear()
    yield
    dispatch.path_for.cache_clear()


@pytest.mark.parametrize(
    ("device", "module", "remedy"),
    [("cpu", "llvmlite", "pip install llvmlite"), ("cuda", "cupy", "pip install cupy")],
)
def test_without_its_library_a_path_is_the_reference_and_says_so_once(
    monkeypatch, caplog, fresh_paths, device, module, remedy
):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    for name in [
        name for name in sys.modules if name.startswith("lsgd.kernels.cpu.path") or name == "lsgd.kernels.cpu.ir"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with caplog.at_level(logging.WARNING):
        assert isinstance(dispatch.path_for(device), ReferencePath)
        assert isinstance(dispatch.path_for(device), ReferencePath)
    assert [remedy in record.message for record in caplog.records] == [True]


def test_other_devices_use_the_reference():
    assert isinstance(dispatch.path_for("mps"), ReferencePath)


def test_layout_is_kept_for_the_next_call(x):
    layout = Layout(5000, 256)
    payload = layout.empty()
    q = quantize(x, block=256, out=payload)
    assert q.payload is payload
    assert q.layout == layout
    assert repr(q).startswith("Quantized(Layout(numel=5000, block=256")
