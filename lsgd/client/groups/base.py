"""What the groups of a worker have in common, whatever carries their tensors."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lsgd.collectives.group import Group


class Traffic:
    """Counts the bytes of tensors that process groups are given to send, and to receive; safe in several threads."""

    def __init__(self) -> None:
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self._lock = threading.Lock()

    def add(self, sent_nbytes: int, received_nbytes: int) -> None:
        """Count what one member sends and receives in a collective."""
        with self._lock:
            self.sent_nbytes += sent_nbytes
            self.received_nbytes += received_nbytes


class WorkerGroup(Group):
    """A Group of the workers of a generation.

    Attributes:
        device: that tensors made for the group's sake are best on.
        transport: what carries its tensors, in words.
    """

    device: torch.device
    transport: str

    def subset(self, name: str, ranks: Sequence[int]) -> "WorkerGroup":
        """Return the group of some members, in the given order, this one among them; each counts as a node."""
        raise NotImplementedError

    def cut(self) -> None:
        """Make whatever waits in this group or its subgroups fail at once; may be called by another thread."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the connections, so that peers which wait for this member fail at once."""
        raise NotImplementedError


def to_host(tensor: Tensor, *, copy: bool = True) -> Tensor:
    """Return ``tensor`` if it is in host memory, else a pinned tensor like it there; with its numbers if ``copy``."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor) if copy else host


def from_host(host: Tensor, tensor: Tensor) -> None:
    """Write to ``tensor`` what has arrived in what :func:`to_host` returned for it."""
    if host is not tensor:
        tensor.copy_(host)
