"""Vector kernels for codecs that send the signs, and the levels, of blocks that share a scale.

They make, byte by byte, what :mod:`lsgd.codecs.levels1` and :mod:`lsgd.codecs.levels2` make in torch, whose arithmetic
docs/algorithms.md has. The code for a block is straight, without loops: one program for each size of blocks.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from lsgd.kernels.cpu import openmp
from lsgd.kernels.cpu.machine import IS_X86, Machine, usable_host

if TYPE_CHECKING:
    from llvmlite import ir
    from torch import Tensor

    from lsgd.kernels.cpu.ir import Kernel, Value

BLOCKS: Final = range(64, 2049)
"""Sizes of blocks for which there is a kernel; larger ones would be too much straight code."""

ITEM_ELEMENTS: Final = 1 << 15  # what a thread takes at a time
LANES: Final = 8  # float64 in a vector
GROUP: Final = 64  # elements whose bits make one word
LINE: Final = 16  # elements in a line of the cache
AHEAD: Final = 2048  # elements: how far ahead a pass that leaves the memory idle fetches; past the end does no harm

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Levels:
    """What a block's elements become: plus or minus ``near`` times its scale, or, beyond a threshold, ``far`` times it.

    Args:
        threshold: times the block's root mean square; None: all are near.
    """

    near: float = 1.0
    far: float = 0.0
    threshold: float | None = None


class _Job(ctypes.Structure):
    """What one kernel launch works on; every field takes eight bytes, pointers are addresses."""

    _fields_ = tuple(
        (name, ctypes.c_double if name == "alpha" else ctypes.c_int64)
        for name in ("counter", "items", "grain", "blocks", "values", "scales", "signs", "fars", "flags", "alpha")
    )


class LevelsPath:
    """The kernels for blocks of one size.

    Args:
        levels: of the codec.
        block: elements of a block, a power of two in :data:`BLOCKS`.
    """

    def __init__(self, levels: Levels, block: int) -> None:
        self.block = block
        self._machine = Machine(_program_text(levels, block), *usable_host())

    def encode(self, x: Tensor, scales: Tensor, signs: Tensor, fars: Tensor, flags: Tensor) -> None:
        """Write what whole blocks become.

        Args:
            x: float32, whole blocks.
            scales: two bytes for each block, bfloat16; NaN for a block with NaN or Inf.
            signs: one bit for each element; set: below zero.
            fars: the same; set: far. Not used where all are near.
            flags: int32; one if a block has NaN or Inf, else unchanged.
        """
        self._run("encode", x, scales, signs, fars, flags)

    def decode(self, scales: Tensor, signs: Tensor, fars: Tensor, out: Tensor, alpha: float | None = None) -> None:
        """Write whole blocks to float32 ``out``, or add ``alpha`` times them."""
        self._run("decode" if alpha is None else "decode_add", out, scales, signs, fars, scales, alpha or 0.0)

    def _run(
        self, name: str, values: Tensor, scales: Tensor, signs: Tensor, fars: Tensor, flags: Tensor, alpha: float = 0.0
    ) -> None:
        blocks, grain = values.numel() // self.block, ITEM_ELEMENTS // self.block
        items = -(-blocks // grain)
        addresses = [tensor.data_ptr() for tensor in (values, scales, signs, fars, flags)]
        job = _Job(0, items, grain, blocks, *addresses, alpha)
        threads = max(1, min(torch.get_num_threads(), items))
        openmp.run(self._machine.address(name), ctypes.addressof(job), threads=threads)


@functools.cache
def levels_path(levels: Levels, block: int) -> LevelsPath | None:
    """Return the kernels for blocks of this size; None if there are none for it, or none that work here."""
    if block not in BLOCKS:
        return None
    try:
        return LevelsPath(levels, block)
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "; pip install llvmlite" if isinstance(error, ImportError) else ""
        _log.warning("codecs of few bits run in plain torch on the CPU, ten times slower: %s%s", error, remedy)
        return None


def _program_text(levels: Levels, block: int) -> str:
    """Return the LLVM assembly of the kernels."""
    from llvmlite import ir

    from lsgd.kernels.cpu.ir import POINTER, Kernel, entry_point

    module = ir.Module(name="levels")
    encode = _encoder(module, levels, block)
    bodies: dict[str, Callable[[Kernel, Value], None]] = {
        "encode": encode,
        "decode": lambda k, number: _decode(k, number, levels, block, add=False),
        "decode_add": lambda k, number: _decode(k, number, levels, block, add=True),
    }
    for name, body in bodies.items():
        k = Kernel(module, f"{name}_items", [POINTER])
        with k.items(_field(k, "items")) as item:
            first, grain = item * _field(k, "grain"), _field(k, "grain")
            with k.loop(first, (first + grain).minimum(_field(k, "blocks"))) as number:
                body(k, number)
        k.finish()
        entry_point(module, name, k, mxcsr=IS_X86)
    return str(module)


def _field(k: Kernel, name: str) -> Value:
    """Return a field of the job."""
    from lsgd.kernels.cpu.ir import F32, F64, I64

    number = getattr(_Job, name).offset // 8
    if name == "alpha":
        return k.load(k.arguments[0], F64, number).convert("fptrunc", F32)
    return k.load(k.arguments[0], I64, number)


def _array(k: Kernel, name: str, byte: Value) -> Value:
    """Return the address ``byte`` bytes after where an array of the job begins."""
    from lsgd.kernels.cpu.ir import I8, POINTER

    return k.offset(_field(k, name).convert("inttoptr", POINTER), I8, byte)


def _encoder(module: ir.Module, levels: Levels, block: int) -> Callable[[Kernel, Value], None]:
    """Return what emits the code for one block."""
    from lsgd.kernels.cpu.ir import F32, F64, I16, I32, POINTER

    times = levels.threshold  # the root mean square
    sums = _sums(module, block, squares=times is not None)
    fars = None if times is None else _fars(module, block)

    def emit(k: Kernel, number: Value) -> None:
        values, room = _array(k, "values", number * (4 * block)), k.stack(F64, 2)
        k.call(sums, values, _array(k, "signs", number * (block // 8)), room)
        total = k.load(room, F64, 0)
        scale = total / float(block)
        if times is not None and fars is not None:
            rms = (k.load(room, F64, 1) / float(block)).square_root()
            threshold = (rms * times).convert("fptrunc", F32)
            k.call(fars, values, _array(k, "fars", number * (block // 8)), threshold, room)
            products = total * levels.near + k.load(room, F64, 0) * (levels.far - levels.near)
            weight = k.load(room, F64, 1) * (levels.far**2 - levels.near**2)
            scale = products / (k.constant(block * levels.near**2, F64) + weight)
        finite = (scale - scale).compare("==", 0.0)
        rounded = scale.minimum(2.0**127).convert("fptrunc", F32).convert("bitcast", I32)
        rounded = (rounded + ((rounded >> 16) & 1) + 0x7FFF) >> 16
        bits = finite.where(rounded, k.constant(0x7FC0, I32)).convert("trunc", I16)
        k.store(bits, _array(k, "scales", number * 2))
        with k.either(finite) as (then, otherwise):
            with then:
                pass
            with otherwise:
                k.store(k.constant(1, I32), _field(k, "flags").convert("inttoptr", POINTER))

    return emit


def _sums(module: ir.Module, block: int, *, squares: bool) -> Kernel:
    """(values, signs, room): store a block's sum of magnitudes and that of squares, and the bits of its signs."""
    from lsgd.kernels.cpu.ir import F32, F64, POINTER, Kernel

    k = Kernel(module, "sums", [POINTER] * 3)
    values, signs, room = k.arguments

    def magnitudes(v: int) -> list[Value]:
        x = k.load(values, F32, v * LANES, LANES).magnitude().convert("fpext", F64)
        return [x, x * x] if squares else [x]

    for i, total in enumerate(_totals(block, magnitudes)):
        k.store(total, room, i)
    for group in range(0, block, GROUP):
        if not squares:  # else the pass over what is far does
            _fetch(k, values, group)
        _store_bits(k, k.load(values, F32, group, GROUP).compare("<", 0.0), signs, group)
    k.finish()
    return k


def _fars(module: ir.Module, block: int) -> Kernel:
    """(values, fars, threshold, room): store the sum and number of magnitudes beyond the threshold, and their bits."""
    from lsgd.kernels.cpu.ir import F32, F64, I64, POINTER, Kernel

    k = Kernel(module, "fars", [POINTER, POINTER, F32, POINTER])
    values, fars, threshold, room = k.arguments

    def beyond(v: int) -> list[Value]:
        x = k.load(values, F32, v * LANES, LANES).magnitude()
        return [x.compare(">", threshold).where(x.convert("fpext", F64), k.constant(0.0, F64, LANES))]

    (total,) = _totals(block, beyond)
    k.store(total, room, 0)
    count = k.constant(0, I64)
    for group in range(0, block, GROUP):
        _fetch(k, values, group)
        bits = k.load(values, F32, group, GROUP).magnitude().compare(">", threshold)
        count = count + _store_bits(k, bits, fars, group).ones()
    k.store(count.convert("sitofp", F64), room, 1)
    k.finish()
    return k


def _totals(block: int, leaf: Callable[[int], list[Value]]) -> list[Value]:
    """Add up a block's elements in halves: element i and i + block / 2, then i + block / 4, ...; scalars.

    ``leaf`` returns a vector of elements, or several that are added up beside each other.
    """

    def folded(vectors: int, v: int) -> list[Value]:
        """Vector ``v`` of those that are left when so many are."""
        if vectors == block // LANES:
            return leaf(v)
        halves = folded(2 * vectors, v), folded(2 * vectors, v + vectors)
        return [one + other for one, other in zip(*halves, strict=True)]

    return [total.reduce(lambda one, other: one + other) for total in folded(1, 0)]


def _fetch(k: Kernel, values: Value, group: int) -> None:
    """Prefetch the float32 some way after a group."""
    from lsgd.kernels.cpu.ir import F32

    for line in range(group, group + GROUP, LINE):
        k.prefetch(k.offset(values, F32, AHEAD + line))


def _store_bits(k: Kernel, truths: Value, base: Value, element: int) -> Value:
    """Store 64 truth values as the bits of the elements from ``element`` on, and return them as one word."""
    from lsgd.kernels.cpu.ir import I8, I64

    word = truths.convert("bitcast", I64, 1)
    k.store(word.convert("bitcast", I8, 8), base, element // 8)
    return word


def _load_bits(k: Kernel, array: str, byte: Value) -> Value:
    """Return 64 truth values from the bits at a byte of an array."""
    from llvmlite import ir

    from lsgd.kernels.cpu.ir import I8, I64

    word = k.load(_array(k, array, byte), I8, 0, 8).convert("bitcast", I64, 1)
    return word.convert("bitcast", ir.IntType(1), GROUP)


def _decode(k: Kernel, number: Value, levels: Levels, block: int, *, add: bool) -> None:
    """Emit the code for block ``number``."""
    from lsgd.kernels.cpu.ir import F32, I16, I32

    out = _array(k, "values", number * (4 * block))
    bits = k.load(_array(k, "scales", number * 2), I16).convert("zext", I32) << 16
    scale = bits.convert("bitcast", F32)
    near, far = ((scale * level).splat(GROUP) for level in (levels.near, levels.far))
    for group in range(0, block, GROUP):
        byte = number * (block // 8) + group // 8
        value = near if levels.threshold is None else _load_bits(k, "fars", byte).where(far, near)
        value = _load_bits(k, "signs", byte).where(value * -1.0, value)
        if add:
            _fetch(k, out, group)
            value = k.load(out, F32, group, GROUP) + value * _field(k, "alpha")
        k.store(value, out, group)
