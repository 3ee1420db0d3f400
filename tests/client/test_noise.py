"""Noise: random numbers that are each worker's own, also in loaders' processes and in streams that shuffle."""

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lsgd.client.data.randomness import OwnInEachProcess, begin_own, seed_all
from lsgd.client.data.samplers import options_of, shard_of
from lsgd.client.data.streams import Part, StreamLoader
from lsgd.client.data.trainers import TrainerData


def numbers() -> list[float]:
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def noise_of(*who: object, seed: int = 0) -> list[float]:
    seed_all(seed)
    begin_own(*who)
    return numbers()


def test_each_worker_has_numbers_of_its_own_and_the_same_seed_repeats_them() -> None:
    first = noise_of("node0/worker0", 0, False)
    assert first == noise_of("node0/worker0", 0, False)
    others = [
        noise_of("node0/worker1", 0, False),
        noise_of("node0/worker0", 1, False),  # another process of an island
        noise_of("node0/worker0", 0, 12345),  # started again
        noise_of("node0/worker0", 0, False, seed=1),
    ]
    assert all(len({each[k] for each in (first, *others)}) == 5 for k in range(3))


class Noisy(Dataset[list[float]]):
    """Samples with noise by all three generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(numbers(), dtype=torch.float64)


def fixed(number: int) -> None:
    seed_all(7 + number)


@pytest.mark.parametrize("init", [None, fixed])
@pytest.mark.parametrize("trainer", [False, True])
def test_no_two_processes_of_loaders_draw_the_same_noise(init, trainer) -> None:
    """Whatever generator and ``worker_init_fn`` the script's loader has, as torch advises for reproducibility."""
    drawn = []
    for rank in range(2):
        seed_all(0)
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(Noisy(), 2, num_workers=2, worker_init_fn=init, generator=generator)
        begin_own(f"node0/worker{rank}")
        if trainer:
            TrainerData(loader, lambda rank=rank: (rank, 2), 0).begin_own()
        else:
            options = options_of(loader)
            options["worker_init_fn"] = init and OwnInEachProcess(init)
            loader = shard_of(loader, lambda rank=rank: (rank, 2), options=options)
        drawn += chain(*(batch.tolist() for batch in loader))
    for k in range(3):
        assert len({each[k] for each in drawn}) == len(drawn)


class Shuffles(IterableDataset[int]):
    """Shuffles without a seed in each pass; some elements cost it a number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        orders = {
            "torch": lambda: torch.randperm(30).tolist(),
            "numpy": lambda: np.random.permutation(30).tolist(),
            "python": lambda: random.sample(range(30), 30),
        }
        first, second = orders[self.kind]()[:15], orders[self.kind]
        yield from first
        yield from (x for x in second() if x not in first)


class AtOnce(Shuffles):
    """Draws its order before anything is asked of it."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()])


@pytest.mark.parametrize("stream", [Shuffles, AtOnce])
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
@pytest.mark.parametrize("processes", [0, 1])
def test_a_stream_that_shuffles_without_a_seed_is_in_one_order_on_all_workers(stream, kind, processes) -> None:
    parts = []
    for rank in range(2):
        seed_all(rank)
        part = Part(stream(kind), lambda rank=rank: (rank, 2))
        loader = StreamLoader(part, lambda has: has, {"batch_size": 1, "num_workers": processes})
        passes = []
        for _ in range(2):
            drawn = []
            for batch in loader:
                drawn.append(int(batch))
                numbers()  # noise of the script
            passes.append(drawn)
        parts.append(passes)
    for one, other in zip(*parts, strict=True):
        assert sorted(one + other) == [*range(30)]
    assert parts[0][0] != parts[0][1]


def test_a_stream_costs_the_script_none_of_its_numbers() -> None:
    seed_all(3)
    expected = numbers()
    seed_all(3)
    part = iter(Part(Shuffles("python"), lambda: (0, 2)))
    next(part), next(part)
    assert numbers() == expected
