"""The jobs of the CPU path's threads: each is a row of 64-bit words that says what to read and what to write.

The threads of a job, however many, take its items off ``counter`` until none is left. An item is processed in tiles of
at most ``TILE`` elements, small enough to stay in the L1 cache between the pass that finds a block's range and the pass
that writes its codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

from llvmlite import ir

from lsgd.kernels.cpu.ir import F32, I8, I16, I32, I64, POINTER, Kernel, Value, Variable, entry_point
from lsgd.kernels.cpu.tiles import COMBINE, FLOAT32, WIDTH, Tiles
from lsgd.kernels.philox import LANES
from lsgd.kernels.reference import BIG, SMALLEST_UNIT

TILE: Final = 2048
PAYLOADS: Final = 3  # the source that is not FLOAT32, FLOAT16 or BFLOAT16
STATE_FLOATS: Final = 4  # lo, hi, NaN if not finite, nothing
MAX_SEGMENTS: Final = 256


class Job(ctypes.Structure):
    """What one kernel launch works on; every field takes eight bytes, pointers are addresses."""

    _fields_ = (
        ("counter", ctypes.c_int64),  # next item, taken by atomic addition
        ("items", ctypes.c_int64),
        ("grain", ctypes.c_int64),  # blocks or elements per item
        ("source", ctypes.c_int64),  # SOURCE_...
        ("values", ctypes.c_int64),  # the vector, for the three floating-point sources
        ("stride", ctypes.c_int64),  # bytes of one of its elements
        ("members", ctypes.c_int64),  # number of payloads
        ("payloads", ctypes.c_int64),  # array of their addresses
        ("payload_block", ctypes.c_int64),  # elements per block of the payloads
        ("payload_codes", ctypes.c_int64),  # offset of their codes
        ("weight", ctypes.c_double),  # of the sum of the payloads
        ("numel", ctypes.c_int64),
        ("block", ctypes.c_int64),  # elements per block of what is written
        ("blocks", ctypes.c_int64),
        ("first", ctypes.c_int64),  # the elements of one big block
        ("stop", ctypes.c_int64),
        ("partials", ctypes.c_int64),  # STATE_FLOATS for each segment of the big block
        ("scales", ctypes.c_int64),
        ("codes", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("stochastic", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("out", ctypes.c_int64),  # decoding: where to, as what (SOURCE_...), set or add
        ("out_kind", ctypes.c_int64),
        ("add", ctypes.c_int64),
        ("alpha", ctypes.c_double),
        ("stream", ctypes.c_int64),  # bypass the caches
    )


class _JobView:
    """Reads the fields of the job in a kernel."""

    def __init__(self, kernel: Kernel, pointer: Value) -> None:
        self._kernel, self._pointer = kernel, pointer

    def __getattr__(self, name: str) -> Value:
        return self._kernel.load(self._pointer, I64, getattr(Job, name).offset // 8)

    def real(self, name: str) -> Value:
        """Return a floating-point field, as float32."""
        offset = getattr(Job, name).offset // 8
        return self._kernel.load(self._pointer, ir.DoubleType(), offset).convert("fptrunc", F32)

    def address(self, name: str) -> Value:
        """Return a field that holds a pointer."""
        return getattr(self, name).convert("inttoptr", POINTER)  # type: ignore[no-any-return]


class Jobs:
    """The job kernels of one LLVM module."""

    def __init__(self, *, mxcsr: bool) -> None:
        self.module = ir.Module(name="lsgd")
        self.tiles = Tiles(self.module)
        self.decode_range = self._decode_range()
        self.fill = self._fill()
        self.close_block = self._close_block()
        self.encode_tile = self._encode_tile()
        bodies = {
            "blocks": self._blocks(),
            "partial": self._partial(),
            "finish": self._finish(),
            "decode": self._decode_items(),
            "reduce": self._reduce_items(),
        }
        for name, body in bodies.items():
            entry_point(self.module, name, body, mxcsr=mxcsr)

    # ---- on one block ----------------------------------------------------------------------------------------

    def _decode_range(self) -> Kernel:
        """(job, payload, start, n, out, add, alpha): decode the elements start to start + n of a payload."""
        k = Kernel(self.module, "decode_range", [POINTER, POINTER, I64, I64, POINTER, I64, F32])
        pointer, payload, start, n, out, add, alpha = k.arguments
        job = _JobView(k, pointer)
        block, stream, stop = job.payload_block, job.stream, start + n
        codes = k.offset(payload, I8, job.payload_codes)
        place = Variable(start)
        with k.repeat() as leave_unless:
            leave_unless(place.get().compare("<", stop))
            here = place.get()
            number = here / block
            end = ((number + 1) * block).minimum(stop)
            scale = k.offset(payload, F32, number * 2 + 8)  # behind the header's eight words
            arguments = (
                k.offset(codes, I8, here),
                end - here,
                k.load(scale, F32, 0),
                k.load(scale, F32, 1),
                k.offset(out, F32, here - start),
                alpha,
                stream,
            )
            with k.either(add.compare("!=", 0)) as (then, otherwise):
                with then:
                    k.call(self.tiles.decode_add, *arguments)
                with otherwise:
                    k.call(self.tiles.decode_set, *arguments)
            place.set(end)
        k.finish()
        return k

    def _fill(self) -> Kernel:
        """(job, start, n, scratch, slot): store in slot where the source's n elements lie as float32."""
        k = Kernel(self.module, "fill", [POINTER, I64, I64, POINTER, POINTER])
        pointer, start, n, scratch, slot = k.arguments
        job = _JobView(k, pointer)
        source = job.source
        k.store(scratch, slot)
        with k.branch(source.compare("==", FLOAT32)):
            k.store(k.offset(job.address("values"), F32, start), slot)
        for kind, widen in self.tiles.widen.items():
            with k.branch(source.compare("==", kind)):
                k.call(widen, k.offset(job.address("values"), I16, start), n, scratch)
        with k.branch(source.compare("==", PAYLOADS)):
            weight, one = job.real("weight"), k.constant(1.0, F32)
            with k.loop(0, job.members) as member:
                payload = k.load(job.address("payloads"), POINTER, member)
                k.call(self.decode_range, pointer, payload, start, n, scratch, member, one)
            with k.branch(weight.compare("!=", 1.0)):
                k.call(self.tiles.scale, scratch, n, weight)
        k.finish()
        return k

    def _close_block(self) -> Kernel:
        """(job, state, block, constants): from a block's range, its scales, its flag and the encoder's constants."""
        k = Kernel(self.module, "close_block", [POINTER, POINTER, I64, POINTER])
        pointer, state, number, constants = k.arguments
        job = _JobView(k, pointer)
        lo, hi = (k.load(state, F32, i) + 0.0 for i in (0, 1))
        bad = k.load(state, F32, 2)
        finite = bad.compare("==", bad)
        big = lo.magnitude().maximum(hi.magnitude()).compare(">=", BIG)
        factor = big.where(0.5, k.constant(1.0, F32))
        unit = (hi * factor - lo * factor) / 255.0
        usable = unit.compare(">=", SMALLEST_UNIT)
        zero = k.constant(0.0, F32)
        scales = k.offset(job.address("scales"), F32, number * 2)
        k.store(finite.where(lo, k.constant(float("nan"), F32)), scales, 0)
        k.store(finite.where(usable.where(unit / factor, zero), zero), scales, 1)
        for i, value in enumerate((lo * factor, usable.where(k.constant(1.0, F32) / unit, zero), factor, bad)):
            k.store(value, constants, i)
        with k.either(finite) as (then, otherwise):
            with then:
                pass
            with otherwise:
                k.store(k.constant(1, I32), job.address("flags"))
        k.finish()
        return k

    def _encode_tile(self) -> Kernel:
        """(job, values, start, n, constants, dither): write the codes of a tile; dither is room for its bits."""
        k = Kernel(self.module, "encode_tile", [POINTER, POINTER, I64, I64, POINTER, POINTER])
        pointer, values, start, n, constants, room = k.arguments
        job = _JobView(k, pointer)
        codes = k.offset(job.address("codes"), I8, start)
        stride = job.stride
        origin = k.offset(job.address("values"), I8, start * stride)
        bad = k.load(constants, F32, 3)
        with k.either(bad.compare("==", bad)) as (then, otherwise):
            with then, k.either(job.stochastic.compare("!=", 0)) as (then, otherwise_nearest):
                with then:
                    skipped = start & (LANES - 1)
                    k.call(self.tiles.dither, room, start >> 3, (skipped + n + (WIDTH - 1)) >> 6, job.seed)
                    lanes = k.offset(room, I16, skipped)
                    k.call(self.tiles.encode_stochastic, values, n, constants, codes, lanes, origin, stride)
                with otherwise_nearest:
                    k.call(self.tiles.encode_nearest, values, n, constants, codes, room, origin, stride)
            with otherwise:
                k.call(self.tiles.zero, codes, n)
        k.finish()
        return k

    # ---- on the items of a job -------------------------------------------------------------------------------

    def _items(self, name: str, body: Callable[[Kernel, _JobView, Value], None]) -> Kernel:
        """(job): take items until none is left."""
        k = Kernel(self.module, name, [POINTER])
        job = _JobView(k, k.arguments[0])
        with k.items(job.items) as item:
            body(k, job, item)
        k.finish()
        return k

    def _rooms(self, k: Kernel) -> tuple[Value, Value, Value, Value, Value]:
        """Return stack room: a tile, its dither, the pointer to the tile, a block's state, its constants."""
        return (
            k.stack(F32, TILE),
            k.stack(I16, TILE + 2 * WIDTH),
            k.stack(POINTER, 1),
            k.stack(F32, STATE_FLOATS),
            k.stack(F32, STATE_FLOATS),
        )

    def _clear(self, k: Kernel, state: Value) -> None:
        for i, number in enumerate((float("inf"), float("-inf"), 0.0)):
            k.store(k.constant(number, F32), state, i)

    def _range_of(self, k: Kernel, start: Value, stop: Value, rooms: tuple[Value, ...]) -> None:
        """Emit the pass that takes the elements start to stop into the state."""
        tile, _, slot, state, _ = rooms
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            k.call(self.fill, k.arguments[0], place, n, tile, slot)
            k.call(self.tiles.minmax, k.load(slot, POINTER), n, state)

    def _codes_of(self, k: Kernel, start: Value, stop: Value, rooms: tuple[Value, ...], refill: Value) -> None:
        """Emit the pass that writes the codes of the elements start to stop."""
        tile, room, slot, _, constants = rooms
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            with k.branch(refill):
                k.call(self.fill, k.arguments[0], place, n, tile, slot)
            k.call(self.encode_tile, k.arguments[0], k.load(slot, POINTER), place, n, constants, room)

    def _blocks(self) -> Kernel:
        """Items of ``grain`` whole blocks."""

        def body(k: Kernel, job: _JobView, item: Value) -> None:
            rooms = self._rooms(k)
            first = item * job.grain
            with k.loop(first, (first + job.grain).minimum(job.blocks)) as number:
                start = number * job.block
                stop = (start + job.block).minimum(job.numel)
                self._clear(k, rooms[3])
                self._range_of(k, start, stop, rooms)
                k.call(self.close_block, k.arguments[0], rooms[3], number, rooms[4])
                self._codes_of(k, start, stop, rooms, (stop - start).compare(">", TILE))

        return self._items("blocks_items", body)

    def _segment(self, job: _JobView, item: Value) -> tuple[Value, Value]:
        start = job.first + item * job.grain
        return start, (start + job.grain).minimum(job.stop)

    def _partial(self) -> Kernel:
        """Items of ``grain`` elements of one big block: the range of each."""

        def body(k: Kernel, job: _JobView, item: Value) -> None:
            rooms = self._rooms(k)
            self._clear(k, rooms[3])
            self._range_of(k, *self._segment(job, item), rooms)
            for i in range(3):
                k.store(k.load(rooms[3], F32, i), job.address("partials"), item * STATE_FLOATS + i)

        return self._items("partial_items", body)

    def _finish(self) -> Kernel:
        """Items of ``grain`` elements of one big block: all ranges together, then the codes of each."""

        def body(k: Kernel, job: _JobView, item: Value) -> None:
            rooms = self._rooms(k)
            state = rooms[3]
            self._clear(k, state)
            with k.loop(0, job.items) as segment:
                for i, combine in enumerate(COMBINE):
                    partial = k.load(job.address("partials"), F32, segment * STATE_FLOATS + i)
                    k.store(combine(partial, k.load(state, F32, i)), state, i)
            k.call(self.close_block, k.arguments[0], state, job.first / job.block, rooms[4])
            always = job.items.compare(">", 0)
            self._codes_of(k, *self._segment(job, item), rooms, always)

        return self._items("finish_items", body)

    def _decode_items(self) -> Kernel:
        """Items of ``grain`` elements to decode into ``out``."""

        def body(k: Kernel, job: _JobView, item: Value) -> None:
            pointer, tile = k.arguments[0], self._rooms(k)[0]
            start = item * job.grain
            stop = (start + job.grain).minimum(job.numel)
            payload, alpha = k.load(job.address("payloads"), POINTER), job.real("alpha")
            with k.branch(job.out_kind.compare("==", FLOAT32)):
                out = k.offset(job.address("out"), F32, start)
                k.call(self.decode_range, pointer, payload, start, stop - start, out, job.add, alpha)
            for kind, narrow in self.tiles.narrow.items():
                with k.branch(job.out_kind.compare("==", kind)), k.loop(start, stop, TILE) as place:
                    n = (stop - place).minimum(TILE)
                    out = k.offset(job.address("out"), I16, place)
                    with k.branch(job.add.compare("!=", 0)):
                        k.call(self.tiles.widen[kind], out, n, tile)
                    k.call(self.decode_range, pointer, payload, place, n, tile, job.add, alpha)
                    k.call(narrow, tile, n, out)

        return self._items("decode_items", body)

    def _reduce_items(self) -> Kernel:
        """Items of ``grain`` elements of the weighted sum of the payloads, to float32 ``out``."""

        def body(k: Kernel, job: _JobView, item: Value) -> None:
            slot = k.stack(POINTER, 1)
            start = item * job.grain
            with k.loop(start, (start + job.grain).minimum(job.numel), TILE) as place:
                n = (job.numel - place).minimum(TILE)
                k.call(self.fill, k.arguments[0], place, n, k.offset(job.address("out"), F32, place), slot)

        return self._items("reduce_items", body)


def program_text(*, mxcsr: bool) -> str:
    """Return the LLVM assembly of all kernels; ``mxcsr``: the machine is an x86 with that control register."""
    return str(Jobs(mxcsr=mxcsr).module)
