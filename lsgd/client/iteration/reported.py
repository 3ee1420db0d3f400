"""What a training loop reports: its loss, read without stalling a GPU, and the user's own numbers."""

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from lsgd.errors import ConfigError
from lsgd.protocol.messages import MAX_LOGGED, MAX_LOGGED_NAME

MAX_PENDING = 64
"""Most losses on their way from the GPU. Beyond that, the GPU is far behind, and the oldest is waited for."""

_NAME = re.compile(rf"[\w./-]{{1,{MAX_LOGGED_NAME}}}", re.ASCII)


class LossWindow:
    """Mean of the last ``size`` losses; ``before`` are those from a checkpoint.

    A loss on a GPU is copied to pinned memory after the work that computes it, and read once the copy is done. So
    the mean may be a few batches old, but nothing waits for the GPU.
    """

    def __init__(self, size: int, before: Sequence[float] = ()) -> None:
        self._values: deque[float] = deque(before, maxlen=size)
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def add(self, loss: Tensor | float) -> None:
        """Record the loss of a batch: a number, or a tensor of one element.

        Raises:
            ConfigError: it has more elements.
        """
        if not isinstance(loss, Tensor):
            self._values.append(float(loss))
            return
        if loss.numel() != 1:
            raise ConfigError(f"report() takes the loss of a batch as one number, not a tensor of {tuple(loss.shape)}")
        loss = loss.detach().reshape(())
        if loss.device.type != "cuda":
            self._values.append(float(loss))
            return
        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(loss.device))
        self._pending.append((host, arrived))

    @property
    def values(self) -> list[float]:
        """The losses that have arrived, oldest first."""
        self.mean()
        return list(self._values)

    def mean(self) -> float | None:
        """Return the mean of the losses that have arrived; NaN if one of them is, None before the first."""
        while self._pending and (len(self._pending) > MAX_PENDING or _is_there(self._pending[0][1])):
            host, arrived = self._pending.popleft()
            arrived.synchronize()
            self._values.append(float(host))
        return sum(self._values) / len(self._values) if self._values else None

    def trouble(self) -> str:
        """Return in words why the mean cannot elect this worker; empty if it can."""
        mean = self.mean()
        if mean is None:
            return "" if self._pending else "has reported no loss"
        return "" if math.isfinite(mean) else f"has reported non-finite losses (mean {mean:g})"


def _is_there(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


class Logged:
    """The last number logged under each name.

    Attributes:
        numbers: by name, all finite; replaced, never changed, so that any thread can read it.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def add(self, numbers: Mapping[str, Tensor | float]) -> None:
        """Record numbers, all or none. A non-finite number removes its name until a finite one comes.

        Raises:
            ConfigError: a name or a number is invalid, or there are too many names.
        """
        merged = self.numbers | {_name(name): _number(name, value) for name, value in numbers.items()}
        merged = {name: number for name, number in merged.items() if math.isfinite(number)}
        if len(merged) > MAX_LOGGED:
            raise ConfigError(
                f"log() takes at most {MAX_LOGGED} names in a run, not {len(merged)}: leave some out "
                f"({', '.join(list(merged)[-3:])}, ...)"
            )
        self.numbers = merged


def _name(name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"log() takes names of 1 to {MAX_LOGGED_NAME} letters, digits, '_', '-', '.' and '/', such as "
        f"'accuracy' or 'grad/norm', not {name!r:.100}"
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # an integer beyond all floats
            return math.inf
    what = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ConfigError(f"log() takes numbers and tensors of one element; {name!r} is {what}")
