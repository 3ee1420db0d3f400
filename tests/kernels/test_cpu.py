"""What only the CPU kernels have: threads, big outputs, and a processor that may round otherwise."""

import ctypes
import logging
import threading

import pytest
import torch

from lsgd.codecs.base import flags_of
from lsgd.codecs.minmax import MinMax8
from lsgd.kernels.cpu import machine
from lsgd.kernels.cpu.minmax8 import BIG_BLOCK, STREAM_NBYTES, _entry

from ..speed import scaled

LARGE = STREAM_NBYTES // 4 + 12_345  # elements whose float32 are written past the caches


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def payload_of(codec, x, seed=None):
    payload = codec.empty(x.numel(), x.device)
    codec.encode(x, payload, seed)
    return payload


@pytest.mark.parametrize("block", [1000, 2048, BIG_BLOCK + 5, 0])
@pytest.mark.parametrize(("seed", "dtype"), [(None, torch.float32), (2**63 + 5, torch.bfloat16)])
def test_large_vectors_and_any_number_of_threads(in_torch, threads, block, seed, dtype):
    x = torch.randn(LARGE).to(dtype)
    expected = payload_of(in_torch(block), x, seed)
    decoded = torch.empty(LARGE)
    in_torch(block).decode(expected, decoded)
    for count in (1, 2, 3):
        threads(count)
        payload = payload_of(MinMax8(block), x, seed)
        assert torch.equal(payload, expected)
        for shift in (0, 1):  # aligned to a cache line, and not
            out = torch.full((LARGE + 1,), -1.0)[shift : LARGE + shift]
            MinMax8(block).decode(payload, out)
            assert torch.equal(out, decoded)


def test_big_block_with_nan_in_one_segment(in_torch):
    x = torch.randn(3 * BIG_BLOCK)
    x[BIG_BLOCK * 2 + 77] = torch.nan
    payload = payload_of(MinMax8(0), x)
    assert torch.equal(payload, payload_of(in_torch(0), x))
    assert int(flags_of(payload)) == 1


def test_threads_of_the_caller_do_not_disturb_each_other(in_torch):
    xs = [torch.randn(2 * BIG_BLOCK + i) for i in range(4)]
    expected = [payload_of(in_torch(0), x) for x in xs]
    wrong = []

    def work(index):
        for _ in range(5):
            if not torch.equal(payload_of(MinMax8(0), xs[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(xs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(scaled(60))
    assert wrong == []


def test_subnormal_numbers_survive_a_thread_that_flushes_them(in_torch):
    x = torch.tensor([1e-40, 3e-40, 0.0, -2e-40] * 100)
    near = torch.linspace(0, 255, 400) * 2.0**-126 + 1e-39
    expected = [payload_of(in_torch(100), v) for v in (x, near)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        got = [payload_of(MinMax8(100), v) for v in (x, near)]
        assert float(torch.tensor([1e-40]) * 1) == 0, "still flushing"
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_torchs_own_openmp_is_found():
    assert machine.parallel_region() is not None


def test_without_openmp_one_thread_does_it_all(monkeypatch, caplog, in_torch):
    class Library:
        def __init__(self, name):
            raise OSError(f"{name}: no such file")

    machine.parallel_region.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Library)
    with caplog.at_level(logging.WARNING):
        x = torch.randn(BIG_BLOCK)
        assert torch.equal(payload_of(MinMax8(), x), payload_of(in_torch(), x))
        payload_of(MinMax8(), x)
    machine.parallel_region.cache_clear()
    assert ["one thread" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounds_compile_nothing_that_could_be_prepared(rounding, dtype):
    _entry.cache_clear()
    codec, seed = MinMax8(), 5 if rounding == "stochastic" else None
    codec.prepare([torch.empty(3, dtype=dtype)], rounding)
    prepared = _entry.cache_info().misses
    x, left = torch.randn(9000).to(dtype), torch.randn(9000)
    payloads = [codec.empty(9000, x.device) for _ in range(3)]
    codec.encode(x.float() if dtype is torch.float64 else x, payloads[0], seed)
    codec.encode_and_subtract(left, payloads[1], seed)
    codec.reduce(payloads[:2], left, mean=True)
    codec.reduce_encode(payloads[:2], payloads[2], numel=9000, mean=True, seed=seed)
    codec.decode(payloads[2], x)
    codec.decode_add(payloads[2], x)
    assert _entry.cache_info().misses == prepared
