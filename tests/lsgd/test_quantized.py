"""The two-round all-reduce in 8 bits: what it computes, that all get the same bits, and how many bytes travel."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lsgd.codecs.minmax import MinMax8
from lsgd.collectives import two_round as quantized
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.two_round import QuantizedAllReduce, chunk_bounds, seed_of
from lsgd.testing.simulation import simulate

from .reference import close_to, decode
from .training import Recording

SIZES = range(1, 8)


def inputs(size, numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 1, max(numel, 1))[:numel]
    return [(torch.randn(numel, generator=generator) * scales).to(dtype) for _ in range(size)]


def all_reduce(xs, *, block=16, rounding="nearest", average=True, feedback=None, rounds=1):
    """Return outputs, recordings and flags of each member."""

    def member(group):
        recording = Recording(group)
        reduce = QuantizedAllReduce(recording, MinMax8(block or 0), rounding=rounding, average=average)
        x = xs[group.rank]
        out = torch.empty_like(x)
        for number in range(rounds):
            flags = reduce(x, out, ("test", number), feedback and feedback[group.rank])
        return out, recording, int(flags)

    return simulate([len(xs)], member)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 1, 5, 16, 100, 1000])
@pytest.mark.parametrize("block", [16, None])
def test_every_chunk_is_whole_blocks(size, numel, block):
    bounds = chunk_bounds(numel, size, block or 1)
    assert bounds[0] == 0 and bounds[-1] == numel and len(bounds) == size + 1
    lengths = np.diff(bounds)
    assert lengths.min() >= 0 and lengths.max() - lengths.min() <= (block or 1)
    assert all(bound % (block or 1) == 0 for bound in bounds[:-1] if bound < numel)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("block", [16, None])
def test_against_the_reference(size, rounding, average, block):
    """Both rounds, from the bytes that were sent: each is its input rounded, and the output is what the second says."""
    xs = inputs(size, 333)
    results = all_reduce(xs, block=block, rounding=rounding, average=average)
    outs = [out for out, _, _ in results]
    if size == 1:
        assert torch.equal(outs[0], xs[0])
        return
    first = [[decode(p) for p in recording.sent("all_to_all")[0]] for _, recording, _ in results]
    second = [decode(recording.sent("all_gather")[0][0]) for _, recording, _ in results]
    for x, chunks in zip(xs, first, strict=True):
        exact = np.split(x.double().numpy(), chunk_bounds(333, size, block or 1)[1:-1])
        assert all(close_to(d, e, rounding) for d, e in zip(chunks, exact, strict=True))
    for rank, result in enumerate(second):
        total = sum(chunks[rank].values for chunks in first)
        assert close_to(result, total / size if average else total, rounding)
    expected = np.concatenate([result.values for result in second])
    for out in outs:
        assert torch.equal(out, outs[0])
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_members_hold_the_same_bits(dtype, size):
    """200 all-reduces of other numbers each time."""

    def member(group):
        reduce = QuantizedAllReduce(group, MinMax8(32), rounding="stochastic")
        generator = torch.Generator().manual_seed(group.rank)
        outs = []
        for number in range(200):
            x = torch.randn(70, generator=generator).to(dtype)
            reduce(x, x, (number,))
            outs.append(x)
        return torch.stack(outs)

    first, *others = simulate([size], member)
    assert first.dtype is dtype and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("average", [True, False])
def test_error_feedback_loses_nothing(rounding, average):
    """The sum of 50 outputs and what the residuals hold is the sum of 50 exact means: no error is ever lost."""
    xs = inputs(3, 200)
    total = torch.zeros(200, dtype=torch.float64)
    exact = sum(x.double() for x in xs) / (3 if average else 1)

    def member(group):
        reduce = QuantizedAllReduce(group, MinMax8(50), rounding=rounding, average=average)
        feedback = ErrorFeedback(200, xs[0].device)
        outs = torch.zeros(200, dtype=torch.float64)
        for number in range(50):
            out = torch.empty(200)
            reduce(xs[group.rank], out, (number,), feedback)
            feedback.commit()
            outs += out
        return outs, feedback

    (total, *_), feedback = zip(*simulate([3], member), strict=True)
    left = sum(each.residual.double() for each in feedback) / (3 if average else 1) + result_residuals(feedback, 200)
    torch.testing.assert_close(total + left, 50 * exact, rtol=1e-4, atol=1e-4)
    assert left.abs().max() > 1e-4  # there was something to lose


def result_residuals(feedback, numel):
    """What the results have lost, in one tensor."""
    lost = torch.zeros(numel, dtype=torch.float64)
    for start, residual in (pair for each in feedback for pair in each.results.items()):
        lost[start : start + len(residual)] += residual
    return lost


@pytest.mark.parametrize("with_feedback", [False, True])
def test_the_payloads_to_reduce_are_rows_of_one_matrix(with_feedback, monkeypatch):
    """So CUDA kernels read them where they are."""
    found = []

    def note(payloads):
        found.append([payload.data_ptr() for payload in payloads])
        assert len({payload.untyped_storage().data_ptr() for payload in payloads}) == 1

    reduce, reduce_encode = MinMax8.reduce, MinMax8.reduce_encode
    monkeypatch.setattr(MinMax8, "reduce", lambda *args, **rest: (note(args[1]), reduce(*args, **rest)))
    monkeypatch.setattr(MinMax8, "reduce_encode", lambda *args, **rest: (note(args[1]), reduce_encode(*args, **rest)))
    feedback = [ErrorFeedback(333, torch.device("cpu")) for _ in range(3)] if with_feedback else None
    all_reduce(inputs(3, 333), feedback=feedback)
    assert len(found) == 3
    for addresses in found:
        first, second = (b - a for a, b in pairwise(addresses))
        assert first == second > 0 and first % 16 == 0


@pytest.mark.parametrize("unless", [None, torch.tensor(False), torch.tensor(True)])
def test_residuals_change_when_they_are_committed(unless):
    """Not by an exchange that fails, nor by one whose result is not used."""

    def member(group):
        reduce, feedback = QuantizedAllReduce(group, MinMax8(8)), ErrorFeedback(20, torch.device("cpu"))
        x = torch.randn(20)
        for number in range(2):
            reduce(x, torch.empty(20), (number,), feedback)
        assert not feedback.residual.any() and not feedback.results
        feedback.commit(unless)
        return feedback.residual.any().item(), any(each.any().item() for each in feedback.results.values())

    changed = not (unless is not None and unless)
    assert simulate([1, 1], member) == [(changed, changed)] * 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_all_alike(bad):
    xs = inputs(3, 200)
    xs[1][77] = bad
    results = all_reduce(xs, block=16)
    out = results[0][0]
    assert all(flags != 0 for _, _, flags in results)
    assert all(torch.equal(out.nan_to_num(7e7), other.nan_to_num(7e7)) for other, _, _ in results)
    non_finite = chunk_of(77, 200, 3, 16)
    assert out[non_finite].isnan().all() and out.isnan().sum() == 16
    assert all(flags == 0 for _, _, flags in all_reduce(inputs(3, 200)))


def chunk_of(index, numel, size, block):
    """The block of the chunk that ``index`` is in."""
    start = max(b for b in chunk_bounds(numel, size, block) if b <= index)
    start += (index - start) // block * block
    return slice(start, start + block)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_sent(size):
    """2 (n - 1) / n bytes per number, and 8 per block of 2048 and at most 96 per chunk beside them."""
    numel, block = 300_001, 2048

    def member(group):
        reduce = QuantizedAllReduce(group, MinMax8(block or 0), rounding="nearest")
        x = torch.randn(numel)
        reduce(x, x, ())
        return group.sent_nbytes

    for sent in simulate([size], member):
        codes = 2 * (size - 1) / size * numel
        payloads = 2 * (size - 1)
        assert codes - block * payloads <= sent <= codes * (1 + 8 / block) + (block + 96) * payloads
    total = sum(simulate([size], member))
    assert total <= 1.006 * size * 2 * (size - 1) / size * numel


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("block", [16, None])
def test_a_large_tensor_is_reduced_in_segments(monkeypatch, size, average, block):
    """Each segment comes out as if it had been a tensor of its own, residuals included."""
    xs = inputs(size, 1003)

    def outs_of(parts):
        feedback = [ErrorFeedback(x.numel(), x.device) for x in parts]
        for each in feedback:
            each.residual.fill_(0.01)
        results = all_reduce(parts, block=block, average=average, feedback=feedback)
        for each in feedback:
            each.commit()
        lost = result_residuals(feedback, parts[0].numel())
        return [out for out, _, _ in results], feedback, lost, len(results[0][1].sent("all_to_all"))

    bounds = chunk_bounds(1003, 4, block or 1)
    alone = [outs_of([x[start:end].clone() for x in xs]) for start, end in pairwise(bounds)]
    monkeypatch.setattr(quantized, "SEGMENT_CHUNK_NUMEL", 1003 // size // 4)
    outs, feedback, lost, calls = outs_of([x.clone() for x in xs])
    assert calls == (4 if size > 1 else 0)
    for rank in range(size):
        assert outs[rank].equal(torch.cat([segment[0][rank] for segment in alone]))
        assert feedback[rank].residual.equal(torch.cat([segment[1][rank].residual for segment in alone]))
    assert lost.equal(torch.cat([segment[2] for segment in alone]))


def test_everything_is_rounded_with_a_seed_of_its_own(monkeypatch):
    keys = []
    monkeypatch.setattr(quantized, "seed_of", lambda *parts: keys.append(seed_of(*parts)) or keys[-1])
    monkeypatch.setattr(quantized, "SEGMENT_CHUNK_NUMEL", 40)
    all_reduce(inputs(3, 500), rounding="stochastic", rounds=2)
    segments, members, chunks, rounds = 4, 3, 3, 2
    assert len(keys) == len(set(keys)) == rounds * members * segments * (chunks + 1)


def test_no_segment_is_empty(monkeypatch):
    """However large its blocks are."""
    monkeypatch.setattr(quantized, "SEGMENT_CHUNK_NUMEL", 10)
    for numel in (1, 99, 100, 799, 800, 2000):
        results = all_reduce(inputs(2, numel), block=100)
        calls = len(results[0][1].sent("all_to_all"))
        assert calls == max(1, min(4, numel // 200))


def test_seeds_differ():
    seeds = {seed_of("run", round, rank, stage, "x") for round in range(50) for rank in range(9) for stage in (0, 1)}
    assert len(seeds) == 900 and all(0 <= seed < 2**64 for seed in seeds)
    assert seed_of("run", 1, 2) == 0xE028BE07026AD9A8  # in every process, so a run that is repeated rounds alike


def test_stochastic_rounding_averages_out_over_members_and_rounds():
    """With a seed for each member and round the mean error falls; with one for all it would not."""
    size, rounds = 4, 64
    x = torch.linspace(0, 1, 101).repeat_interleave(4)[:400] + 0.0013

    def member(group):
        reduce = QuantizedAllReduce(group, MinMax8(0), rounding="stochastic")
        total = torch.zeros(400)
        for number in range(rounds):
            out = torch.empty(400)
            reduce(x, out, ("run", number))
            total += out
        return total / rounds

    unit = (x[99] - x[0]) / 255  # of the first of four chunks
    error = (simulate([size], member)[0] - x)[:100].abs().mean() / unit
    assert error < 0.1
