"""The loss that a worker reports: the mean of the last batches', read without stalling a GPU."""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.errors import ConfigError

MAX_PENDING = 64
"""Most losses on their way from the GPU; more mean that it is that far behind, and the oldest is waited for."""


class LossWindow:
    """Mean of the last ``size`` losses, ``before`` among them.

    A loss on a GPU is copied to pinned memory behind the work that computes it, and read once the copy is there; so
    the mean may be a few batches old, and nothing ever waits for the GPU.
    """

    def __init__(self, size: int, before: Sequence[float] = ()) -> None:
        self._values: deque[float] = deque(before, maxlen=size)
        self._pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def add(self, loss: Tensor | float) -> None:
        """Take in the loss of a batch: a number, or a tensor of one element.

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
        """The losses that have arrived, the oldest first."""
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
        """Return in words why the mean elects nobody; an empty text: it can."""
        mean = self.mean()
        if mean is None:
            return "" if self._pending else "has reported no loss"
        return "" if math.isfinite(mean) else f"has reported losses that are not finite (mean {mean:g})"


def _is_there(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
