"""The rendezvous: values of one generation, for who is there and who comes before them."""

from lsgd.protocol.messages import Get, Published, Put
from lsgd.server.global_daemon import Rendezvous


def put(generation: int, key: str, value: bytes) -> Put:
    return Put("node0/worker0", 1, generation, key, value)


def get(generation: int, key: str, worker: str = "node1/worker0", incarnation: int = 2) -> Get:
    return Get(worker, incarnation, generation, key)


def test_a_value_is_there_for_who_comes_later() -> None:
    rendezvous = Rendezvous()
    rendezvous.reset(3)
    assert rendezvous.put(put(3, "a", b"1")) == []
    rendezvous.reset(3)
    assert rendezvous.get(get(3, "a")) == Published(3, "a", b"1")


def test_who_comes_earlier_gets_it_once_when_it_is_there() -> None:
    rendezvous = Rendezvous()
    rendezvous.reset(3)
    for _ in range(3):  # asked again
        assert rendezvous.get(get(3, "a")) is None
    assert rendezvous.get(get(3, "a", "node2/worker0", 9)) is None
    value = Published(3, "a", b"1")
    assert rendezvous.put(put(3, "a", b"1")) == [("node1/worker0", 2, value), ("node2/worker0", 9, value)]
    assert rendezvous.put(put(3, "a", b"1")) == []


def test_another_generation_has_nothing_of_the_last_one() -> None:
    rendezvous = Rendezvous()
    rendezvous.reset(3)
    rendezvous.put(put(3, "a", b"1"))
    rendezvous.get(get(3, "b"))
    rendezvous.reset(4)
    assert rendezvous.get(get(4, "a")) is None
    assert rendezvous.put(put(4, "b", b"2")) == []
    assert rendezvous.put(put(3, "a", b"late")) == []
    assert rendezvous.get(get(3, "a")) is None
    assert rendezvous.values == {"b": b"2"}
