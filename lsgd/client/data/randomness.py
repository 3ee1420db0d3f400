"""Random numbers: those that all workers draw alike, for the order of a pass, and those that are each worker's own."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

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


class Apart:
    """Random numbers for what draws now and then beside the script, which keeps its own.

    Args:
        seed: the same on all workers.
        epoch: number of the pass.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        with common(seed, epoch):
            self._states = states()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let what is drawn here continue its own numbers."""
        script = states()
        set_states(self._states)
        try:
            yield
        finally:
            self._states = states()
            set_states(script)


def states() -> tuple[Any, ...]:
    """Return the states of the generators of torch (on the CPU), numpy and Python."""
    return torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()


def mersenne(of_numpy: Any) -> tuple[Any, ...] | None:
    """Return numpy's state as ``np.random.get_state()`` does; None: the script has given numpy another generator."""
    if of_numpy["bit_generator"] != "MT19937":
        return None
    words = of_numpy["state"]
    return "MT19937", words["key"], words["pos"], of_numpy["has_gauss"], of_numpy["gauss"]


def set_states(states: tuple[Any, ...]) -> None:
    """Put the generators to what :func:`states` has returned, numpy's also as :func:`mersenne` does; None: not it."""
    of_torch, of_numpy, of_python = states
    torch.default_generator.set_state(of_torch)
    if of_numpy is not None:
        np.random.set_state(of_numpy)
    random.setstate(of_python)


def begin_own(*who: object) -> None:
    """Let all generators go on with a stream of this worker's own: dropout, augmentation, noise.

    It depends on the script's seed and on ``who``, so that a run with the same seeds repeats it.
    """
    seed_all(_hashed(torch.initial_seed(), *who))


def seed_all(number: int) -> None:
    """Seed the generators of torch, on all devices, numpy and Python."""
    torch.manual_seed(number)
    np.random.seed(number % (1 << 32))
    random.seed(number)


def _hashed(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 1


class OwnInEachProcess:
    """A loader's ``worker_init_fn``, after which its process draws numbers that no process of another worker draws.

    The script's function may seed by the process's number alone. The loader's own seed is of this worker's stream.
    """

    def __init__(self, inner: Callable[[int], object]) -> None:
        self.inner: Callable[[int], object] = inner.inner if isinstance(inner, OwnInEachProcess) else inner

    def __call__(self, number: int) -> None:
        """Call the script's function, and seed anew."""
        self.inner(number)
        if (info := get_worker_info()) is not None:
            seed_all(_hashed(info.seed))
