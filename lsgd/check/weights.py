"""The weights of a model as lsgd and the optimizers have left them, and what has changed them since."""

import ctypes
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lsgd.shards import local

CLOSE = 1e-5
"""Weights this close, as a share of the largest, are the same: a perturbation that is taken back rounds."""

MOST_LOOKED_AT = 16
"""Of how many parameters some memory is looked at after each line, for changes that torch does not count."""


class Change(NamedTuple):
    """How weights differ from those that were left.

    Args:
        names: of the tensors.
        share: largest difference, as a share of the largest number of its tensor.
    """

    names: list[str]
    share: float


class Weights:
    """A copy of a model's trainable parameters, to compare with, and a glance that costs little."""

    looks_closely = False
    """Whether a glance sees all weights, which takes long."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.keep()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not parameter.is_meta:
                yield name, local(parameter.detach())

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the weights as they are now."""
        self._kept = {name: tensor.clone() for name, tensor in self._tensors()}
        self.glance()

    def glance(self) -> bool:
        """Return whether the weights seem to have changed since the last glance, by counters and some memory."""
        now = self._seen()
        before, self._last = getattr(self, "_last", now), now
        return before[0] != now[0] or (bool(before[1]) and before[1] != now[1])

    def _seen(self) -> tuple[list[tuple[int, int, int]], str]:
        seen = []
        for number, parameter in enumerate(self._model.parameters()):
            place = parameter.data_ptr() if parameter.layout == torch.strided else 0
            word = 0
            if place and number < MOST_LOOKED_AT and parameter.device.type == "cpu" and parameter.numel():
                nbytes = parameter.element_size() * parameter.numel()
                if parameter.is_contiguous() and nbytes >= 4:
                    middle = place + (nbytes // 2 & ~3)
                    word = sum(ctypes.c_uint32.from_address(at).value for at in (place, middle, place + nbytes - 4))
            seen.append((parameter._version, place, word))
        return seen, self.digest() if self.looks_closely else ""

    @torch.no_grad()
    def change(self) -> Change | None:
        """Return how the weights differ from those kept; None: they do not."""
        names, most = [], 0.0
        for name, now in self._tensors():
            kept = self._kept.get(name)
            if kept is None or kept.shape != now.shape:
                names.append(name)
                most = float("inf")
                continue
            if kept.numel() == 0 or torch.equal(kept, now):
                continue
            far = float((kept.float() - now.float()).abs().max())
            largest = float(torch.maximum(kept.abs().max(), now.abs().max()).float()) or 1.0
            if not far / largest <= CLOSE:
                names.append(name)
                most = max(most, far / largest)
        return Change(names, most) if names else None

    @torch.no_grad()
    def sums(self) -> list[float]:
        """Return two sums of each of the largest tensors, which differ wherever the weights do, to compare roughly."""
        largest = sorted(self._tensors(), key=lambda pair: pair[1].numel(), reverse=True)[:MOST_LOOKED_AT]
        flat = [tensor.reshape(-1).double() for _, tensor in largest]
        return [float(x) for each in flat for x in (each.sum(), each[::2].sum())]

    def digest(self) -> str:
        """Return a digest of the trainable parameters."""
        return digest_of(tensor for _, tensor in self._tensors())


def digest_of(*tensors: Tensor | Iterator[Tensor]) -> str:
    """Return a digest of tensors' elements."""
    hashed = hashlib.blake2b(digest_size=12)
    for each in tensors:
        for tensor in (each,) if isinstance(each, Tensor) else each:
            flat = local(tensor.detach()).cpu().contiguous().reshape(-1)
            hashed.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return hashed.hexdigest()


def tensor_digests(state: dict[str, object]) -> dict[str, str]:
    """Return a digest of each dense tensor of a state dict, by its name."""
    found = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            found[name] = digest_of(tensor)
    return found
