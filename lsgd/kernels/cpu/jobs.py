"""The CPU kernels of minmax8: how they process a job.

They process an item in tiles of at most ``TILE`` elements, small enough to stay in the L1 cache between the pass that
finds a block's range and the pass that writes its codes.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from lsgd.kernels.cpu.ir import F32, I8, I16, I32, I64, POINTER, Kernel, Value, Variable, kernel
from lsgd.kernels.cpu.job import JobView, add_entry
from lsgd.kernels.cpu.tiles import BFLOAT16, COMBINE, FLOAT16, FLOAT32, WIDTH, Tiles
from lsgd.kernels.philox import LANES
from lsgd.kernels.reference import BIG, SMALLEST_UNIT

TILE: Final = 2048
PAYLOADS: Final = 3  # a source besides FLOAT32, FLOAT16 and BFLOAT16
STATE_FLOATS: Final = 4  # lo, hi, NaN if not finite, unused
MAX_SEGMENTS: Final = 256


class Jobs:
    """The job kernels of one LLVM module."""

    def __init__(self) -> None:
        self.module = ir.Module(name="lsgd")
        self.tiles = Tiles(self.module)
        for emit in (self.blocks, self.partial, self.finish, self.decode, self.reduce):
            add_entry(self.module, emit.__name__, emit)

    # ---- on one block ----------------------------------------------------------------------------------------

    @kernel(POINTER, POINTER, I64, I64, POINTER, I64, F32)
    def decode_range(self, k: Kernel, *arguments: Value) -> None:
        """(job, payload, start, n, out, add, alpha): decode elements start to start + n of a payload."""
        _, payload, start, n, out, add, alpha = arguments
        job = JobView(k)
        block, stream, stop = job.payload_block, job.stream, start + n
        codes = k.offset(payload, I8, job.payload_codes)
        place = Variable(start)
        with k.repeat() as leave_unless:
            leave_unless(place.get().compare("<", stop))
            here = place.get()
            number = here / block
            end = ((number + 1) * block).minimum(stop)
            scale = k.offset(payload, F32, number * 2 + 8)  # after the header's eight words
            lo, unit = (k.load(scale, F32, i) for i in (0, 1))
            tile = (k.offset(codes, I8, here), end - here, lo, unit, k.offset(out, F32, here - start), alpha, stream)
            with k.either(add.compare("!=", 0)) as (then, otherwise):
                with then:
                    k.call(self.tiles.decode(add=True), *tile)
                with otherwise:
                    k.call(self.tiles.decode(add=False), *tile)
            place.set(end)

    @kernel(POINTER, I64, I64, POINTER, POINTER)
    def fill(self, k: Kernel, pointer: Value, start: Value, n: Value, scratch: Value, slot: Value) -> None:
        """Read n elements of the source, and store in slot where they are as float32."""
        job = JobView(k)
        source = job.source
        k.store(scratch, slot)
        with k.branch(source.compare("==", FLOAT32)):
            k.store(k.offset(job.address("values"), F32, start), slot)
        for kind in (FLOAT16, BFLOAT16):
            with k.branch(source.compare("==", kind)):
                k.call(self.tiles.widen(kind=kind), k.offset(job.address("values"), I16, start), n, scratch)
        with k.branch(source.compare("==", PAYLOADS)):
            weight, one = job.real("weight"), k.constant(1.0, F32)
            with k.loop(0, job.members) as member:
                payload = k.load(job.address("payloads"), POINTER, member)
                k.call(self.decode_range(), pointer, payload, start, n, scratch, member, one)
            with k.branch(weight.compare("!=", 1.0)):
                k.call(self.tiles.scale(), scratch, n, weight)

    @kernel(POINTER, POINTER, I64, POINTER)
    def close_block(self, k: Kernel, pointer: Value, state: Value, number: Value, constants: Value) -> None:
        """From a block's range, write its scales, the flag and the encoder's constants."""
        job = JobView(k)
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
        with k.branch(~finite):
            k.store(k.constant(1, I32), job.address("flags"))

    @kernel(POINTER, POINTER, I64, I64, POINTER, POINTER)
    def encode_tile(self, k: Kernel, *arguments: Value) -> None:
        """(job, values, start, n, constants, dither): write a tile's codes; dither is memory for random bits."""
        _, values, start, n, constants, room = arguments
        job = JobView(k)
        codes = k.offset(job.address("codes"), I8, start)
        stride = job.stride
        origin = k.offset(job.address("values"), I8, start * stride)
        bad = k.load(constants, F32, 3)
        with k.either(bad.compare("==", bad)) as (then, otherwise):
            with then, k.either(job.stochastic.compare("!=", 0)) as (then, otherwise_nearest):
                with then:
                    skipped = start & (LANES - 1)
                    k.call(self.tiles.dither(), room, start >> 3, (skipped + n + (WIDTH - 1)) >> 6, job.seed)
                    lanes = k.offset(room, I16, skipped)
                    tile = (values, n, constants, codes, lanes, origin, stride)
                    k.call(self.tiles.encode(stochastic=True), *tile)
                with otherwise_nearest:
                    tile = (values, n, constants, codes, room, origin, stride)
                    k.call(self.tiles.encode(stochastic=False), *tile)
            with otherwise:
                k.call(self.tiles.zero(), codes, n)

    # ---- on an item of a job ---------------------------------------------------------------------------------

    def blocks(self, k: Kernel, job: JobView, item: Value) -> None:
        """Encode ``grain`` whole blocks."""
        rooms, first = _Rooms(k), item * job.grain
        with k.loop(first, (first + job.grain).minimum(job.blocks)) as number:
            start = number * job.block
            stop = (start + job.block).minimum(job.numel)
            rooms.clear(k)
            self._range_of(k, start, stop, rooms)
            k.call(self.close_block(), k.arguments[0], rooms.state, number, rooms.constants)
            self._codes_of(k, start, stop, rooms, (stop - start).compare(">", TILE))

    def partial(self, k: Kernel, job: JobView, item: Value) -> None:
        """Find the range of ``grain`` elements of one big block."""
        rooms = _Rooms(k)
        rooms.clear(k)
        self._range_of(k, *_segment(job, item), rooms)
        for i in range(3):
            k.store(k.load(rooms.state, F32, i), job.address("partials"), item * STATE_FLOATS + i)

    def finish(self, k: Kernel, job: JobView, item: Value) -> None:
        """Combine all ranges of one big block, and write the codes of ``grain`` of its elements."""
        rooms = _Rooms(k)
        rooms.clear(k)
        with k.loop(0, job.items) as segment:
            for i, combine in enumerate(COMBINE):
                partial = k.load(job.address("partials"), F32, segment * STATE_FLOATS + i)
                k.store(combine(partial, k.load(rooms.state, F32, i)), rooms.state, i)
        k.call(self.close_block(), k.arguments[0], rooms.state, job.first / job.block, rooms.constants)
        always = job.items.compare(">", 0)
        self._codes_of(k, *_segment(job, item), rooms, always)

    def decode(self, k: Kernel, job: JobView, item: Value) -> None:
        """Decode ``grain`` elements into ``out``."""
        pointer, tile = k.arguments[0], k.stack(F32, TILE)
        start = item * job.grain
        stop = (start + job.grain).minimum(job.numel)
        payload, alpha = k.load(job.address("payloads"), POINTER), job.real("alpha")
        with k.branch(job.out_kind.compare("==", FLOAT32)):
            out = k.offset(job.address("out"), F32, start)
            k.call(self.decode_range(), pointer, payload, start, stop - start, out, job.add, alpha)
        for kind in (FLOAT16, BFLOAT16):
            with k.branch(job.out_kind.compare("==", kind)), k.loop(start, stop, TILE) as place:
                n = (stop - place).minimum(TILE)
                out = k.offset(job.address("out"), I16, place)
                with k.branch(job.add.compare("!=", 0)):
                    k.call(self.tiles.widen(kind=kind), out, n, tile)
                k.call(self.decode_range(), pointer, payload, place, n, tile, job.add, alpha)
                k.call(self.tiles.narrow(kind=kind), tile, n, out)

    def reduce(self, k: Kernel, job: JobView, item: Value) -> None:
        """Write ``grain`` elements of the weighted sum of the payloads to float32 ``out``."""
        slot = k.stack(POINTER, 1)
        start = item * job.grain
        with k.loop(start, (start + job.grain).minimum(job.numel), TILE) as place:
            n = (job.numel - place).minimum(TILE)
            k.call(self.fill(), k.arguments[0], place, n, k.offset(job.address("out"), F32, place), slot)

    def _range_of(self, k: Kernel, start: Value, stop: Value, rooms: _Rooms) -> None:
        """Emit the pass that finds the range of elements start to stop."""
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            k.call(self.fill(), k.arguments[0], place, n, rooms.tile, rooms.slot)
            k.call(self.tiles.minmax(), k.load(rooms.slot, POINTER), n, rooms.state)

    def _codes_of(self, k: Kernel, start: Value, stop: Value, rooms: _Rooms, refill: Value) -> None:
        """Emit the pass that writes the codes of elements start to stop."""
        with k.loop(start, stop, TILE) as place:
            n = (stop - place).minimum(TILE)
            with k.branch(refill):
                k.call(self.fill(), k.arguments[0], place, n, rooms.tile, rooms.slot)
            tile = k.load(rooms.slot, POINTER)
            k.call(self.encode_tile(), k.arguments[0], tile, place, n, rooms.constants, rooms.dither)


class _Rooms:
    """Stack memory for a tile and its random bits, and for its block's range and constants."""

    def __init__(self, k: Kernel) -> None:
        self.tile = k.stack(F32, TILE)
        self.dither = k.stack(I16, TILE + 2 * WIDTH)
        self.slot = k.stack(POINTER, 1)  # where the elements are: in the tile, or in the source
        self.state, self.constants = k.stack(F32, STATE_FLOATS), k.stack(F32, STATE_FLOATS)

    def clear(self, k: Kernel) -> None:
        """Begin a block."""
        for i, number in enumerate((float("inf"), float("-inf"), 0.0)):
            k.store(k.constant(number, F32), self.state, i)


def _segment(job: JobView, item: Value) -> tuple[Value, Value]:
    """Return where an item of a big block begins and ends."""
    start = job.first + item * job.grain
    return start, (start + job.grain).minimum(job.stop)
