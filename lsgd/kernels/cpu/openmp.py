"""Run a compiled function on the threads that torch computes with.

A second OpenMP runtime would compete with torch's for the cores: the idle threads of each spin while the other's
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
    """Return the entry point of torch's OpenMP runtime, or None, with one warning, if it cannot be found."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError) as error:
        _log.warning("the kernels run on one thread: torch's OpenMP runtime was not found (%s)", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def run(function: int, data: int, *, threads: int) -> None:
    """Call the function at an address once on each of ``threads`` threads, and return when all have returned.

    Args:
        function: Address of a ``void (*)(void *)``.
        data: Address passed to every call.
        threads: How many; 1 calls it on this thread.
    """
    parallel = parallel_region() if threads > 1 else None
    if parallel is None:
        _CALL(function)(data)
    else:
        parallel(function, data, threads, 0)


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
