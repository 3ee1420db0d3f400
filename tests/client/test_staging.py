"""Tensors that go by way of other memory, piece by piece: what a GPU needs, with copies of host memory in its place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.collectives import composed

from .bench import CERTIFICATE
from .meshes import all_at_once, members
from .test_groups import every_verb

PIECE_NBYTES = 20_000


class Made:
    """A copy that ends when it is waited for."""

    def __init__(self, end: Callable[[], object] = lambda: None) -> None:
        self.synchronize = end

    def query(self) -> bool:
        return False


class AtOnce:
    """Copies when it is told to begin: too early, if what is to be copied is not there yet."""

    def __init__(self) -> None:
        self.copied_nbytes = 0

    def host_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def begin(self, target: Tensor, source: Tensor) -> Made:
        self.copied_nbytes += source.nbytes
        target.copy_(source)
        return Made()


class AtTheEnd(AtOnce):
    """Copies when the end is waited for: too late, or never, if nobody waits in time."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._before = before

    def begin(self, target: Tensor, source: Tensor) -> Made:
        def end() -> None:
            self._before()
            super(AtTheEnd, self).begin(target, source)

        return Made(end)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(composed, "PIECE_NBYTES", PIECE_NBYTES)


def test_members_with_and_without_memory_of_their_own_exchange() -> None:
    groups, _ = members(3, [CERTIFICATE] * 3, copiers=[AtOnce(), AtTheEnd(), None])
    assert all_at_once(groups, every_verb) == [True] * 3


def test_a_piece_leaves_before_the_next_one_is_copied() -> None:
    sent = []
    copier = AtTheEnd(lambda: sent.append(groups[0]._traffic.sent_nbytes))
    groups, _ = members(2, [b""] * 2, copiers=[copier, None])
    x = torch.arange(25_000.0)

    def work(group: TcpGroup) -> bool:
        received = torch.zeros_like(x)
        group.exchange(*(({1: x}, {}) if group.rank == 0 else ({}, {0: received})))
        return group.rank == 0 or received.equal(x)

    assert all_at_once(groups, work) == [True, True]
    assert sent == [number * PIECE_NBYTES for number in range(5)]
