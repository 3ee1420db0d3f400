"""Every way to compute minmax8 against the NumPy oracle, bit by bit, and the properties that it promises."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from lsgd.codecs.base import flags_of

from ..search import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAST = examples(40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors])
FLOAT_MAX = np.finfo(np.float32).max


def same_bits(a, b):
    a, b = a.contiguous(), b.contiguous()
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and (a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def halfway(rng, n):
    """Values beside the middle between two codes, where every rounding error counts."""
    greatest = rng.uniform(1, 2)
    x = (-greatest + (rng.integers(1, 256, n) - 0.5) * 2 * greatest / 255).astype(np.float32)
    x += np.spacing(x) * rng.integers(-3, 4, n)
    x[:1], x[1:2] = -greatest, greatest
    return x


KINDS = {
    "halfway": halfway,
    "normal": lambda rng, n: rng.standard_normal(n),
    "gradients": lambda rng, n: rng.standard_normal(n) * 1e-8,
    "constant": lambda rng, n: np.full(n, rng.standard_normal()),
    "zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "subnormal": lambda rng, n: rng.standard_normal(n) * 1e-40,
    "least units": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-37, -34),
    "huge": lambda rng, n: rng.uniform(-1, 1, n) * 3e38,
    "largest": lambda rng, n: rng.choice([-FLOAT_MAX, FLOAT_MAX], n),
    "near the largest": lambda rng, n: FLOAT_MAX * (1 - rng.uniform(0, 1e-6, n)),
    "just under four": lambda rng, n: 3 + rng.choice([0, 1 - 2.0**-24, 1 - 2.0**-22], n),
    "offset": lambda rng, n: 100 + rng.uniform(0, 1e-3, n),
    "one outlier": lambda rng, n: np.where(np.arange(n) == n // 2, 1e30, rng.standard_normal(n)),
    "on the grid": lambda rng, n: rng.integers(0, 256, n),
    "all scales": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 38, n),
}


@st.composite
def vectors(draw, dtypes=DTYPES, max_numel=3000):
    """A vector of some dtype, finite, of a kind that has gone wrong somewhere."""
    n = draw(st.sampled_from([0, 1, 2, 7, 8, 63, 64, 65, 255, 1000, 2047, 2048, 2049]) | st.integers(0, max_numel))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    with np.errstate(over="ignore"):
        values = KINDS[draw(st.sampled_from(sorted(KINDS)))](rng, n)
        x = torch.from_numpy(np.clip(values, -FLOAT_MAX, FLOAT_MAX).astype(np.float32))
    dtype = draw(st.sampled_from(dtypes))
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


blocks = st.sampled_from([0, 1, 7, 8, 100, 256, 1000, 2048, 4096])
seeds = st.none() | st.sampled_from([0, 1, 2**32, 2**64 - 1]) | st.integers(0, 2**64 - 1)


def bound(x, unit, rounding_units):
    """The error that is promised, in float64: of the units, and of the ulps of the greatest value."""
    exponent = np.frexp(abs(x).max(initial=0))[1]
    ulp = 2.0 ** max(exponent - 24, -149)
    return rounding_units * unit * (1 + 2.0**-15) + 2 * ulp


@given(x=vectors(), block=blocks, seed=seeds)
@FAST
def test_payload_is_the_oracles(runner, oracle, x, block, seed):
    expected = torch.from_numpy(oracle.quantize(x.float().numpy(), block, seed, name_of(x.dtype)))
    assert same_bits(runner.encode(x, block, seed), expected)


@given(x=vectors(), block=blocks, dtype=st.sampled_from(DTYPES), alpha=st.sampled_from([1.0, -1.0, 0.3]))
@FAST
def test_decoding_is_the_oracles(runner, oracle, x, block, dtype, alpha):
    payload = oracle.quantize(x.float().numpy(), block, None, name_of(x.dtype))
    ours = torch.from_numpy(payload)
    decoded = torch.from_numpy(oracle.dequantize(payload))
    assert same_bits(runner.decode(ours, x.numel(), block, dtype), decoded.to(dtype))
    start = torch.linspace(-1, 1, x.numel()).to(dtype)
    expected = start.float() + decoded * torch.tensor(alpha)
    assert same_bits(runner.decode_add(ours, start, block, alpha), expected.to(dtype))


@given(x=vectors(dtypes=DTYPES[:1], max_numel=1500), block=blocks, seed=seeds, data=st.data())
@FAST
def test_reduction_is_the_oracles(runner, oracle, x, block, seed, data):
    members, mean = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    parts = [oracle.quantize(np.roll(x.numpy(), i) * np.float32(0.5), block) for i in range(members)]
    rows = torch.from_numpy(np.stack(parts))
    if data.draw(st.booleans()):
        rows = [row.clone() for row in rows]  # no longer equally far apart
    expected = oracle.reduce(parts, np.float32(1 / members if mean else 1))
    assert same_bits(runner.reduce(rows, x.numel(), block, mean), torch.from_numpy(expected))
    payload = runner.reduce_encode(rows, x.numel(), block, mean, seed)
    assert same_bits(payload, torch.from_numpy(oracle.quantize(expected, block, seed)))


@given(x=vectors(), block=blocks, seed=seeds)
@FAST
def test_error_is_within_its_bound(runner, oracle, x, block, seed):
    payload = runner.encode(x, block, seed)
    decoded = runner.decode(payload, x.numel(), block, torch.float32).double().numpy()
    assert np.isfinite(decoded).all()
    _, step, scales, _ = oracle.split(payload.numpy())
    for number, (lo, unit) in enumerate(scales.astype(np.float64)):
        part = x.double().numpy()[number * step : (number + 1) * step]
        mine = decoded[number * step : (number + 1) * step]
        if unit == 0:  # constant, or a range too small for a unit that is a normal number
            assert (mine == lo).all() and part.max() - part.min() < 255 * 2.0**-126
        else:
            assert (abs(mine - part) <= bound(part, unit, 0.5 if seed is None else 1.0)).all()


def test_stochastic_rounding_is_unbiased(runner, oracle):
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal(512).astype(np.float32))
    draws = 200
    total = np.zeros(512)
    for seed in range(draws):
        payload = runner.encode(x, 256, seed * 7919).numpy()
        total += oracle.dequantize(payload)
    unit = oracle.split(payload)[2][:, 1].repeat(256)
    deviations = (total / draws - x.numpy()) / (unit / 2 / np.sqrt(draws))  # a rounding deviates unit / 2 at most
    assert abs(deviations).max() < 5
    assert abs(deviations.mean()) < 5 / np.sqrt(512)


def test_values_on_the_grid_stay_whatever_the_seed(runner):
    x = torch.arange(256, dtype=torch.float32).repeat(4)
    for seed in (None, 0, 1, 2**63):
        assert torch.equal(runner.decode(runner.encode(x, 256, seed), 1024, 256, torch.float32), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 500, 1023, 1024, 2999])
def test_nonfinite_is_flagged_and_never_becomes_codes(runner, oracle, bad, place):
    number = torch.arange(3000) // 1024
    for dtype, seed in itertools.product(DTYPES, (None, 9)):
        x = torch.linspace(-1, 1, 3000).to(dtype)
        x[place] = bad
        payload = runner.encode(x, 1024, seed)
        assert same_bits(payload, torch.from_numpy(oracle.quantize(x.float().numpy(), 1024, seed, name_of(dtype))))
        assert int(flags_of(payload)) == 1
        assert torch.equal(runner.decode(payload, 3000, 1024, dtype).isnan(), number == place // 1024)
        again = runner.reduce_encode([payload, payload], 3000, 1024, True, seed)
        assert int(flags_of(again)) == 1


@pytest.mark.parametrize("numel", [33_000, 70_001])
@pytest.mark.parametrize("block", [0, 32_768, 40_003])
@pytest.mark.parametrize("seed", [None, 2**40 + 1])
def test_blocks_too_big_for_one_thread_block(runner, oracle, numel, block, seed):
    x = torch.from_numpy(np.random.default_rng(numel).standard_normal(numel).astype(np.float32))
    payload = runner.encode(x, block, seed)
    assert same_bits(payload, torch.from_numpy(oracle.quantize(x.numpy(), block, seed)))
    again = runner.reduce_encode([payload], numel, block, True, seed)
    assert same_bits(again, torch.from_numpy(oracle.quantize(oracle.dequantize(payload.numpy()), block, seed)))


def test_oracles_generator_is_philox(oracle):
    # Known answers of the authors' library, Random123, for the rounds used here and for the usual ten.
    pi = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    ones = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
    assert oracle.philox(0, 0) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    assert oracle.philox_words(*ones, 7) == (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)
    assert oracle.philox_words(*pi, 7) == (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)
    assert oracle.philox_words(*pi, 10) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
