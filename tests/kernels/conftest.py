import ctypes
import importlib.util
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from lsgd.kernels.cpu.path import CpuPath
from lsgd.kernels.cuda.path import SOURCE, CudaPath
from lsgd.kernels.reference import ReferencePath

HERE = Path(__file__).parent


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

        def launch(device, kernel, grid, threads, arguments):
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
    """The CUDA path of minmax8, on this CPU."""
    return CudaPath(launch=build_for_host(SOURCE))


PATHS = [
    "reference",
    "cpu",
    "cpu-avx2",
    "cuda-on-host",
    pytest.param("reference-on-gpu", marks=pytest.mark.gpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", params=PATHS)
def runner(request):
    """One path, fed with CPU tensors and answering with them."""
    name = request.param
    if name in ("cuda", "reference-on-gpu"):
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        if name == "cuda":
            pytest.importorskip("cupy")
        return Runner(CudaPath() if name == "cuda" else ReferencePath(), "cuda")
    if name == "cuda-on-host":
        return Runner(request.getfixturevalue("cuda_on_host"), "cpu")
    if name == "cpu-avx2":
        return Runner(avx2_path(), "cpu")
    return Runner(CpuPath() if name == "cpu" else ReferencePath(), "cpu")


def avx2_path():
    """The CPU path as it is on a machine without AVX-512, if this one can run that."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this processor has no AVX2")
    return CpuPath(cpu="haswell")


class Runner:
    """Runs a path's operations, with bytes around every output that must stay as they are."""

    def __init__(self, path, device):
        self.path = path
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

    def quantize(self, x, layout, seed):
        payload, check = self._guarded(layout.empty())
        x = x.to(self.device)
        before = x.clone()
        self.path.quantize(x, layout, payload, seed)
        check()
        assert torch.equal(before.view(torch.uint8), x.view(torch.uint8)), "changed its input"
        return payload.cpu()

    def dequantize(self, q, dtype):
        out, check = self._guarded(torch.empty(q.numel, dtype=dtype))
        self.path.dequantize(self.moved(q), out)
        check()
        return out.cpu()

    def dequantize_add(self, q, x, alpha):
        out, check = self._guarded(x)
        out.copy_(x)
        self.path.dequantize_add(self.moved(q), out, alpha)
        check()
        return out.cpu()

    def dequantize_reduce(self, qs, weight):
        out, check = self._guarded(torch.empty(qs[0].numel))
        self.path.dequantize_reduce([self.moved(q) for q in qs], out, weight)
        check()
        return out.cpu()

    def dequantize_reduce_quantize(self, qs, weight, layout, seed):
        payload, check = self._guarded(layout.empty())
        self.path.dequantize_reduce_quantize([self.moved(q) for q in qs], weight, layout, payload, seed)
        check()
        return payload.cpu()

    def moved(self, q):
        return type(q)(q.payload.to(self.device), q.layout)
