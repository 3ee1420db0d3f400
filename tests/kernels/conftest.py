import ctypes
import functools
import importlib.util
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import lsgd.kernels as kernels_module
import lsgd.kernels.cuda.launch as launch_module
from lsgd.codecs.minmax import MinMax8
from lsgd.kernels.cpu.minmax8 import MinMax8Kernels as OnCpu
from lsgd.kernels.cuda.launch import MINMAX8, cupy_launch
from lsgd.kernels.cuda.launch import MinMax8Kernels as OnCuda

HERE = Path(__file__).parent


def on_gpu(*names):
    """The parameters of a fixture that need a GPU; none without one, which test_cuda.py says once."""
    return [pytest.param(name, marks=pytest.mark.gpu) for name in names if torch.cuda.is_available()]


@pytest.fixture
def fresh_kernels():
    """No kernels are compiled before the test, and its own are not left to others."""

    def clear():
        ours = kernels_module.kernels_for, kernels_module._warn, launch_module.cupy_launch, launch_module._compiled
        for cached in ours:
            cached.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture(scope="session")
def oracle():
    """The module oracle.py; this folder is no package."""
    spec = importlib.util.spec_from_file_location("kernels_oracle", HERE / "oracle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build_for_host(tmp_path_factory):
    """Builds a CUDA source for this CPU, every thread a fiber, and returns what launches its kernels."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build CUDA sources for the CPU with")
    folder = tmp_path_factory.mktemp("cuda_host")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]

    def build(source):
        library = folder / f"{source.stem}.so"
        paths = [f"-I{HERE / 'cuda_host'}", f'-DCUDA_SOURCE="{source.resolve()}"', f'-DKERNEL_LIST="{source.stem}.h"']
        driver = str(HERE / "cuda_host" / "driver.cpp")
        subprocess.run(["g++", *flags, *paths, driver, "-o", str(library)], check=True)
        start = ctypes.CDLL(str(library)).launch

        def launch(kernel, grid, threads, arguments):
            words = [
                struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else value % 2**64
                for value in arguments
            ]
            array = (ctypes.c_uint64 * len(words))(*words)
            status = start(kernel.encode(), grid, threads, array, ctypes.c_size_t(len(words)))
            assert status == 0, f"{kernel}: {('no such kernel', 'wrong number of arguments')[status - 1]}"

        return launch

    return build


@pytest.fixture(scope="session")
def cuda_on_host(build_for_host):
    """The CUDA kernels of minmax8 for a block size, on this CPU."""
    return functools.partial(OnCuda, launch=build_for_host(MINMAX8))


def minmax8_with(kernels):
    """The codec with other kernels: what returns those for a block size, or None for plain torch."""

    @dataclass(frozen=True)
    class MinMax8With(MinMax8):
        def kernels_on(self, device):
            return None if kernels is None else kernels(self.block)

    return MinMax8With


@pytest.fixture(scope="session")
def in_torch():
    """minmax8 without kernels."""
    return minmax8_with(None)


@pytest.fixture(scope="session", params=["torch", "cpu", "cpu-avx2", "cuda-on-host", *on_gpu("torch-on-gpu", "cuda")])
def runner(request):
    """One way of computing, fed with CPU tensors and answering with them."""
    match request.param:
        case "torch":
            return Runner(None, "cpu")
        case "torch-on-gpu":
            return Runner(None, "cuda")
        case "cuda":
            pytest.importorskip("cupy")
            return Runner(functools.partial(OnCuda, launch=cupy_launch(MINMAX8, torch.device("cuda", 0))), "cuda")
        case "cuda-on-host":
            return Runner(request.getfixturevalue("cuda_on_host"), "cpu")
        case "cpu-avx2":
            return Runner(avx2_kernels(), "cpu")
        case _:
            return Runner(OnCpu, "cpu")


def avx2_kernels():
    """The CPU kernels as they are on a machine without AVX-512, if this one can run those."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    return functools.partial(OnCpu, cpu="haswell")


class Runner:
    """Runs the codec's operations, with bytes around every output that must stay as they are."""

    def __init__(self, kernels, device):
        self.codec = minmax8_with(kernels)
        self.device = torch.device(device)

    def _guarded(self, like):
        """Return an uninitialized tensor like another on the device, and a check of the bytes around it."""
        margin = 64
        nbytes = like.numel() * like.element_size()
        room = torch.full((nbytes + 2 * margin,), 0xA5, dtype=torch.uint8, device=self.device)
        inside = room[margin : margin + nbytes].view(like.dtype)

        def check():
            outside = torch.cat([room[:margin], room[margin + nbytes :]])
            assert (outside == 0xA5).all(), "wrote outside its output"

        return inside, check

    def encode(self, x, block, seed):
        codec = self.codec(block)
        payload, check = self._guarded(codec.empty(x.numel(), "cpu"))
        x = x.to(self.device)
        before = x.clone()
        codec.encode(x, payload, seed)
        check()
        assert torch.equal(before.view(torch.uint8), x.view(torch.uint8)), "changed its input"
        return payload.cpu()

    def decode(self, payload, numel, block, dtype):
        out, check = self._guarded(torch.empty(numel, dtype=dtype))
        self.codec(block).decode(payload.to(self.device), out)
        check()
        return out.cpu()

    def decode_add(self, payload, x, block, alpha):
        out, check = self._guarded(x)
        out.copy_(x)
        self.codec(block).decode_add(payload.to(self.device), out, alpha)
        check()
        return out.cpu()

    def reduce(self, payloads, numel, block, mean):
        out, check = self._guarded(torch.empty(numel))
        self.codec(block).reduce([each.to(self.device) for each in payloads], out, mean=mean)
        check()
        return out.cpu()

    def reduce_encode(self, payloads, numel, block, mean, seed):
        codec = self.codec(block)
        payload, check = self._guarded(codec.empty(numel, "cpu"))
        codec.reduce_encode([each.to(self.device) for each in payloads], payload, numel=numel, mean=mean, seed=seed)
        check()
        return payload.cpu()
