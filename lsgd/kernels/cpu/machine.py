"""Compiles LLVM assembly for this machine, and runs it on torch's own threads.

A second OpenMP runtime would compete with torch's for the cores, because idle threads of one spin while the other's
work. So the entry point is looked up through torch's own library, which finds the runtime that torch is linked with
(GNU's, LLVM's and Intel's all export it).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

IS_X86: Final = platform.machine() in ("x86_64", "AMD64")

_log = logging.getLogger(__name__)
_engines: list[object] = []  # what owns the code

# void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
_Parallel = Callable[[int, int, int, int], None]
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def usable_host() -> tuple[str, str]:
    """Return LLVM's name of this machine's processor and its list of features.

    Raises ImportError without llvmlite, and RuntimeError on an x86 from before 2013, without AVX2, F16C or FMA.
    """
    import llvmlite.binding as llvm

    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    missing = {"+avx2", "+f16c", "+fma"}.difference(features.split(",")) if IS_X86 else ()
    if missing:
        raise RuntimeError(f"this processor ({cpu}) lacks {', '.join(sorted(missing))}")
    return cpu, features


def compiled(text: str, cpu: str, features: str) -> Callable[[str], int]:
    """Compile LLVM assembly and return what gives the address of each function by name; the code stays for good.

    ``cpu`` and ``features`` are LLVM's name of the processor to compile for, and its list of features.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(cpu=cpu, features=features, opt=2)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The loops are vectorized already; these passes would only add a second of compilation.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    address: Callable[[str], int] = functools.cache(engine.get_function_address)
    return address


@functools.cache
def parallel_region() -> _Parallel | None:
    """Return the entry point of torch's OpenMP runtime; None, with one warning, if it is not found."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError) as error:
        _log.warning("the kernels run on one thread, because torch's OpenMP runtime was not found: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def run(function: int, data: int, *, threads: int) -> None:
    """Call the ``void (*)(void *)`` at an address with ``data``, once on each of ``threads`` threads, and wait."""
    parallel = parallel_region() if threads > 1 else None
    if parallel is None:
        _CALL(function)(data)
    else:
        parallel(function, data, threads, 0)
