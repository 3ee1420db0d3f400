"""A small language for vector kernels: Python operators that emit LLVM instructions through llvmlite.

A :class:`Value` is a number or a vector of numbers in the kernel under construction; ``a * b + c`` on values emits
the instructions. Floating-point operations are emitted plainly, so that LLVM neither fuses nor reorders them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from llvmlite import ir

I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F16: Final = ir.HalfType()
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
POINTER: Final = ir.PointerType()


def vector(element: Any, width: int) -> Any:
    """Return the type of a vector of ``width`` elements; of a scalar for width 1."""
    return element if width == 1 else ir.VectorType(element, width)


def _operator(integer: str, floating: str = "") -> Callable[[Value, Value | float], Value]:
    """Return a method that emits ``integer``, or ``floating`` for floating-point values."""

    def emit(self: Value, other: Value | float) -> Value:
        instruction = getattr(self.kernel.builder, floating if self.element in (F32, F64) else integer)
        return Value(self.kernel, instruction(self.raw, self._operand(other)))

    return emit


class Value:
    """A scalar or a vector in the kernel under construction; Python operands become constants."""

    def __init__(self, kernel: Kernel, raw: Any) -> None:
        self.kernel = kernel
        self.raw = raw

    @property
    def element(self) -> Any:
        """Type of one element."""
        return getattr(self.raw.type, "element", self.raw.type)

    @property
    def width(self) -> int:
        """Elements of the vector; 1 for a scalar."""
        return getattr(self.raw.type, "count", 1)

    def _operand(self, other: Value | float) -> Any:
        if not isinstance(other, Value):
            return self.kernel.constant(other, self.element, self.width).raw
        return other.splat(self.width).raw if other.width != self.width else other.raw

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("udiv", "fdiv")
    __and__ = _operator("and_")
    __or__ = _operator("or_")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")  # zeros from the left

    def compare(self, how: str, other: Value | float) -> Value:
        """Return a truth value per element; integers are signed, and NaN compares false."""
        builder, operand = self.kernel.builder, self._operand(other)
        emit = builder.fcmp_ordered if self.element in (F32, F64) else builder.icmp_signed
        return Value(self.kernel, emit(how, self.raw, operand))

    def __invert__(self) -> Value:
        return Value(self.kernel, self.kernel.builder.not_(self.raw))

    def where(self, yes: Value | float, no: Value) -> Value:
        """Select by each element of this truth value."""
        return Value(self.kernel, self.kernel.builder.select(self.raw, no._operand(yes), no.raw))

    def minimum(self, other: Value | float) -> Value:
        """Return the lesser of each pair; of a NaN and a number, ``other``."""
        right = Value(self.kernel, self._operand(other))
        return self.compare("<", right).where(self, right)

    def maximum(self, other: Value | float) -> Value:
        """Return the greater of each pair; of a NaN and a number, ``other``."""
        right = Value(self.kernel, self._operand(other))
        return self.compare(">", right).where(self, right)

    def clamp(self, least: float, greatest: float) -> Value:
        """Clamp each element to the range."""
        return self.maximum(least).minimum(greatest)

    def splat(self, width: int) -> Value:
        """Repeat a scalar ``width`` times."""
        if width == 1:
            return self
        kernel, lane = self.kernel, ir.Constant(I32, 0)
        one = kernel.builder.insert_element(ir.Constant(vector(self.element, width), ir.Undefined), self.raw, lane)
        return Value(kernel, one).shuffle([0] * width)

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Return the given lanes; those of ``other`` are numbered after this vector's own."""
        second = ir.Constant(self.raw.type, ir.Undefined) if other is None else other.raw
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self.kernel, self.kernel.builder.shuffle_vector(self.raw, second, mask))

    def reduce(self, combine: Callable[[Value, Value], Value]) -> Value:
        """Combine all lanes of a vector of 2**k elements into one scalar, in pairs."""
        value, distance = self, self.width // 2
        while distance:
            value = combine(value, value.shuffle([(i + distance) % self.width for i in range(self.width)]))
            distance //= 2
        return Value(self.kernel, self.kernel.builder.extract_element(value.raw, ir.Constant(I32, 0)))

    def convert(self, how: str, element: Any, width: int | None = None) -> Value:
        """Emit the conversion instruction ``how`` (``zext``, ``trunc``, ``bitcast``, ...); the width is kept."""
        emit = getattr(self.kernel.builder, how)
        return Value(self.kernel, emit(self.raw, vector(element, width or self.width)))

    def rounded(self) -> Value:
        """Round float32 to the nearest int32, half to even."""
        return self._intrinsic("rint", "f32").convert("fptosi", I32)

    def fused_multiply_add(self, factor: Value, summand: float) -> Value:
        """Return float32 self * factor + summand, rounded once."""
        return self._intrinsic("fma", "f32", self._operand(factor), self._operand(summand))

    def square_root(self) -> Value:
        """Return the square root of a float64 scalar."""
        return self._intrinsic("sqrt", "f64")

    def ones(self) -> Value:
        """Return the number of one bits of an int64 scalar."""
        return Value(self.kernel, self.kernel.builder.ctpop(self.raw))

    def trailing_zeros(self) -> Value:
        """Return the number of zero bits below the lowest one bit of an int64 scalar, which is not 0."""
        return Value(self.kernel, self.kernel.builder.cttz(self.raw, ir.Constant(ir.IntType(1), 1)))

    def _intrinsic(self, name: str, element: str, *others: Any) -> Value:
        """Call LLVM's intrinsic of this name on the value and others of its type."""
        kind = self.raw.type
        full = f"llvm.{name}.{element}" if self.width == 1 else f"llvm.{name}.v{self.width}{element}"
        function = self.kernel.declare(full, ir.FunctionType(kind, [kind] * (1 + len(others))))
        return Value(self.kernel, self.kernel.builder.call(function, [self.raw, *others]))

    def magnitude(self) -> Value:
        """Return the absolute value of float32."""
        return (self.convert("bitcast", I32) & 0x7FFFFFFF).convert("bitcast", F32)


class Variable:
    """A mutable value on the stack, which LLVM turns into registers."""

    def __init__(self, initial: Value) -> None:
        self._kernel = initial.kernel
        with self._kernel.builder.goto_entry_block():
            self._slot = self._kernel.builder.alloca(initial.raw.type)
        self._slot.type = POINTER  # llvmlite still types it by what it points to
        self._type = initial.raw.type
        self.set(initial)

    def get(self) -> Value:
        """Return the current value."""
        return Value(self._kernel, self._kernel.builder.load(self._slot, typ=self._type))

    def set(self, value: Value) -> None:
        """Replace the value."""
        self._kernel.builder.store(value.raw, self._slot)


class Kernel:
    """One function under construction in an LLVM module: ``void name(arguments)``."""

    def __init__(self, module: ir.Module, name: str, arguments: Sequence[Any], *, public: bool = False) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        self.function.attributes.add("noinline")
        self.function.attributes.add("nounwind")
        if not public:
            self.function.linkage = "internal"
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def declare(self, name: str, kind: Any) -> Any:
        """Return the function of that name and type, declared at most once in the module."""
        known = self.module.globals.get(name)
        return ir.Function(self.module, kind, name) if known is None else known

    def constant(self, number: float, element: Any, width: int = 1) -> Value:
        """Return a constant, repeated ``width`` times."""
        literal = number if width == 1 else [number] * width
        return Value(self, ir.Constant(vector(element, width), literal))

    def stack(self, element: Any, count: int) -> Value:
        """Return a pointer to memory for ``count`` elements, aligned to 64 bytes, which lives as long as the call."""
        with self.builder.goto_entry_block():
            room = self.builder.alloca(ir.ArrayType(element, count))
        room.align = 64
        room.type = POINTER  # llvmlite still types it by what it points to
        return Value(self, room)

    def offset(self, base: Value, element: Any, index: Value | int) -> Value:
        """Return the pointer to element ``index`` of an array."""
        raw = index.raw if isinstance(index, Value) else ir.Constant(I64, index)
        return Value(self, self.builder.gep(base.raw, [raw], source_etype=element))

    def load(self, base: Value, element: Any, index: Value | int = 0, width: int = 1) -> Value:
        """Load ``width`` elements from element ``index`` on, aligned like one element."""
        pointer = self.offset(base, element, index).raw
        loaded = self.builder.load(pointer, align=_alignment(element), typ=vector(element, width))
        return Value(self, loaded)

    def store(self, value: Value, base: Value, index: Value | int = 0, *, stream: bool = False) -> None:
        """Store a value at element ``index`` of an array; with ``stream`` past the caches, aligned to 64 bytes."""
        pointer = self.offset(base, value.element, index).raw
        instruction = self.builder.store(value.raw, pointer, align=64 if stream else _alignment(value.element))
        if stream:
            instruction.set_metadata("nontemporal", self.module.add_metadata([ir.Constant(I32, 1)]))

    def prefetch(self, pointer: Value) -> None:
        """Prefetch the cache line at an address, which need not be valid."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        read, keep, data = (ir.Constant(I32, number) for number in (0, 3, 1))
        self.builder.call(self.declare("llvm.prefetch.p0", kind), [pointer.raw, read, keep, data])

    def call(self, callee: ir.Function, *arguments: Value) -> None:
        """Call another kernel of the module."""
        self.builder.call(callee, [argument.raw for argument in arguments])

    def branch(self, condition: Value) -> AbstractContextManager[Any]:
        """Run the body only if the condition holds."""
        return self.builder.if_then(condition.raw)  # type: ignore[no-any-return]

    def either(self, condition: Value) -> AbstractContextManager[tuple[Any, Any]]:
        """Run one of two bodies, ``with then: ...`` and ``with otherwise: ...``."""
        return self.builder.if_else(condition.raw)  # type: ignore[no-any-return]

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """Loop over int64 from start while below stop."""
        first = start if isinstance(start, Value) else self.constant(start, I64)
        index = Variable(first)
        with self.repeat() as leave_unless:
            leave_unless(index.get().compare("<", stop))
            yield index.get()
            index.set(index.get() + step)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Loop until the condition passed to the yielded function is false."""
        top = self.builder.append_basic_block()
        done = self.builder.append_basic_block()
        self.builder.branch(top)
        self.builder.position_at_end(top)

        def leave_unless(condition: Value) -> None:
            body = self.builder.append_basic_block()
            self.builder.cbranch(condition.raw, body, done)
            self.builder.position_at_end(body)

        yield leave_unless
        self.builder.branch(top)
        self.builder.position_at_end(done)

    def finish(self) -> None:
        """End the function."""
        self.builder.ret_void()


def kernel(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., ir.Function]]:
    """Turn a method that emits a kernel into one that returns it, emitted into the object's ``module`` on first use.

    The method gets the kernel, the kernel's arguments, which have these types, and any keyword arguments, which tell
    the kernel's variants apart.
    """

    def decorate(emit: Callable[..., None]) -> Callable[..., ir.Function]:
        def emitted(owner: Any, **variant: Any) -> ir.Function:
            name = "_".join([emit.__name__, *map(str, variant.values())])
            if name not in owner.module.globals:
                k = Kernel(owner.module, name, arguments)
                emit(owner, k, *k.arguments, **variant)
                k.finish()
            return owner.module.globals[name]

        return emitted

    return decorate


def bfloat16_bits(x: Value, valid: Value) -> Value:
    """Round float32 to bfloat16, half to even, as int16; NaN where not ``valid``."""
    bits = x.convert("bitcast", I32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return valid.where(rounded, x.kernel.constant(0x7FC0, I32, x.width)).convert("trunc", I16)


def _alignment(element: Any) -> int:
    return {I8: 1, I16: 2, I32: 4, I64: 8, F16: 2, F32: 4, F64: 8}.get(element, 8)
