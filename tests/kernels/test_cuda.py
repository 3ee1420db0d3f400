"""The CUDA kernels without a GPU: their sources compile, and CuPy is judged before it is used."""

import ctypes
import logging
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from lsgd.codecs.minmax import MinMax8
from lsgd.kernels import kernels_for
from lsgd.kernels.cuda.launch import COMPILE_OPTIONS, FEW_BITS, MINMAX8, CupyLaunch
from tests import golden


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
@pytest.mark.parametrize("architecture", ["sm_70", "sm_120"])
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
    assert nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
    assembly = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetPTX(program, assembly) == 0
    assert b".f32" in assembly.value and b".ftz" not in assembly.value, "subnormal numbers are flushed to zero"
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def fake_cupy(version, available):
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: version)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, is_available=lambda: available))


@pytest.mark.parametrize(
    ("torch_cuda", "cupy", "message"),
    [
        (None, None, "no CUDA"),
        ("12.8", fake_cupy(13000, True), golden.pattern("kernels.other_cuda")),
        ("13.0", fake_cupy(13000, False), "finds no GPU"),
    ],
)
def test_a_cupy_that_does_not_fit(monkeypatch, torch_cuda, cupy, message):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(RuntimeError, match=message):
        CupyLaunch("", torch.device("cuda", 0))


class CompileError(Exception):
    """Like CuPy's, no RuntimeError."""


class Gpus:
    """A CuPy whose GPUs have these architectures; notes what is compiled, loaded on a GPU, and queued on one."""

    def __init__(self, *architectures, compiles=True, loads=True):
        self.compiled, self.loaded, self.queued = [], [], []
        self._architectures, self._current = architectures, None
        self._compiles, self._loads = compiles, loads

    def install(self, monkeypatch):
        """Be what ``import cupy`` finds, beside a torch of the same CUDA."""
        cupy = fake_cupy(12090, True)
        cupy.float32, cupy.cuda.Device = np.float32, self._device
        cupy.cuda.compiler = types.SimpleNamespace(compile_using_nvrtc=self._compile)
        cupy.cuda.function = types.SimpleNamespace(
            Module=lambda: types.SimpleNamespace(load=self._load, get_function=self._function)
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
        return self

    def _device(self, index):
        gpus = self

        class Device:
            compute_capability = gpus._architectures[index]

            def __enter__(self):
                gpus._current = index

            def __exit__(self, *_):
                gpus._current = None

        return Device()

    def _compile(self, source, options=(), arch=None, cache_in_memory=False):
        self.compiled.append((source, options, arch))
        if not self._compiles:
            raise CompileError("nvrtc: error:\ninvalid value for --gpu-architecture")
        return f"{source} for {arch}".encode(), None

    def _load(self, code):
        if not self._loads:
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        self.loaded.append((self._current, code))

    def _function(self, name):
        return lambda grid, threads, arguments, stream: self.queued.append(
            (self._current, name, grid, threads, arguments, stream.ptr)
        )


def test_a_source_is_compiled_once_for_each_architecture_and_loaded_on_each_gpu(monkeypatch, fresh_kernels):
    gpus = Gpus("90", "80", "90").install(monkeypatch)
    launches = [CupyLaunch("source", torch.device("cuda", index)) for index in range(3)]
    assert gpus.compiled == [("source", COMPILE_OPTIONS, "90"), ("source", COMPILE_OPTIONS, "80")]
    assert gpus.loaded == [(0, b"source for 90"), (1, b"source for 80"), (2, b"source for 90")]
    launches[2]("kernel", 5, 256, (1 << 40, 0.1))
    assert gpus.queued == [(2, "kernel", (5,), (256,), (1 << 40, np.float32(0.1)), 7)]
    assert [type(each) for each in gpus.queued[0][4]] == [int, np.float32]


def test_kernels_are_compiled_before_they_are_called(monkeypatch, fresh_kernels):
    gpus, gpu = Gpus("90").install(monkeypatch), torch.device("cuda", 0)
    made = [kernels_for(gpu, "levels", 64, 1.0, 0.0, None), kernels_for(gpu, "topk", 4096, 64)]
    assert [source for source, _, _ in gpus.compiled] == [FEW_BITS.read_text()] and not gpus.queued
    x = torch.empty(4096)
    for kernels, parts in zip(made, (2, 5), strict=True):
        kernels.decode([x] * parts, x)
    assert [(place, name) for place, name, *_ in gpus.queued] == [(0, "decode_levels"), (0, "decode_topk")]


@pytest.mark.parametrize("family", [("minmax8", 2048), ("topk", 4096, 64)], ids=str)
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"compiles": False}, golden.text("kernels.invalid_value")),
        ({"loads": False}, golden.text("kernels.no_binary")),
    ],
)
def test_a_cupy_that_cannot_compile_leaves_the_gpu_to_torch(monkeypatch, caplog, fresh_kernels, family, broken, reason):
    Gpus("90", "200", **broken).install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert [kernels_for(torch.device("cuda", 1), *family) for _ in range(2)] == [None, None]
    assert [reason in record.message for record in caplog.records] == [True]


def test_a_cupy_whose_import_fails_leaves_the_gpu_to_torch(monkeypatch, caplog, fresh_kernels, tmp_path):
    (tmp_path / "cupy.py").write_text("import numpy\nnumpy.float_\n")  # as CuPy 13.0 does, which NumPy 2 ends
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with caplog.at_level(logging.WARNING):
        assert kernels_for(torch.device("cuda", 0), "minmax8", 2048) is None
    assert ["float_" in record.message for record in caplog.records] == [True]


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
