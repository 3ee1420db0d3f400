"""The store of a generation: how a wait for a member's address goes on, and what it says when it ends."""

import pytest

from lsgd.client.groups.store import ServerStore
from lsgd.errors import ExchangeError
from lsgd.protocol.messages import GenerationOver, Get, Published, Put
from tests import golden

from .test_channel import World, world

__all__ = ["world"]


@pytest.fixture
def store(world: World) -> ServerStore:
    return ServerStore(world.channel, "node0/worker0", 7, 3, timeout_s=60.0)


def test_a_wait_in_vain_says_for_whom_and_how_long(world, store, caplog) -> None:
    with pytest.raises(ExchangeError, match=golden.pattern("reach.waited_60")):
        store.get("tcp/node1/worker0")
    assert golden.text("reach.waited_10") in caplog.text


def test_who_waits_publishes_what_a_restarted_server_has_lost(world, store) -> None:
    store.set("tcp/node0/worker0", b"here")
    world.at(2.5, Published(3, "tcp/node1/worker0", b"there"))
    assert store.get("tcp/node1/worker0") == b"there"
    assert store.get("tcp/node1/worker0") == b"there"  # it does not change, so nobody asks again
    assert world.times(Get) == [0, 1, 2]
    assert world.times(Put) == [0, 0, 1, 2]


def test_a_wait_ends_with_its_generation_for_the_same_reason(world, store) -> None:
    world.at(5.0, GenerationOver(3, "node1/worker0 left"))
    with pytest.raises(ExchangeError, match=golden.pattern("reach.generation_3_over")):
        store.get("tcp/node1/worker0")
    assert world.seconds < 6.0
