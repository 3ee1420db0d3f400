"""The low-bit codecs: bit by bit what docs/concepts/formulas.md says, in NumPy, and how far off they are."""

from __future__ import annotations

import logging
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lsgd import kernels
from lsgd.codecs import Codec, blocks, codec_of
from lsgd.codecs.base import flags_of
from lsgd.codecs.blocks import Blockwise
from lsgd.codecs.topk import TopK
from lsgd.errors import ConfigError
from lsgd.payload import HEADER_NBYTES
from tests import golden

LENGTHS = st.integers(0, 1200)
SIZES = st.sampled_from([1.0, 1e-30, 1e-41, 1e30, 3.4e38])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def vector(numel: int, size: float, seed: int) -> torch.Tensor:
    """Normal numbers with zeros, of about this size; blocks differ."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(numel) * size * 4.0 ** -(np.arange(numel) // 100)
    x[random.random(numel) < 0.05] = 0
    limit = float(np.finfo(np.float32).max)
    return torch.from_numpy(x.clip(-limit, limit).astype(np.float32))


def coded(text: str, x: torch.Tensor) -> tuple[bytes, np.ndarray]:
    """The bytes after the header, and what they decode to."""
    codec, out = codec_of(text), torch.empty(x.numel())
    payload = codec.empty(x.numel(), x.device)
    payload.fill_(255)
    codec.encode(x, payload)
    codec.decode(payload, out)
    return bytes(payload[HEADER_NBYTES:].tolist()), out.numpy()


def bfloat16(number: float) -> int:
    bits = int(np.float32(number).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def halved_sum(numbers: list[float]) -> float:
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def levels2_of(x: np.ndarray, width: int) -> tuple[bytes, np.ndarray]:
    """One block and one number after the other, and so are the others."""
    scales, signs, fars, decoded = [], [], [], []
    for start in range(0, x.size, width):
        block = x[start : start + width]
        padded = [abs(float(v)) for v in block] + [0.0] * (width - block.size)
        rms = math.sqrt(halved_sum([v * v for v in padded]) / block.size)
        far = [v > np.float32(rms * 0.9816) for v in abs(block)]
        far_only = [v if i < block.size and far[i] else 0.0 for i, v in enumerate(padded)]
        products = halved_sum(padded) * 0.4528 + halved_sum(far_only) * (1.5104 - 0.4528)
        squares = block.size * 0.4528**2 + sum(far) * (1.5104**2 - 0.4528**2)
        scales.append(bfloat16(min(products / squares, 2.0**127)))
        scale = np.uint32(scales[-1] << 16).view(np.float32)
        steps = [np.float32(1.5104 if f else 0.4528) * scale for f in far]
        decoded += [-step if v < 0 else step for v, step in zip(block, steps, strict=True)]
        signs += list(block < 0)
        fars += far
    return np.array(scales, "<u2").tobytes() + packed(signs) + packed(fars), np.array(decoded, np.float32)


def levels1_of(x: np.ndarray, width: int) -> tuple[bytes, np.ndarray]:
    scales, decoded = [], []
    for start in range(0, x.size, width):
        block = x[start : start + width]
        total = halved_sum([abs(float(v)) for v in block] + [0.0] * (width - block.size))
        scales.append(bfloat16(min(total / block.size, 2.0**127)))
        scale = np.uint32(scales[-1] << 16).view(np.float32)
        decoded += [-scale if v < 0 else scale for v in block]
    return np.array(scales, "<u2").tobytes() + packed(list(x < 0)), np.array(decoded, np.float32)


def packed(bits: list[bool]) -> bytes:
    return np.packbits(np.array(bits, bool), bitorder="little").tobytes()


def minmax4(x: np.ndarray, width: int) -> tuple[bytes, np.ndarray]:
    scales, codes, decoded = [], [], []
    half = np.float32(0.5)
    for start in range(0, x.size, width):
        block = x[start : start + width] * half
        lo, hi = block.min() + np.float32(0), block.max() + np.float32(0)
        unit = np.float32(hi - lo) / np.float32(15)
        scales += [lo, unit]
        code = np.clip(np.rint((block - lo) / unit), 0, 15) if unit > 0 else np.zeros(block.size)
        codes += [int(c) for c in code]
        limit = np.finfo(np.float32).max / np.float32(2)
        decoded += list(np.clip(code.astype(np.float32) * unit + lo, -limit, limit) * np.float32(2))
    codes += [0] * (len(codes) % 2)
    pairs = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return np.array(scales, "<f4").tobytes() + bytes(pairs), np.array(decoded, np.float32)


def topk(x: np.ndarray, k: int) -> tuple[bytes, np.ndarray]:
    levels, low, high, signs, fars = [], [], [], [], []
    decoded = np.zeros(-(-x.size // 4096) * 4096, np.float32)
    for start in range(0, x.size, 4096):
        size = min(4096, x.size - start)
        chunk = np.concatenate([x[start : start + size], np.zeros(4096 - size, np.float32)])
        order = sorted(sorted(range(4096), key=lambda i: (-abs(chunk[i]), i))[:k])
        sizes = [abs(float(chunk[i])) for i in order]
        mean = halved_sum(sizes) / min(k, size)
        far = [v > mean for v in sizes]
        near_mean = halved_sum([v * (not f) for v, f in zip(sizes, far, strict=True)]) / (min(k, size) - sum(far))
        far_mean = halved_sum([v * f for v, f in zip(sizes, far, strict=True)]) / max(sum(far), 1)
        levels += [np.float32(near_mean), np.float32(far_mean)]
        low += [i & 255 for i in order]
        high += [i >> 8 for i in order]
        signs += [chunk[i] < 0 for i in order]
        fars += far
        for i, f in zip(order, far, strict=True):
            decoded[start + i] = np.float32(far_mean if f else near_mean) * (-1 if chunk[i] < 0 else 1)
    pairs = bytes(a | b << 4 for a, b in zip(high[::2], high[1::2], strict=True))
    data = np.array(levels, "<f4").tobytes() + bytes(low) + pairs + packed(signs) + packed(fars)
    return data, decoded[: x.size]


REFERENCES = {
    "levels2:block=512": lambda x: levels2_of(x, 512),
    "levels2:block=8": lambda x: levels2_of(x, 8),
    "levels1:block=512": lambda x: levels1_of(x, 512),
    "levels1:block=64": lambda x: levels1_of(x, 64),
    "minmax4:block=256": lambda x: minmax4(x, 256),
    "minmax4:block=7": lambda x: minmax4(x, 7),
    "topk:k=64": lambda x: topk(x, 64),
    "topk:k=8": lambda x: topk(x, 8),
    "minmax4:block=0": lambda x: minmax4(x, max(x.size, 1)),
}


@pytest.mark.parametrize("text", REFERENCES)
@given(LENGTHS, SIZES, st.integers(0, 99))
def test_bytes_and_values_are_the_references(text, numel, size, seed):
    x = vector(numel, size, seed)
    data, decoded = coded(text, x)
    expected, numbers = REFERENCES[text](x.numpy())
    assert data == expected
    assert np.isfinite(decoded).all()
    assert decoded.tobytes() == numbers.tobytes()


@pytest.mark.parametrize("text", REFERENCES)
@pytest.mark.parametrize("numel", [9001, (1 << 15) + 700])
def test_vectors_of_several_pieces(text, numel):
    x = vector(numel, 1.0, 5)
    expected, numbers = REFERENCES[text](x.numpy())
    data, decoded = coded(text, x)
    assert (data, decoded.tobytes()) == (expected, numbers.tobytes())


def without_kernels(monkeypatch) -> None:
    monkeypatch.setattr(Blockwise, "kernels_on", lambda *_: None)


def made_of(codec: Codec, x: torch.Tensor, alpha: float) -> tuple[list[torch.Tensor], int]:
    """The payload, what it decodes to, what is added to, and what rounding lost, as bits; and the flag."""
    payload, out, added = codec.empty(x.numel(), x.device), torch.empty_like(x), torch.linspace(-1, 1, x.numel())
    left, again = x.clone(), codec.empty(x.numel(), x.device)
    added[::3] = -0.0
    codec.encode(x, payload)
    codec.decode(payload, out)
    codec.decode_add(payload, added, alpha)
    codec.encode_and_subtract(left, again)
    return [payload, again, *(t.nan_to_num(7.0).view(torch.int32) for t in (out, added, left))], int(flags_of(payload))


@pytest.mark.parametrize(
    "text",
    [
        "levels2",
        "levels1",
        "levels2:block=2048",
        "levels1:block=64",
        "topk",
        "topk:k=8",
        "minmax4",
        "minmax4:block=64",
    ],
)
@pytest.mark.parametrize("bad", [1.0, math.nan, -math.inf])
def test_torch_makes_what_the_kernels_make(text, bad, monkeypatch):
    """As on GPUs, and where llvmlite is missing; with a part of a block at the end, and in what is added to."""
    monkeypatch.setattr(blocks, "KERNELS_PIECE", 1 << 14)
    x = vector((1 << 16) + 2100, 1.0, 6)
    x[5000] = bad
    by_kernels = made_of(codec_of(text), x, -0.3)
    without_kernels(monkeypatch)
    by_torch = made_of(codec_of(text), x, -0.3)
    assert by_kernels[1] == by_torch[1] == (not math.isfinite(bad))
    assert torch.equal(by_kernels[0][0], by_kernels[0][1])
    assert all(map(torch.equal, by_kernels[0], by_torch[0]))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Torch computes, and cuts vectors as on a GPU, but in pieces of 16,384; returns the lengths of all pieces."""
    lengths: list[int] = []
    pieces = Blockwise._pieces

    def noting(self, start, stop, device, *others):
        for piece in pieces(self, start, stop, torch.device("cuda"), *others):
            lengths.append(piece[0].stop - piece[0].start)
            yield piece

    without_kernels(monkeypatch)
    monkeypatch.setattr(Blockwise, "_pieces", noting)
    monkeypatch.setattr(blocks, "DEVICE_PIECE", 1 << 14)
    monkeypatch.setattr(blocks, "KERNELS_PIECE", 1 << 12)
    return lengths


@pytest.mark.parametrize("text", ["levels2", "levels1", "minmax4", "minmax4:block=7", "topk", "minmax8"])
@pytest.mark.parametrize("bad", [1.0, math.nan])
def test_on_a_gpu_torch_makes_the_same_of_large_vectors_in_pieces(text, bad, request):
    x, codec = vector((1 << 15) + 2100, 1.0, 8), codec_of(text)
    x[-3000] = bad
    payloads = [codec.empty(x.numel(), x.device) for _ in range(3)]
    for seed, payload in enumerate(payloads):
        codec.encode(x * (1 + seed), payload, seed)

    def made() -> tuple[list[torch.Tensor], int]:
        tensors, flag = made_of(codec, x, -0.3)
        at_random, total, mean = codec.empty(x.numel(), x.device), torch.empty_like(x), torch.empty_like(x)
        codec.encode(x, at_random, 9)
        codec.reduce(payloads, total, mean=False)
        for here, piece in codec.means(payloads, x.numel()):
            mean[here] = piece
        return [*tensors, at_random, *(t.nan_to_num(7.0) for t in (total, mean))], flag

    whole, flag = made()
    lengths = request.getfixturevalue("as_on_a_gpu")
    cut, again = made()
    assert flag == again == (not math.isfinite(bad))
    assert all(map(torch.equal, whole, cut))
    assert max(lengths) <= 1 << 14 and x.numel() > 2 << 14


def test_a_mean_of_blocks_that_are_longer_than_a_piece(monkeypatch):
    without_kernels(monkeypatch)
    monkeypatch.setattr(blocks, "KERNELS_PIECE", 1 << 10)
    x, codec = vector(10_000, 1.0, 3), codec_of("minmax4:block=4096")
    payload, out = codec.empty(x.numel(), x.device), torch.empty_like(x)
    codec.encode(x, payload)
    codec.decode(payload, out)
    assert torch.equal(torch.cat([piece.clone() for _, piece in codec.means([payload], x.numel())]), out)


def test_torch_needs_little_memory_for_a_large_vector(monkeypatch):
    without_kernels(monkeypatch)
    x, codec = torch.randn(1 << 20), codec_of("minmax8")
    payload = codec.empty(x.numel(), x.device)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        codec.encode(x, payload)
    assert 0 < max(event.cpu_memory_usage for event in profile.events()) < x.nbytes / 4


def odd_chunks(chunk: int = 4096) -> torch.Tensor:
    """Chunks in which it is hard to tell which elements are the largest, and a part of one."""
    random = np.random.default_rng(3)
    normal = random.standard_normal(chunk).astype(np.float32)
    sparse = np.where(random.random(chunk) < 0.005, normal, np.float32(0))
    patterns = random.integers(0, 1 << 32, chunk, np.uint64).astype(np.uint32).view(np.float32)  # many NaN
    greatest = np.full(chunk, 0xFFFFFFFF, np.uint32).view(np.float32)
    chunks = [
        *(normal, np.sort(normal), np.rint(normal), sparse, -sparse[::-1], 0 * normal, np.sign(normal)),
        *(normal * np.float32(1e-41), np.copysign(np.float32(3.4e38), normal), np.where(normal > 2, np.inf, normal)),
        *(patterns, greatest, np.where(normal > 0, greatest, normal), np.where(normal > 3, greatest, np.float32(0))),
        normal[:100],
    ]
    return torch.from_numpy(np.concatenate(chunks).astype(np.float32))


@pytest.mark.parametrize("k", [8, 32, 64, 256, 2048])
@pytest.mark.parametrize("alpha", [1.0, -1.0])
def test_topk_of_odd_chunks_is_the_same_by_kernels_and_torch(k, alpha, monkeypatch):
    x = odd_chunks()
    by_kernels = made_of(TopK(k), x, alpha)
    without_kernels(monkeypatch)
    by_torch = made_of(TopK(k), x, alpha)
    assert by_kernels[1] == by_torch[1] == 1
    for ours, theirs in zip(by_kernels[0], by_torch[0], strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def no_llvmlite(monkeypatch):
    """As where it is not installed."""
    users = [f"lsgd.kernels.cpu.{name}" for name in ("ir", "blockwise", "levels", "minmax4", "topk")]
    for name in [name for name in sys.modules if name.split(".")[0] == "llvmlite" or name in users]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    answers = (kernels.kernels_for, kernels._warn)
    for cached in answers:
        cached.cache_clear()
    yield
    for cached in answers:
        cached.cache_clear()


def test_without_llvmlite_they_run_in_torch_and_say_so_once(no_llvmlite, caplog):
    x = vector(4096, 1.0, 7)
    with caplog.at_level(logging.WARNING):
        assert [coded(name, x)[0] for name in ("topk:k=64", "levels1:block=512")] == [
            topk(x.numpy(), 64)[0],
            levels1_of(x.numpy(), 512)[0],
        ]
    assert ["pip install llvmlite" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("text", REFERENCES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_vectors_are_those_in_float32(text, dtype):
    x = vector(700, 1.0, 1).to(dtype)
    assert coded(text, x)[0] == coded(text, x.float())[0]


@pytest.mark.parametrize("text", ["levels2:block=64", "levels1:block=64", "minmax4:block=64"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_spoils_its_block_only(text, bad):
    x = vector(200, 1.0, 2)
    good = coded(text, x)[1]
    x[70] = bad
    decoded = coded(text, x)[1]
    assert np.isnan(decoded[64:128]).all()
    assert (np.delete(decoded, np.s_[64:128]) == np.delete(good, np.s_[64:128])).all()


@pytest.mark.parametrize(
    ("text", "bits", "error"),
    [("levels2", 2.25, 0.1135), ("levels1", 1, 0.3634), ("minmax4:block=512", 4, 0.0139), ("topk", 0.23, 0.881)],
)
def test_bits_and_mean_square_errors_of_normal_numbers(text, bits, error):
    """What docs/concepts/formulas.md says."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    assert codec_of(text).element_nbytes * 8 == pytest.approx(bits, abs=0.13)
    assert np.square(coded(text, x)[1] - x.numpy()).mean() == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("text", ["levels2", "levels1", "minmax4", "topk"])
@pytest.mark.parametrize("kept", [1, 2, 500, 1000])
def test_no_vector_loses_more_than_it_has(text, kept):
    """So what error feedback carries on does not grow by itself: blocks of one number, and mostly of zeros."""
    x = torch.zeros(1025)
    x[-kept:] = vector(kept, 1.0, 4)
    assert np.linalg.norm(coded(text, x)[1] - x.numpy()) <= np.linalg.norm(x)
    x[:] = -0.75
    decoded = coded(text, x)[1]
    assert np.abs(decoded[decoded != 0] / -0.75 - 1).max() < 2**-8


def test_topk_takes_the_first_of_equal_magnitudes_in_120_bytes_a_chunk():
    x = torch.ones(9000)
    x[::2] = -1
    data, decoded = coded("topk", x)
    assert len(data) == 3 * 120
    assert [np.flatnonzero(decoded[i : i + 4096]).tolist() for i in (0, 4096, 8192)] == [list(range(64))] * 3
    assert (decoded[:64] == x[:64].numpy()).all()


@pytest.mark.parametrize("k", [0, 4, 24, 4096])
def test_topk_keeps_a_power_of_two(k):
    with pytest.raises(ConfigError, match=golden.pattern("codecs.bad_k", k=k)):
        codec_of(f"topk:k={k}")


def test_minmax4_is_off_by_half_a_unit_at_most():
    x = vector(2048, 1.0, 3)
    unit = (x.max() - x.min()) / 15
    assert np.abs(coded("minmax4", x)[1] - x.numpy()).max() <= unit / 2 * 1.0001


@pytest.mark.parametrize("name", ["levels1", "levels2"])
@pytest.mark.parametrize("size", [0, 4, 24, 1 << 17])
def test_a_scale_block_is_a_power_of_two(name, size):
    with pytest.raises(ConfigError, match=golden.pattern("codecs.bad_block", size=size)):
        codec_of(f"{name}:block={size}")
