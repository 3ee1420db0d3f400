"""Ray's workers get the names under which they find their checkpoints."""

from pathlib import Path

import pytest

from lsgd.integrations.ray_seats import RayWorker, Seats
from lsgd.run_folder import checkpoint_path, newest


def seats(*workers: RayWorker) -> list[tuple[int, int]]:
    made = Seats()
    return [made.assign(worker)[:2] for worker in workers]


def at(rank: int, node_id: str, *saved: str) -> RayWorker:
    return RayWorker(rank, 4, node_id, "/run", saved)


def test_a_new_run_numbers_nodes_and_their_workers_in_order() -> None:
    assert seats(at(0, "b"), at(1, "b"), at(2, "a"), at(3, "a")) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("saved", "taken"),
    [
        (["node1/worker0"], [(1, 0), (0, 0)]),
        (["node0/worker1"], [(0, 1), (1, 0)]),
        (["node0/worker0", "node2/worker0", "node2/worker3"], [(2, 0), (0, 0)]),
        (["node0/worker0", "node1/worker0"], [(0, 0), (1, 0)]),
    ],
)
def test_those_that_see_a_checkpoint_are_its_workers(saved, taken) -> None:
    assert seats(at(0, "x", *saved), at(1, "y", *saved)) == taken


def test_nodes_that_see_only_their_own_checkpoints_are_themselves_again() -> None:
    assert seats(at(0, "x", "node1/worker0"), at(1, "y", "node0/worker0")) == [(1, 0), (0, 0)]


def test_several_workers_of_one_node_take_the_saved_places_first() -> None:
    saved = ["node1/worker1", "node1/worker2"]
    assert seats(*(at(rank, "x", *saved) for rank in range(4))) == [(1, 1), (1, 2), (1, 0), (1, 3)]


def test_a_worker_in_the_place_of_another_has_its_name_on_the_same_node_only() -> None:
    made = Seats()
    assert [made.assign(at(rank, "x")) for rank in range(2)] == [(0, 0, False), (0, 1, False)]
    assert made.assign(at(0, "x", "node0/worker1")) == (0, 0, True)
    assert made.assign(at(1, "y", "node0/worker0")) == (1, 0, True)
    assert made.assign(at(1, "x")) == (0, 1, True)


def test_the_newest_checkpoint_is_that_of_the_highest_count(tmp_path: Path) -> None:
    assert newest(tmp_path) == []
    for count, worker in [
        (90, "node0/worker0"),
        (100, "node1/worker0"),
        (100, "node0/worker12"),
        (100, "node0/worker1.0-of-2"),
    ]:
        path = checkpoint_path(tmp_path, "a", count, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert newest(tmp_path) == ["node0/worker12", "node1/worker0"]
