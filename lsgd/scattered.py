"""A flat vector whose elements lie in several tensors, such as a model's parameters, which stay where they are.

To algorithms it is a tensor: what reads it reads the parameters, and what writes it writes them. What rounds and steps
do with it takes one pass over the parameters and no memory. Anything else works on a copy, and writes that back.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree

from lsgd.errors import LsgdError

aten = torch.ops.aten


@dataclass(frozen=True)
class Span:
    """A range of a vector's elements.

    Args:
        held: returns the tensor that has them. It may be another one at each call, on any device and with any strides.
        shape: its shape.
        stride: strides of a tensor of this shape in which the elements are in the vector's order.
    """

    held: Callable[[], Tensor]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    def ordered(self, row: Tensor) -> Tensor:
        """Return a row of this place's elements in its shape."""
        return row.as_strided(self.shape, self.stride)


class Lent(NamedTuple):
    """What an operation gets of a vector's range: for each place in it a row of elements, if possible its own memory.

    Args:
        sizes: of the rows.
        rows: the elements. Of a place with other strides they are the tensor itself.
        held: the tensors at the places.
        shaped: the places of such tensors, by the index of the row.
        copies: copies of tensors of which rows are parts, to be put back: by the index, with the place.
    """

    sizes: list[int]
    rows: list[Tensor]
    held: list[Tensor]
    shaped: dict[int, Span]
    copies: dict[int, tuple[Span, Tensor]]

    def beside(self, other: Tensor) -> list[Tensor]:
        """Return the same parts of another row, in the same shapes."""
        rows = list(torch.split(other, self.sizes))
        for index, place in self.shaped.items():
            rows[index] = place.ordered(rows[index])
        return rows

    def written(self) -> None:
        """Put back changed copies, and count the change: below autograd, nobody else does."""
        for index, (place, copy) in self.copies.items():
            self.held[index].copy_(place.ordered(copy))
        increment_version(self.held)


class Memory:
    """The places of a whole vector, in order.

    Args:
        dtype: of the vector; places may have others.
        device: where an operation takes place, and what it makes.
    """

    def __init__(self, places: Sequence[Span], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._places = [place for place in places if place.numel]
        self._starts = [0, *accumulate(place.numel for place in self._places)]

    def vector(self) -> Scattered:
        """Return the whole vector."""
        return Scattered(self, 0, self._starts[-1])

    def lend(self, start: int, stop: int, *, alike: bool) -> Lent:
        """Return the elements from ``start`` to ``stop``; ``alike``: in the vector's dtype, and on its device."""
        lent, dtype, device = Lent([], [], [], {}, {}), self.dtype, self.device
        for index in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            place, begin = self._places[index], self._starts[index]
            first, last = max(start - begin, 0), min(stop - begin, place.numel)
            held = place.held()
            lent.held.append(held)
            lent.sizes.append(last - first)
            usable = not alike or (held.dtype is dtype and held.device == device)
            if usable and held.stride() == place.stride:
                lent.rows.append(held.as_strided((last - first,), (1,), held.storage_offset() + first))
            elif usable and last - first == place.numel:
                lent.shaped[len(lent.rows)] = place
                lent.rows.append(held)
            else:
                copy = torch.empty(place.numel, dtype=dtype, device=device)
                place.ordered(copy).copy_(held)
                lent.copies[len(lent.rows)] = place, copy
                lent.rows.append(copy[first:last])
        return lent


class Scattered(Tensor):
    """A part of a vector in :class:`Memory`, one-dimensional."""

    memory: Memory
    start: int
    stop: int

    @staticmethod
    def __new__(cls, memory: Memory, start: int, stop: int) -> Scattered:
        """Return the elements from ``start`` to ``stop``."""
        made = Tensor._make_wrapper_subclass(cls, (stop - start,), dtype=memory.dtype, device=memory.device)
        made.memory, made.start, made.stop = memory, start, stop
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scattered({self.stop - self.start} elements, {self.memory.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out an operation of torch."""
        kwargs = kwargs or {}
        own = OPERATIONS.get(func)
        result = NotImplemented if own is None else own(*args, **kwargs)
        return _on_copies(func, args, kwargs) if result is NotImplemented else result

    def part(self, start: int, stop: int) -> Scattered:
        """Return a part of this one."""
        return Scattered(self.memory, self.start + start, self.start + stop)

    def each(self, call: Callable[..., object], *others: Tensor, writes: bool = False, alike: bool = True) -> Any:
        """Call something with the list of the parts, and one of the same parts of each other row; return its result."""
        lent = self.memory.lend(self.start, self.stop, alike=alike)
        if not lent.rows:
            return None
        result = call(lent.rows, *(lent.beside(other) for other in others))
        if writes:
            lent.written()
        return result

    def gathered(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Return a copy: a plain tensor."""
        copy = torch.empty(self.stop - self.start, dtype=dtype or self.dtype, device=device or self.device)
        _copy(copy, self)
        return copy


def in_rows(x: Tensor, *others: Tensor, writes: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of a vector beside the same parts of rows, so that one is in the cache for several operations.

    On a GPU, where each operation costs a call, and of a plain tensor, the whole is one part. With ``writes`` the parts
    of ``x`` may be changed, and are in its dtype and on its device.
    """
    if not isinstance(x, Scattered) or x.device.type != "cpu":
        yield (x, *others)
        return
    lent = x.memory.lend(x.start, x.stop, alike=writes)
    yield from zip(lent.rows, *map(lent.beside, others), strict=True)
    if writes and lent.rows:
        lent.written()


def _is_row(x: Any, vector: Scattered) -> bool:
    """Whether ``x`` is a plain row of as many elements."""
    return isinstance(x, Tensor) and not isinstance(x, Scattered) and x.shape == vector.shape and x.is_contiguous()


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if isinstance(target, Scattered) and _is_row(source, target):
        target.each(torch._foreach_copy_, source, writes=True, alike=False)
    elif isinstance(source, Scattered) and _is_row(target, source):
        source.each(lambda own, out: torch._foreach_copy_(out, own), target, alike=False)
    else:
        return NotImplemented
    return target


def _lerp(x: Tensor, end: Tensor, weight: float) -> Any:
    if not isinstance(x, Scattered) or not _is_row(end, x) or end.dtype != x.dtype:
        return NotImplemented
    x.each(lambda own, ends: torch._foreach_lerp_(own, ends, weight), end, writes=True)
    return x


def _subtract(x: Tensor, other: Any, *, alpha: float = 1, out: Tensor) -> Any:
    if not isinstance(x, Scattered) or not _is_row(other, x) or not _is_row(out, x):
        return NotImplemented

    def subtract(own: list[Tensor], others: list[Tensor], outs: list[Tensor]) -> None:
        for one, another, result in zip(own, others, outs, strict=True):
            torch.sub(one, another, alpha=alpha, out=result)

    x.each(subtract, other, out)
    return out


def _extremes(x: Scattered, *, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is not None or not x.numel():
        return NotImplemented
    found = x.each(lambda own: [extreme for each in own for extreme in each.aminmax()], alike=False)
    least, most = torch.stack([each.to(x.device) for each in found]).view(-1, 2).unbind(1)
    return least.amin(), most.amax()


def _view(x: Scattered, size: Sequence[int]) -> Any:
    return x.part(0, x.numel()) if list(size) in ([-1], [x.numel()]) else NotImplemented


def _slice(x: Scattered, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, _ = slice(start, end).indices(x.numel())
    return x.part(first, max(first, last)) if step == 1 else NotImplemented


def _split(x: Scattered, size: int, dim: int = 0) -> list[Scattered]:
    return [x.part(start, min(start + size, x.numel())) for start in range(0, x.numel(), size)] or [x.part(0, 0)]


def _to_copy(
    x: Scattered, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **options: Any
) -> Tensor:
    return x.gathered(dtype=dtype, device=device)


def _into_copy(out: Any) -> Callable[..., Any]:
    """Return an operation of a vector and something else that has its result where the vector is copied to."""

    def operation(x: Any, other: Any, **options: Any) -> Any:
        plain = not isinstance(other, Tensor) or _is_row(other, x) or not other.dim()
        if not isinstance(x, Scattered) or not plain or torch.result_type(x, other) != x.dtype:
            return NotImplemented
        copy = x.gathered()
        return out(copy, other, **options, out=copy)

    return operation


def _like(func: Any) -> Callable[..., Tensor]:
    """Return a function that makes a new tensor: it gets a stand-in for the vector, without memory."""

    def made(x: Scattered, *args: Any, **kwargs: Any) -> Tensor:
        return func(torch.empty(1, dtype=x.dtype, device=x.device).expand(x.shape), *args, **kwargs)  # type: ignore[no-any-return]

    return made


NEW = (
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)

OPERATIONS: Mapping[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten.lerp_.Scalar: _lerp,
    aten.sub.out: _subtract,
    aten.aminmax.default: _extremes,
    aten.detach.default: lambda x: x.part(0, x.numel()),
    aten.alias.default: lambda x: x.part(0, x.numel()),
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.clone.default: lambda x, **options: x.gathered(),
    aten._to_copy.default: _to_copy,
    aten.sub.Tensor: _into_copy(aten.sub.out),
    aten.mul.Tensor: _into_copy(aten.mul.out),
    aten.div.Tensor: _into_copy(aten.div.out),
    **{each: _like(each) for each in NEW},
}
"""What needs no copy, or makes one. Each function may return NotImplemented."""


def _on_copies(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Carry out an operation on copies of vectors, and write back what it has changed."""
    copies: dict[int, tuple[Scattered, Tensor]] = {}

    def copied(x: Scattered) -> Tensor:
        return copies.setdefault(id(x), (x, x.gathered()))[1]

    if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
        raise LsgdError(
            f"{func} makes a view of a model's parameters, which lie apart: use x.clone(), a copy, and x.copy_(...) to "
            f"write it back; slices and x.split(...) of them are views"
        )
    given, options = _pytree.tree_map_only(Scattered, copied, (args, dict(kwargs)))
    result = func(*given, **options)
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for x in _pytree.tree_leaves(value):
                if isinstance(x, Scattered):
                    _copy(x, copies[id(x)][1])
    own = {id(copy): x for x, copy in copies.values()}
    return _pytree.tree_map_only(Tensor, lambda x: own.get(id(x), x), result)
