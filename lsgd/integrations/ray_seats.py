"""Which workers of the run Ray's workers are: each finds its checkpoint by its name, which is its node and index."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class RayWorker:
    """Where Ray has put a worker.

    Args:
        rank: Ray's rank of it.
        workers: number of workers.
        node_id: Ray's name of its node.
        run_dir: the run folder.
        saved: names of the workers with the newest checkpoint in it, as seen on that node.
        elastic: whether Ray may change the number of workers.
    """

    rank: int
    workers: int
    node_id: str
    run_dir: str
    saved: tuple[str, ...] = ()
    elastic: bool = False


class Seats:
    """The numbers of nodes and workers in a run.

    Ray numbers its nodes and workers anew when it starts all of them. Here those that see a checkpoint are its workers,
    as far as they can be, so that one of them has the model.

    Attributes:
        nodes: number of each node, by Ray's name.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        self._taken: dict[int, tuple[int, int]] = {}  # node and index, by Ray's rank

    def assign(self, worker: RayWorker) -> tuple[int, int, bool]:
        """Return the node and the index of a new worker, and whether it takes the place of one of this run."""
        saved = [
            (int(node), int(index)) for node, index in re.findall(r"node(\d+)/worker(\d+)", " ".join(worker.saved))
        ]
        node = self.nodes.setdefault(worker.node_id, self._number(saved))
        replaces = worker.rank in self._taken
        before, index = self._taken.get(worker.rank, (-1, 0))
        if before != node:
            taken = [other for home, other in self._taken.values() if home == node]
            free = [index for index in range(len(taken) + 1) if index not in taken]
            index = next((index for home, index in saved if home == node and index not in taken), free[0])
        self._taken[worker.rank] = node, index
        return node, index, replaces

    def _number(self, saved: list[tuple[int, int]]) -> int:
        """Return a new node's number: that of the node with most of the saved workers, if it is free."""
        taken = set(self.nodes.values())
        free = {node for node, _ in saved} | set(range(len(taken) + 1))
        return min(free - taken, key=lambda number: (-sum(node == number for node, _ in saved), number))
