"""Compiles LLVM assembly for this machine."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Final

IS_X86: Final = platform.machine() in ("x86_64", "AMD64")


def usable_host() -> tuple[str, str]:
    """Return LLVM's name of this machine's processor and its list of features.

    Raises:
        ImportError: llvmlite is not installed, or too old.
        RuntimeError: The processor is an x86 from before 2013, without AVX2, F16C or FMA.
    """
    import llvmlite.binding as llvm

    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    missing = {"+avx2", "+f16c", "+fma"}.difference(features.split(",")) if IS_X86 else ()
    if missing:
        raise RuntimeError(f"this processor ({cpu}) lacks {', '.join(sorted(missing))}")
    return cpu, features


def compiled(text: str, cpu: str, features: str) -> Callable[[str], int]:
    """Compile LLVM assembly and return what gives the address of each function by name; it keeps the code alive.

    Args:
        text: LLVM assembly.
        cpu: LLVM's name of the processor to compile for.
        features: LLVM's list of its features.
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
    address: Callable[[str], int] = functools.cache(engine.get_function_address)
    return address
