"""A model's trainable parameters as flat vectors, one for each dtype and device. The model itself does not change.

A vector is no memory of its own: its elements are those of the parameters, wherever these are just now
(:mod:`lsgd.scattered`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lsgd.errors import ConfigError, LsgdError
from lsgd.scattered import Memory, Span
from lsgd.shards import is_sharded, local, reshard, sharded_modules, sharding_of

ALIGNMENT_NBYTES = 64
"""Every parameter starts at a multiple of this in its vector: a cache line, and a CPU's widest vector."""

SAMPLE_NUMEL = 256
"""At most so many elements of a parameter tell whether it is as it was."""


@dataclass
class Slot:
    """Where a parameter is in a vector: from ``offset`` on, in the flat vector number ``buffer``.

    Args:
        name: its name at the join.
        module: where it is found, in ``module._parameters[key]``.
        shape: of the parameter, or of this process's shard of it.
        stride: strides of such a tensor whose elements are in the vector's order, which is that at the join.
    """

    name: str
    buffer: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    module: nn.Module = field(repr=False)
    key: str = field(repr=False)

    @property
    def numel(self) -> int:
        """Elements of the parameter, or of this process's shard of it."""
        return self.shape.numel()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the model has now."""
        return self.module._parameters[self.key]  # type: ignore[return-value]

    def held(self) -> Tensor:
        """Return the parameter, or this process's shard of it."""
        parameter = self.module._parameters[self.key]
        return parameter if type(parameter) is nn.Parameter else local(self.parameter)


class Layout:
    """Where the trainable parameters of a model are in flat vectors, one for each dtype and device.

    Tied parameters occur once. Of sharded ones, the vectors have this process's shards.

    Raises ConfigError if it has no trainable parameter, or one that cannot be exchanged.

    Attributes:
        kinds: dtype and device of the parameters of each vector.
        lengths: of each vector, in elements.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(sharded_modules(model))
        found = [(name, *place) for name, place in _places(model).items() if place[2].requires_grad]
        if not found:
            raise ConfigError("the model has no parameter with requires_grad: there is nothing to train")
        for name, _, _, parameter in found:
            _check(name, parameter)
        self.kinds = list(dict.fromkeys((p.dtype, p.device) for *_, p in found))
        self.lengths = [0] * len(self.kinds)
        self.slots: list[Slot] = []
        for name, module, key, parameter in found:
            buffer, own = self.kinds.index((parameter.dtype, parameter.device)), local(parameter)
            slot = Slot(name, buffer, self.lengths[buffer], own.shape, _dense_stride(own), module, key)
            self.slots.append(slot)
            unit = ALIGNMENT_NBYTES // parameter.element_size()
            self.lengths[buffer] += -(-slot.numel // unit) * unit

    def views(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the memory of plain vectors, shaped like the parameters, in the order of ``slots``.

        To torch they are no views: autograd may change each of them as it does any gradient.
        """
        return [window(vectors[s.buffer], s) for s in self.slots]


class FlatParameters:
    """The trainable parameters of a model as flat vectors: what reads or writes these reads or writes the model.

    Nothing of the model changes. Frozen parameters (``requires_grad`` false) belong to no vector. The padding between
    parameters starts as zero, and is not part of the model.

    The parameters are those that the model has at each use: another object, on another device or in other memory too.
    Tensors created like the vectors are where the parameters were at the join; with ``offload``, in host memory.

    Raises ConfigError as :class:`Layout`.
    """

    def __init__(self, model: nn.Module, *, offload: bool = False, layout: Layout | None = None) -> None:
        self.model, self.layout = model, layout or Layout(model)
        self.slots = self.layout.slots
        self._sharded = sharded_modules(model)
        self._padding: list[Tensor] = []
        self.buffers: list[Tensor] = [
            Memory(self._places_in(index), dtype, torch.device("cpu") if offload else device).vector()
            for index, (dtype, device) in enumerate(self.layout.kinds)
        ]

    def _places_in(self, index: int) -> list[Span]:
        """Return the places of a vector: those of its parameters, and padding between them."""
        slots, (dtype, device) = [s for s in self.slots if s.buffer == index], self.layout.kinds[index]
        ends = [*(slot.offset for slot in slots[1:]), self.layout.lengths[index]]
        padding = torch.zeros(ends[-1] - sum(slot.numel for slot in slots), dtype=dtype, device=device)
        self._padding.append(padding)
        pieces = torch.split(padding, [end - slot.offset - slot.numel for slot, end in zip(slots, ends, strict=True)])
        own = [Span(slot.held, slot.shape, slot.stride) for slot in slots]
        between = [Span(piece.detach, piece.shape, (1,)) for piece in pieces]
        return [place for both in zip(own, between, strict=True) for place in both]

    @property
    def frozen(self) -> list[nn.Parameter]:
        """The parameters that belong to no vector."""
        joined = {id(slot.parameter) for slot in self.slots}
        return [p for p in self.model.parameters() if id(p) not in joined]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that have the vectors' elements: the parameters, then the padding."""
        return [*(slot.held().detach() for slot in self.slots), *self._padding]

    def versions(self) -> list[tuple[int, int]]:
        """Return where each parameter lies, and how often it has been written to: if neither changes, nor does it."""
        held = [local(p) if (p := slot.module._parameters.get(slot.key)) is not None else None for slot in self.slots]
        return [(0, 0) if x is None else (x.data_ptr(), x._version) for x in held]

    def sample(self) -> list[Tensor]:
        """Return a copy of a few elements of the first, the middle and the last parameter."""
        rows = []
        for slot in (self.slots[0], self.slots[len(self.slots) // 2], self.slots[-1]):
            x = slot.held().detach()
            while x.dim() > 1 and len(x):
                x = x[-1]
            rows.append(x.reshape(-1)[:SAMPLE_NUMEL].clone())
        return rows

    def reshard(self) -> None:
        """Put a sharded model's shards in the place of parameters that are gathered."""
        reshard(self._sharded)

    def find(self) -> None:
        """Find the parameters anew, by their names: a script may have replaced modules and parameters.

        Raises:
            LsgdError: the model trains others than those that were joined, or they have other shapes or dtypes.
        """
        self.reshard()
        found = _places(self.model)
        names = {id(parameter): name for name, (*_, parameter) in found.items()}
        for slot in self.slots:
            before = slot.module._parameters.get(slot.key)
            name = slot.name if slot.name in found else names.get(id(before), "")
            if not name:
                raise _changed(slot.name, "was removed")
            slot.module, slot.key, parameter = found.pop(name)
            kind = self.layout.kinds[slot.buffer][0]
            if (now := local(parameter)).shape != slot.shape or now.dtype != kind:
                was = f"{tuple(slot.shape)} in {kind}, and is {tuple(now.shape)} in {now.dtype}"
                raise _changed(slot.name, f"had the shape {was}")
        for name, (*_, parameter) in found.items():
            if parameter.requires_grad:
                raise _changed(name, "was frozen or was not there, and is trainable")


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's buffers that can be averaged: floating-point and not empty; shared ones occur once."""
    return [b for _, b in named_floating_buffers(model)]


def named_floating_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the same buffers with their names."""
    buffers = ((name, b) for name, x in model.named_buffers() for b in written(x))
    return ((name, b) for name, b in buffers if b.is_floating_point() and b.numel())


def written_buffers(model: nn.Module) -> list[Tensor]:
    """Return what can be written of a model's buffers: :func:`written`."""
    return [part for x in model.buffers() for part in written(x)]


def written(x: Tensor) -> Iterator[Tensor]:
    """Yield what can be written of a buffer or a frozen parameter: of an expanded one what it repeats.

    Of a sparse one, such as a graph's matrix, it is nothing: it stays as the script has made it. Of a tensor of another
    class, such as quantized weights, it is the tensors inside.
    """
    if is_traceable_wrapper_subclass(inner := cast(Any, x)):
        for name in inner.__tensor_flatten__()[0]:
            yield from written(getattr(inner, name))
    elif x.layout == torch.strided:
        for dim in reversed(range(x.dim())):
            x = x if x.stride(dim) or x.shape[dim] < 2 else x.select(dim, 0)
        yield x


def describe(model: nn.Module, *, whole: bool = False) -> tuple[str, str]:
    """Return a digest of the names, shapes, dtypes and memory formats of all parameters and buffers, and a summary.

    With ``whole``, the digest is independent of the sharding.
    """
    named = list(model.named_parameters())
    orders = [_order_of(t) for _, t in named]
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}{order}{'' if whole else sharding_of(t)}"
        for (name, t), order in zip(named, orders, strict=True)
    ]
    lines += [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in model.named_buffers()]
    count = sum(p.numel() for _, p in named)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for _, p in named})
    sharded = next((f", sharded as {words}" for _, p in named if (words := sharding_of(p))), "")
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
    reordered = f", {n} of them in another memory format" if (n := sum(map(bool, orders))) else ""
    tensors = f"{len(lines)} tensors of {', '.join(dtypes)}{reordered}{sharded}"
    summary = f"{count:,} parameters in {tensors} (digest {digest[:8]})"
    return digest, summary


def _changed(name: str, what: str) -> LsgdError:
    return LsgdError(
        f"the parameter {name} {what}, since Worker.join: a run exchanges the same parameters from its start to its "
        f"end. Make the model as it is to be before the join, in its dtype; a layer that is to train later requires "
        f"gradients at the join, and is frozen after that, with requires_grad_(False), until it trains"
    )


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str, nn.Parameter]]:
    """Return each parameter of a model by its name, and where it is found; tied ones once."""
    found: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{key}" if prefix else key] = module, key, parameter
    return found


def _check(name: str, parameter: nn.Parameter) -> None:
    if parameter.layout != torch.strided or parameter.is_meta:
        what = "on the meta device" if parameter.is_meta else f"of layout {parameter.layout}"
        raise ConfigError(f"the parameter {name} is {what}; only dense parameters in real memory can be exchanged")
    if not parameter.is_floating_point():
        raise ConfigError(f"the parameter {name} is {parameter.dtype}; only floating-point parameters can be exchanged")
    kind = type(parameter.data)
    if kind is not Tensor and not is_sharded(parameter):
        raise ConfigError(
            f"the parameter {name} is a {kind.__module__}.{kind.__qualname__}, which keeps its numbers in tensors of "
            f"its own; only torch's own tensors can be exchanged: train this layer unquantized, or freeze it with "
            f"requires_grad_(False) and train others"
        )


def window(vector: Tensor, slot: Slot) -> Tensor:
    """Return the part of a plain vector that belongs to a parameter, in the parameter's shape."""
    made = torch.empty(0, dtype=vector.dtype, device=vector.device)
    return made.set_(vector.untyped_storage(), vector.storage_offset() + slot.offset, slot.shape, slot.stride)


def _order_of(parameter: Tensor) -> str:
    """Return the order of a trained parameter's elements in the flat vectors; empty if it is the usual one."""
    if not parameter.requires_grad:
        return ""
    like = torch.empty_like(local(parameter), device="meta")
    return "" if like.is_contiguous() else f" in memory as {like.stride()}"


def _dense_stride(like: Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if it is dense, else contiguous ones."""
    return torch.empty_like(like, device="meta").stride()
