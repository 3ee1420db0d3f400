"""What only the CPU path has: threads, big outputs, and a processor that may round otherwise."""

import ctypes
import logging
import threading

import pytest
import torch

from lsgd.kernels import Layout, Quantized
from lsgd.kernels.cpu import openmp
from lsgd.kernels.cpu.path import BIG_BLOCK, STREAM_NBYTES, CpuPath
from lsgd.kernels.reference import ReferencePath

LARGE = STREAM_NBYTES // 4 + 12_345  # elements whose float32 are written past the caches


@pytest.fixture(scope="module")
def path():
    return CpuPath()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def payload_of(path, x, block, seed=None):
    layout = Layout(x.numel(), block, x.dtype)
    payload = layout.empty()
    path.quantize(x, layout, payload, seed)
    return Quantized(payload, layout)


@pytest.mark.parametrize("block", [1000, 2048, BIG_BLOCK + 5, None])
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_vectors_and_any_number_of_threads(path, threads, block, seed, dtype):
    x = torch.randn(LARGE).to(dtype)
    expected = payload_of(ReferencePath(), x, block, seed)
    decoded = torch.empty(LARGE)
    ReferencePath().dequantize(expected, decoded)
    for count in (1, 2, 3):
        threads(count)
        q = payload_of(path, x, block, seed)
        assert torch.equal(q.payload, expected.payload)
        for shift in (0, 1):  # aligned to a cache line, and not
            out = torch.full((LARGE + 1,), -1.0)[shift : LARGE + shift]
            path.dequantize(q, out)
            assert torch.equal(out, decoded)


def test_big_block_with_nan_in_one_segment(path):
    x = torch.randn(3 * BIG_BLOCK)
    x[BIG_BLOCK * 2 + 77] = torch.nan
    q = payload_of(path, x, None)
    assert torch.equal(q.payload, payload_of(ReferencePath(), x, None).payload)
    assert int(q.flags) == 1


def test_threads_of_the_caller_do_not_disturb_each_other(path):
    xs = [torch.randn(2 * BIG_BLOCK + i) for i in range(4)]
    expected = [payload_of(ReferencePath(), x, None).payload for x in xs]
    wrong = []

    def work(index):
        for _ in range(5):
            if not torch.equal(payload_of(path, xs[index], None).payload, expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(xs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert wrong == []


def test_subnormal_numbers_survive_a_thread_that_flushes_them(path):
    x = torch.tensor([1e-40, 3e-40, 0.0, -2e-40] * 100)
    near = torch.linspace(0, 255, 400) * 2.0**-126 + 1e-39
    expected = [payload_of(ReferencePath(), v, 100).payload for v in (x, near)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        got = [payload_of(path, v, 100).payload for v in (x, near)]
        assert float(torch.tensor([1e-40]) * 1) == 0, "still flushing"
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_torchs_own_openmp_is_found():
    assert openmp.parallel_region() is not None


def test_without_openmp_one_thread_does_it_all(monkeypatch, caplog, path):
    class Library:
        def __init__(self, name):
            raise OSError(f"{name}: no such file")

    openmp.parallel_region.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Library)
    with caplog.at_level(logging.WARNING):
        x = torch.randn(BIG_BLOCK)
        assert torch.equal(payload_of(path, x, 2048).payload, payload_of(ReferencePath(), x, 2048).payload)
        payload_of(path, x, 2048)
    openmp.parallel_region.cache_clear()
    assert ["one thread" in record.message for record in caplog.records] == [True]
