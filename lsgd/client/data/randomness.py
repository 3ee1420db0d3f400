"""Random numbers that all workers draw alike: the order of a pass, whatever each script has seeded."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

DEEP = 4
"""How many samplers deep a generator of a sampler's own is looked for."""


@contextmanager
def common(seed: int, epoch: int, sampler: object = None) -> Iterator[None]:
    """Put the generators of torch (on the CPU), numpy and Python, and a sampler's own, to a stream of this pass.

    Afterwards they continue where they were: the script's seeding by rank changes no order, and drawing an order
    changes none of the script's numbers.

    Args:
        seed: the same on all workers.
        epoch: number of the pass.
        sampler: what draws; the generators among its attributes, and those of samplers inside it, are its own.
    """
    number = number_of(seed, epoch)
    with ExitStack() as put_back:
        for keep in (_keep_torch(torch.default_generator), _keep_numpy(np.random), _keep_python(None)):
            put_back.callback(keep(number))
        for each in generators_of(sampler):
            put_back.callback(each(number))
        yield


def number_of(seed: int, epoch: int) -> int:
    """Return the seed of a pass; tuples of small integers hash to the same value in every process."""
    return hash((seed, epoch)) % (1 << 63)


Put = Callable[[int], Callable[[], Any]]
"""Seeds a generator, and returns what puts it back."""


def _keep_torch(generator: torch.Generator) -> Put:
    def put(number: int) -> Callable[[], Any]:
        state = generator.get_state()
        generator.manual_seed(number)
        return lambda: generator.set_state(state)

    return put


def _keep_numpy(generator: Any) -> Put:
    def put(number: int) -> Callable[[], Any]:
        state = generator.get_state()
        generator.seed(number % (1 << 32))
        return lambda: generator.set_state(state)

    return put


def _keep_numpys_new(generator: np.random.Generator) -> Put:
    def put(number: int) -> Callable[[], Any]:
        bits: Any = generator.bit_generator
        state = bits.state
        bits.state = type(bits)(number).state
        return lambda: setattr(bits, "state", state)

    return put


def _keep_python(generator: random.Random | None) -> Put:
    owner: Any = random if generator is None else generator

    def put(number: int) -> Callable[[], Any]:
        state = owner.getstate()
        owner.seed(number)
        return lambda: owner.setstate(state)

    return put


def generators_of(sampler: object, deep: int = DEEP) -> Iterator[Put]:
    """Yield what seeds the generators among a sampler's attributes, and among those of samplers inside it."""
    for value in list(vars(sampler).values()) if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator):
            yield _keep_torch(value)
        elif isinstance(value, np.random.RandomState):
            yield _keep_numpy(value)
        elif isinstance(value, np.random.Generator):
            yield _keep_numpys_new(value)
        elif isinstance(value, random.Random):
            yield _keep_python(value)
        elif deep and isinstance(value, Sampler):
            yield from generators_of(value, deep - 1)
