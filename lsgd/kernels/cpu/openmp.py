"""Runs a compiled function on torch's own threads.

A second OpenMP runtime would compete with torch's for the cores, because idle threads of one spin while the other's
work. So the entry point is looked up through torch's own library, which finds the runtime that torch is linked with
(GNU's, LLVM's and Intel's all export it).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

# void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
_Parallel = Callable[[int, int, int, int], None]


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
    """Call a function once on each of ``threads`` threads, and return when all calls have.

    Args:
        function: Address of a ``void (*)(void *)``.
        data: Address passed to every call.
        threads: Number of threads; with 1, this thread makes the call.
    """
    parallel = parallel_region() if threads > 1 else None
    if parallel is None:
        _CALL(function)(data)
    else:
        parallel(function, data, threads, 0)


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
