"""The low-bit codecs on CUDA: their kernels, built for this CPU or on a GPU, make the bytes that torch makes."""

import math

import pytest
import torch

from lsgd.codecs import codec_of
from lsgd.codecs.base import flags_of
from lsgd.codecs.blocks import Blockwise
from lsgd.kernels import LEVELS_BLOCKS
from lsgd.kernels.cuda import launch as on_cuda

from .conftest import on_gpu

CODECS = [
    *("levels1", "levels1:block=64", "levels2", "levels2:block=128", "levels2:block=2048"),
    *("minmax4", "minmax4:block=64", "minmax4:block=8256", "topk", "topk:k=8", "topk:k=2048"),
]


@pytest.fixture(scope="module")
def on_host(build_for_host):
    """Launches the kernels on this CPU."""
    return build_for_host(on_cuda.FEW_BITS)


@pytest.fixture(params=["host", *on_gpu("gpu")])
def kernels(request, monkeypatch):
    """Lets codecs use the CUDA kernels or plain torch; returns the device of the tensors."""
    if request.param == "gpu":
        pytest.importorskip("cupy")
        return lambda used: "cuda" if used else "cpu"
    launch = request.getfixturevalue("on_host")
    classes = {"levels": on_cuda.LevelsKernels, "minmax4": on_cuda.MinMax4Kernels, "topk": on_cuda.TopKKernels}

    def use(used):
        made = (lambda codec, _: classes[codec.family](*codec.form, launch=launch)) if used else (lambda *_: None)
        monkeypatch.setattr(Blockwise, "kernels_on", made)
        return "cpu"

    return use


def made_of(text, x, device, alpha=-0.3):
    """The payload, what it decodes to, and what is added to, as bits; with bytes behind that must stay as they are."""
    codec, margin = codec_of(text), 64
    x = x.to(device)
    room = torch.full((codec.nbytes(x.numel()) + margin,), 0xA5, dtype=torch.uint8, device=device)
    outs = [torch.full((x.numel() + margin,), 7.0, device=device) for _ in range(2)]
    payload, (out, added) = room[:-margin], [out[:-margin] for out in outs]
    added.copy_(torch.linspace(-1, 1, x.numel()))
    added[::3] = -0.0
    codec.encode(x, payload)
    codec.decode(payload, out)
    codec.decode_add(payload, added, alpha)
    assert (room[-margin:] == 0xA5).all() and all((each[-margin:] == 7.0).all() for each in outs)
    bits = [t.nan_to_num(9.0).view(torch.int32).cpu() for t in (out, added)]
    return [payload.cpu(), *bits, flags_of(payload).cpu()]


def odd_vector(numel):
    """Blocks of zeros, of equal, huge, tiny and subnormal numbers, with ties; the last block is shorter."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([1.0, 1e-30, 3e-41, 0.0, 1e30]).repeat_interleave(2100)[:numel]
    x[: sizes.numel()] *= sizes
    x[-700:] = x[-700:].round()
    x[-300:-200] = -0.0
    x[300:400] = -0.75
    x[100] = torch.finfo(torch.float32).max
    return x


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("numel", [1, 333, 12_289])
def test_the_kernels_make_what_torch_makes(kernels, text, numel):
    x = odd_vector(numel) if numel > 1000 else torch.randn(numel, generator=torch.Generator().manual_seed(2))
    by_kernels = made_of(text, x, kernels(True))
    assert all(map(torch.equal, by_kernels, made_of(text, x, kernels(False))))
    assert int(by_kernels[-1]) == 0


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(kernels, text, bad):
    x = odd_vector(9000)
    x[5000] = bad
    by_kernels = made_of(text, x, kernels(True), alpha=1.0)
    assert all(map(torch.equal, by_kernels, made_of(text, x, kernels(False), alpha=1.0)))
    assert int(by_kernels[-1]) == 1


def test_all_sizes_of_blocks_have_a_kernel(on_host):
    for block in LEVELS_BLOCKS:
        path = on_cuda.LevelsKernels(block, 1.0, 0.0, None, launch=on_host)
        scales, signs = torch.zeros(2, dtype=torch.uint8), torch.ones(block // 8, dtype=torch.uint8)
        path.encode(torch.full((block,), 1.5), torch.zeros(32, dtype=torch.uint8), [scales, signs])
        assert scales.view(torch.bfloat16).item() == 1.5 and not signs.any()
