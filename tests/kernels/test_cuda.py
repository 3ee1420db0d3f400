"""The CUDA kernels without a GPU: their sources compile, and CuPy is judged before it is used."""

import ctypes
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lsgd.codecs.minmax import MinMax8
from lsgd.kernels.cuda.launch import COMPILE_OPTIONS, FEW_BITS, MINMAX8, CupyLaunch


@pytest.fixture(scope="module")
def compilers():
    """NVIDIA's run-time compilers, the newest first, each with the architectures that it knows; they need no GPU."""
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else ()
    libraries = {path.name: path for folder in folders for path in Path(folder).glob("**/libnvrtc.so.*")}
    found = []
    for name in sorted(libraries, reverse=True):
        nvrtc, count = ctypes.CDLL(str(libraries[name])), ctypes.c_int()
        assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        known = (ctypes.c_int * count.value)()
        assert nvrtc.nvrtcGetSupportedArchs(known) == 0
        found.append((nvrtc, {f"sm_{number}" for number in known}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", [FEW_BITS, MINMAX8], ids=lambda path: path.name)
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_source_compiles(compilers, architecture, source):
    nvrtc = next((nvrtc for nvrtc, known in compilers if architecture in known), None)
    if nvrtc is None:
        pytest.skip(f"no compiler for {architecture}: pip install nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12")
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None) == 0
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *COMPILE_OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    assert size.value > 10_000
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def fake_cupy(version, available):
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: version)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, is_available=lambda: available))


@pytest.mark.parametrize(
    ("torch_cuda", "cupy", "message"),
    [
        (None, None, "no CUDA"),
        ("12.8", fake_cupy(13000, True), "built for CUDA 13, torch for CUDA 12; pip install cupy-cuda12x"),
        ("13.0", fake_cupy(13000, False), "finds no GPU"),
    ],
)
def test_a_cupy_that_does_not_fit(monkeypatch, torch_cuda, cupy, message):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(RuntimeError, match=message):
        CupyLaunch("")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: this and all other cases of tests/kernels on one")
def test_kernels_are_queued_on_the_current_stream():
    pytest.importorskip("cupy")
    x, codec = torch.randn(1 << 22, device="cuda"), MinMax8()
    expected, payload = codec.empty(x.numel(), "cpu"), codec.empty(x.numel(), "cuda")
    codec.encode(x.cpu(), expected, 8)
    decoded = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x * 1
        codec.encode(late, payload, 8)
        codec.decode(payload, decoded)
    stream.synchronize()
    assert torch.equal(payload.cpu(), expected)
    assert (decoded - x).abs().max() < 0.1
