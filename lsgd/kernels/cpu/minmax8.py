"""Vector kernels for the codec with 8 bits between the least and the greatest element of a block.

They produce the same bytes as :mod:`lsgd.codecs.minmax` in torch, and process blocks of any size in tiles of at most
``TILE`` elements, small enough to stay in the L1 cache between the pass that finds a block's range and the pass that
writes its codes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from lsgd.kernels import Kernels, Sum
from lsgd.kernels.arithmetic import BIG, LANES, LEVELS, SMALLEST_UNIT
from lsgd.kernels.cpu import machine
from lsgd.kernels.cpu.blockwise import ITEM_ELEMENTS, Job, JobView, add_entry, each_block
from lsgd.kernels.cpu.ir import F32, I8, I16, I32, I64, POINTER, Kernel, Value, Variable, kernel
from lsgd.kernels.cpu.tiles import COMBINE, WIDTH, Tiles
from lsgd.payload import FLAGS_OFFSET

TILE: Final = 2048
STATE_FLOATS: Final = 4  # lo, hi, NaN if not finite, unused
MAX_SEGMENTS: Final = 256
BIG_BLOCK: Final = 1 << 18  # above this, threads share a block
STREAM_NBYTES: Final = 8 << 20  # outputs from this size bypass the caches, which they would only flush


class Source(NamedTuple):
    """Where elements are read from; in decoding, what they are written as."""

    stride: int  # bytes of an element; 0: the weighted sum of the vectors in payloads, computed tile by tile
    half: bool = False  # whether elements of two bytes are float16; otherwise they are bfloat16


PAYLOADS: Final = Source(0)
SOURCES: Final = {torch.float32: Source(4), torch.float16: Source(2, half=True), torch.bfloat16: Source(2)}


class Program(Tiles):
    """The kernels of one LLVM module, which read one kind of source."""

    def __init__(self, source: Source) -> None:
        super().__init__(ir.Module(name="lsgd"))
        self.source = source

    # ---- reading ---------------------------------------------------------------------------------------------

    @kernel(POINTER, POINTER, POINTER, I64, I64, POINTER, F32)
    def decode_range(self, k: Kernel, *arguments: Value, add: bool, stream: bool) -> None:
        """(job, scales, codes, start, n, out, alpha): decode elements start to start + n of a payload."""
        _, scales, codes, start, n, out, alpha = arguments
        block, stop, place = JobView(k).block, start + n, Variable(start)
        with k.repeat() as leave_unless:
            leave_unless(place.get().compare("<", stop))
            here = place.get()
            number = here / block
            end = ((number + 1) * block).minimum(stop)
            lo, unit = (k.load(scales, F32, number * 2 + i) for i in (0, 1))
            tile = (k.offset(codes, I8, here), end - here, lo, unit, k.offset(out, F32, here - start), alpha)
            k.call(self.decode(add=add, stream=stream), *tile)
            place.set(end)

    @kernel(POINTER, I64, I64, POINTER)
    def total(self, k: Kernel, pointer: Value, start: Value, n: Value, out: Value) -> None:
        """Write alpha times the sum of the payloads' elements start to start + n."""
        job = JobView(k)
        alpha, one = job.real("alpha"), k.constant(1.0, F32)
        with k.loop(0, job.members) as member:
            payload = job.address("payloads", member * 16)
            scales, codes = (k.load(payload, POINTER, i) for i in (0, 1))
            tile = (pointer, scales, codes, start, n, out)
            with k.either(member.compare("==", 0)) as (then, otherwise):
                with then:
                    k.call(self.decode_range(add=False, stream=False), *tile, one)
                with otherwise:
                    k.call(self.decode_range(add=True, stream=False), *tile, one)
        with k.branch(alpha.compare("!=", 1.0)):
            k.call(self.scale(), out, n, alpha)

    def _origin(self, k: Kernel, job: JobView, start: Value) -> Value:
        """Return the address of an element of the source."""
        return job.address("values", start * self.source.stride)

    def _fill(self, k: Kernel, job: JobView, start: Value, n: Value, room: Value) -> None:
        """Emit the reading of n elements into a tile, unless they are used where they are."""
        if self.source == PAYLOADS:
            k.call(self.total(), k.arguments[0], start, n, room)
        elif self.source.stride == 2:
            k.call(self.widen(half=self.source.half), self._origin(k, job, start), n, room)

    def _tile(self, k: Kernel, job: JobView, start: Value, room: Value) -> Value:
        """Return where a tile's elements are as float32."""
        return self._origin(k, job, start) if self.source.stride == 4 else room

    # ---- encoding --------------------------------------------------------------------------------------------

    def emit_encode(self, k: Kernel, job: JobView, number: Value, *, stochastic: bool) -> None:
        """Encode a whole block."""
        rooms, start = _Rooms(k), number * job.block
        stop = (start + job.block).minimum(job.stop)
        rooms.clear(k)
        self._range_of(k, job, start, stop, rooms)
        k.call(self.close_block(), k.arguments[0], rooms.state, number, rooms.constants)
        self._codes_of(k, job, start, stop, rooms, stochastic, refill=(stop - start).compare(">", TILE))

    def emit_partial(self, k: Kernel, job: JobView, item: Value) -> None:
        """Find the range of ``grain`` elements of one big block."""
        rooms = _Rooms(k)
        rooms.clear(k)
        self._range_of(k, job, *job.span(item), rooms)
        for i in range(3):
            k.store(k.load(rooms.state, F32, i), job.address("partials"), item * STATE_FLOATS + i)

    def emit_finish(self, k: Kernel, job: JobView, item: Value, *, stochastic: bool) -> None:
        """Combine all ranges of one big block, and write the codes of ``grain`` of its elements."""
        rooms = _Rooms(k)
        rooms.clear(k)
        with k.loop(0, job.items) as segment:
            for i, combine in enumerate(COMBINE):
                partial = k.load(job.address("partials"), F32, segment * STATE_FLOATS + i)
                k.store(combine(partial, k.load(rooms.state, F32, i)), rooms.state, i)
        k.call(self.close_block(), k.arguments[0], rooms.state, job.first / job.block, rooms.constants)
        self._codes_of(k, job, *job.span(item), rooms, stochastic, refill=job.items.compare(">", 0))

    def _range_of(self, k: Kernel, job: JobView, start: Value, stop: Value, rooms: _Rooms) -> None:
        """Emit the pass that finds the range of elements start to stop."""
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            self._fill(k, job, place, n, rooms.tile)
            k.call(self.minmax(), self._tile(k, job, place, rooms.tile), n, rooms.state)

    def _codes_of(
        self, k: Kernel, job: JobView, start: Value, stop: Value, rooms: _Rooms, stochastic: bool, *, refill: Value
    ) -> None:
        """Emit the pass that writes the codes of elements start to stop; ``refill``: the tile has others."""
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            with k.branch(refill):
                self._fill(k, job, place, n, rooms.tile)
            tile = self._tile(k, job, place, rooms.tile)
            k.call(self.encode_tile(stochastic=stochastic), k.arguments[0], tile, place, n, rooms.constants, rooms.bits)

    @kernel(POINTER, POINTER, I64, POINTER)
    def close_block(self, k: Kernel, pointer: Value, state: Value, number: Value, constants: Value) -> None:
        """From a block's range, write its scales, the flag and the encoder's constants."""
        job = JobView(k)
        lo, hi = (k.load(state, F32, i) + 0.0 for i in (0, 1))
        bad = k.load(state, F32, 2)
        finite = bad.compare("==", bad)
        big = lo.magnitude().maximum(hi.magnitude()).compare(">=", BIG)
        factor = big.where(0.5, k.constant(1.0, F32))
        unit = (hi * factor - lo * factor) / float(LEVELS)
        usable = unit.compare(">=", SMALLEST_UNIT)
        zero = k.constant(0.0, F32)
        scales = job.address("scales", number * 8)
        k.store(finite.where(lo, k.constant(float("nan"), F32)), scales, 0)
        k.store(finite.where(usable.where(unit / factor, zero), zero), scales, 1)
        for i, value in enumerate((lo * factor, usable.where(k.constant(1.0, F32) / unit, zero), factor, bad)):
            k.store(value, constants, i)
        with k.branch(~finite):
            k.store(k.constant(1, I32), job.address("flags"))

    @kernel(POINTER, POINTER, I64, I64, POINTER, POINTER)
    def encode_tile(self, k: Kernel, *arguments: Value, stochastic: bool) -> None:
        """(job, values, start, n, constants, room): write a tile's codes; room is memory for random bits."""
        _, values, start, n, constants, room = arguments
        job = JobView(k)
        codes, bits = job.address("codes", start), room
        bad = k.load(constants, F32, 3)
        with k.either(bad.compare("==", bad)) as (then, otherwise):
            with then:
                if stochastic:
                    skipped = start & (LANES - 1)
                    k.call(self.dither(), room, start >> 3, (skipped + n + (WIDTH - 1)) >> 6, job.seed)
                    bits = k.offset(room, I16, skipped)
                encode = self.encode(stochastic=stochastic, stride=self.source.stride)
                k.call(encode, values, n, constants, codes, bits, self._origin(k, job, start))
            with otherwise:
                k.call(self.zero(), codes, n)

    # ---- decoding --------------------------------------------------------------------------------------------

    def emit_decode(self, k: Kernel, job: JobView, item: Value, *, add: bool, stream: bool) -> None:
        """Write, or add, ``grain`` elements of one payload."""
        start, stop = job.span(item)
        decode, alpha = self.decode_range(add=add, stream=stream), job.real("alpha")
        payload = job.address("scales"), job.address("codes")
        if self.source.stride == 4:
            k.call(decode, k.arguments[0], *payload, start, stop - start, self._origin(k, job, start), alpha)
            return
        room, half = k.stack(F32, TILE), self.source.half
        with k.loop(start, stop, TILE) as place:
            n, out = (stop - place).minimum(TILE), self._origin(k, job, place)
            if add:
                k.call(self.widen(half=half), out, n, room)
            k.call(decode, k.arguments[0], *payload, place, n, room, alpha)
            k.call(self.narrow(half=half), room, n, out)

    def emit_reduce(self, k: Kernel, job: JobView, item: Value) -> None:
        """Write the total of ``grain`` elements."""
        start, stop = job.span(item)
        with k.loop(start, stop, TILE) as place:
            k.call(self.total(), k.arguments[0], place, (stop - place).minimum(TILE), self._origin(k, job, place))


class _Rooms:
    """Stack memory for a tile and its random bits, and for its block's range and constants."""

    def __init__(self, k: Kernel) -> None:
        self.tile = k.stack(F32, TILE)
        self.bits = k.stack(I16, TILE + 2 * WIDTH)
        self.state, self.constants = k.stack(F32, STATE_FLOATS), k.stack(F32, STATE_FLOATS)

    def clear(self, k: Kernel) -> None:
        """Begin a block."""
        for i, number in enumerate((float("inf"), float("-inf"), 0.0)):
            k.store(k.constant(number, F32), self.state, i)


@functools.cache
def _entry(target: tuple[str, str], source: Source, name: str, **variant: bool) -> int:
    """Return the address of a kernel, compiled at the first call, in a module of its own."""
    program = Program(source)
    emit = functools.partial(getattr(program, f"emit_{name}"), **variant)
    add_entry(program.module, name, each_block(emit) if name == "encode" else emit)
    return machine.compiled(str(program.module), *target)(name)


class MinMax8Kernels(Kernels):
    """The kernels for one block size (0: the vector); those for a dtype and a rounding are compiled at their first use.

    ``cpu`` is LLVM's name of the processor to compile for (``haswell``: AVX2 without AVX-512); by default the host's.
    """

    narrow: ClassVar[bool] = True
    reduces: ClassVar[bool] = True

    def __init__(self, block: int, cpu: str | None = None) -> None:
        self._block = block
        self._target = machine.usable_host() if cpu is None else (cpu, "")

    def encode(self, x: Tensor, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of ``x``."""
        self._encode(Job(values=x.data_ptr()), SOURCES[x.dtype], x.numel(), header, parts, seed)

    def decode(self, parts: Sequence[Tensor], out: Tensor, alpha: float | None = None) -> None:
        """Write the vector to ``out``, or add ``alpha`` times it."""
        add, job = alpha is not None, Job(alpha=alpha or 0.0)
        job.scales, job.codes = (part.data_ptr() for part in parts)
        large = out.dtype == torch.float32 and 4 * out.numel() >= STREAM_NBYTES
        # Stores that bypass the caches need 64-byte alignment, in every block.
        stream = large and not add and out.data_ptr() % 64 == 0 and self._block % 16 == 0
        self._write("decode", job, out, add=add, stream=stream)

    def reduce(self, total: Sum, out: Tensor) -> None:
        """Write the sum to ``out``."""
        self._write("reduce", _reading(total), out)

    def reduce_encode(self, total: Sum, header: Tensor, parts: Sequence[Tensor], seed: int | None = None) -> None:
        """Write the parts of the sum."""
        self._encode(_reading(total), PAYLOADS, total.numel, header, parts, seed)

    def _encode(
        self, job: Job, source: Source, numel: int, header: Tensor, parts: Sequence[Tensor], seed: int | None
    ) -> None:
        block = job.block = self._block or numel
        job.blocks, job.stop = -(-numel // block), numel
        job.scales, job.codes = (part.data_ptr() for part in parts)
        job.flags, job.seed = header.data_ptr() + FLAGS_OFFSET, seed or 0
        stochastic = seed is not None
        if block > BIG_BLOCK:
            self._encode_big_blocks(job, source, numel, stochastic)
            return
        job.grain = max(1, ITEM_ELEMENTS // block)
        job.items = -(-job.blocks // job.grain)
        job.run(_entry(self._target, source, "encode", stochastic=stochastic), numel)

    def _encode_big_blocks(self, job: Job, source: Source, numel: int, stochastic: bool) -> None:
        partials = (ctypes.c_float * (MAX_SEGMENTS * STATE_FLOATS))()
        job.partials = ctypes.addressof(partials)
        find = _entry(self._target, source, "partial")
        write = _entry(self._target, source, "finish", stochastic=stochastic)
        for first in range(0, numel, job.block):
            job.first, job.stop = first, min(first + job.block, numel)
            here = job.stop - job.first
            grain = max(ITEM_ELEMENTS, -(-here // MAX_SEGMENTS))
            job.grain = -(-grain // TILE) * TILE
            job.items = -(-here // job.grain)
            for entry in (find, write):
                job.counter = 0
                job.run(entry, here)

    def _write(self, name: str, job: Job, out: Tensor, **variant: bool) -> None:
        numel = out.numel()
        job.values, job.stop, job.block = out.data_ptr(), numel, self._block or numel
        job.grain, job.items = ITEM_ELEMENTS, -(-numel // ITEM_ELEMENTS)
        job.run(_entry(self._target, SOURCES[out.dtype], name, **variant), numel)


def _reading(total: Sum) -> Job:
    """Return a job that reads payloads."""
    addresses = [payload.data_ptr() + place for payload in total.payloads for place in total.places]
    array = (ctypes.c_int64 * len(addresses))(*addresses)
    job = Job(payloads=ctypes.addressof(array), members=len(total.payloads), alpha=total.weight)
    job.kept_alive = array
    return job
