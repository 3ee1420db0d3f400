"""The codec's operations: arguments, outputs, and which kernels are taken."""

import logging
import subprocess
import sys

import pytest
import torch

from lsgd.codecs.minmax import MinMax8
from lsgd.errors import ConfigError, ProtocolError
from lsgd.kernels import kernels_for


@pytest.fixture
def x():
    return torch.randn(5000, generator=torch.Generator().manual_seed(3))


def encoded(x, block=2048, seed=None, out=None):
    codec = MinMax8(block)
    payload = codec.empty(x.numel(), x.device) if out is None else out
    codec.encode(x, payload, seed)
    return payload


def decoded(payload, numel=5000, block=2048):
    out = torch.empty(numel)
    MinMax8(block).decode(payload, out)
    return out


def rows_of(x, members=3):
    """Payloads as they lie in a receive buffer: the rows of one matrix."""
    rows = torch.empty(members, MinMax8().nbytes(x.numel()), dtype=torch.uint8)
    return [encoded(x * (i + 1), out=rows[i]) for i in range(members)]


def test_parameters_with_gradients(x):
    payload = encoded(x)
    parameter = torch.nn.Parameter(x.clone())
    assert torch.equal(encoded(parameter), payload)
    MinMax8().decode(payload, parameter)
    assert torch.equal(parameter.detach(), decoded(payload))


def test_seed_and_rounding(x):
    nearest = encoded(x)
    stochastic = [encoded(x, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(stochastic[0], stochastic[1])
    assert not torch.equal(stochastic[0], stochastic[2])
    assert not torch.equal(stochastic[0], nearest)


def test_add_changes_its_argument(x):
    payload, y = encoded(x), x.clone()
    MinMax8().decode_add(payload, y, -1.0)
    assert torch.equal(y, x - decoded(payload))


def test_reduce(x):
    payloads, out = rows_of(x), torch.empty(5000)
    total = decoded(payloads[0]) + decoded(payloads[1]) + decoded(payloads[2])
    MinMax8().reduce(payloads, out, mean=False)
    assert torch.equal(out, total)
    MinMax8().reduce(payloads, out, mean=True)
    assert torch.equal(out, total * torch.tensor(1 / 3))
    again = torch.empty_like(payloads[0])
    MinMax8().reduce_encode(payloads, again, numel=5000, mean=True, seed=4)
    assert torch.equal(again, encoded(out, seed=4))


@pytest.mark.parametrize("block", [2048, 0])
def test_nothing_is_allocated_when_outputs_are_given(block):
    x, codec = torch.randn(600_000), MinMax8(block)
    q = encoded(x, block)
    payload, y, z = q.clone(), torch.empty_like(x), torch.empty_like(x)

    def everything():
        codec.encode(x, payload)
        codec.encode(x, payload, 0)
        codec.decode(q, y)
        codec.decode_add(q, y)
        codec.reduce([q] * 4, z, mean=True)
        codec.reduce_encode([q] * 4, payload, numel=x.numel(), mean=True)

    everything()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        everything()
    assert sum(event.cpu_memory_usage > 0 for event in profile.events()) == 0


def test_arguments_that_are_refused(x):
    payload, codec = encoded(x), MinMax8()
    for call, error, message in [
        (lambda: encoded(x, seed=-1), ConfigError, "seed"),
        (lambda: encoded(x, seed=2**64), ConfigError, "seed"),
        (lambda: MinMax8(-1), ConfigError, "block"),
        (lambda: MinMax8(2**31), ConfigError, "block"),
        (lambda: encoded(x.double()), ConfigError, "float64"),
        (lambda: encoded(x.view(50, 100)), ConfigError, "one-dimensional"),
        (lambda: encoded(x[::2]), ConfigError, "contiguous"),
        (lambda: encoded(x, out=torch.empty(5000, dtype=torch.uint8)), ConfigError, "bytes"),
        (lambda: encoded(x, out=torch.empty(7000, dtype=torch.uint8)[1:]), ConfigError, "must be aligned"),
        (lambda: codec.decode(payload, torch.empty(4999)), ProtocolError, "4999 elements"),
        (lambda: codec.decode(payload, torch.empty(10000)[::2]), ConfigError, "contiguous"),
        (lambda: codec.reduce([payload], torch.empty(10000)[::2], mean=True), ConfigError, "contiguous"),
        (lambda: codec.reduce([payload, encoded(x, 7)], x, mean=True), ProtocolError, "parameters 7"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_importing_does_no_work():
    heavy = ("torch", "llvmlite", "numba", "cupy", "lsgd.kernels.cpu.minmax8", "lsgd.kernels.cuda.launch")
    code = f"import sys, lsgd.kernels; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("device", "module", "remedy"),
    [("cpu", "llvmlite", "pip install llvmlite"), ("cuda", "cupy", "pip install cupy")],
)
def test_without_its_library_torch_computes_and_says_so_once(
    monkeypatch, caplog, fresh_kernels, device, module, remedy
):
    ours = [f"lsgd.kernels.cpu.{name}" for name in ("ir", "blockwise", "tiles", "minmax8")]
    for name in [name for name in sys.modules if name.split(".")[0] == module or name in ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with caplog.at_level(logging.WARNING):
        assert [kernels_for(torch.device(device), "minmax8", block) for block in (2048, 2048, 0)] == [None] * 3
    assert [remedy in record.message for record in caplog.records] == [True]


def test_other_devices_use_torch():
    assert kernels_for(torch.device("mps"), "minmax8", 2048) is None
