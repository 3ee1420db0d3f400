"""LLVM assembly, compiled for this machine."""

from __future__ import annotations

import functools
import platform
from typing import Final

IS_X86: Final = platform.machine() in ("x86_64", "AMD64")


@functools.cache
def host() -> tuple[str, str]:
    """Return LLVM's name of this machine's processor and the list of its features."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def usable_host() -> tuple[str, str]:
    """Return :func:`host`.

    Raises:
        ImportError: llvmlite is not installed, or too old.
        RuntimeError: The processor is an x86 from before 2013, without AVX2, F16C or FMA.
    """
    cpu, features = host()
    missing = {"+avx2", "+f16c", "+fma"}.difference(features.split(",")) if IS_X86 else ()
    if missing:
        raise RuntimeError(f"this processor ({cpu}) lacks {', '.join(sorted(missing))}")
    return cpu, features


class Machine:
    """Compiled kernels: ``address(name)`` of each.

    Args:
        text: LLVM assembly.
        cpu: LLVM's name of the processor to compile for.
        features: LLVM's list of its features.
    """

    def __init__(self, text: str, cpu: str, features: str) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        module = llvm.parse_assembly(text)
        target = llvm.Target.from_triple(llvm.get_process_triple())
        target_machine = target.create_target_machine(cpu=cpu, features=features, opt=2)
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        # The loops are vectorized already; these passes would only add a second of compiling.
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = llvm.create_pass_builder(target_machine, options)
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, target_machine)
        self._engine.finalize_object()
        self.address = functools.cache(self._engine.get_function_address)
