"""What the servers compare of the workers' data, where lsgd does not divide it."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lsgd.client.data.passes import peek
from lsgd.client.data.randomness import states
from lsgd.client.data.samplers import index_sampler
from lsgd.client.data.shards import ShardLoader
from lsgd.errors import LsgdError
from lsgd.shards import local

logger = logging.getLogger("lsgd")

T = TypeVar("T")

NOTED = 2
"""In how many steps the first data is noted: if it is the same in both, it always is, and says nothing."""

STEPS = 64
"""How many steps without a gradient the comparison waits for one: a GradScaler skips some, a warm-up may freeze all."""

DIGEST_NBYTES = 1 << 16
"""How many bytes of each tensor go into a batch's digest."""


class FirstSteps:
    """Lets the servers compare what workers learn in their first steps, where lsgd does not divide the data.

    Two whose gradients are equal learn the same thing twice. Equal inputs alone say nothing: a later forward pass of
    the step may have others, and the same graph may have another mask. A newcomer's gradients are of another model than
    the others' first ones, so the first data of two steps is told too, if it is not always the same.

    Args:
        tell: sends three digests: of the gradients, of the first data, and of the random numbers at the first step; the
            last two are empty if there are none. The first two are one if they are of the data of two steps.
    """

    def __init__(self, tell: Callable[[str, str, str], object]) -> None:
        self._tell: Callable[[str, str, str], object] | None = tell
        self._noise = ""
        self._drawn: list[str] = []  # digests of the first data of each step
        self._notes = True  # the first data of this step is yet to come
        self._has_told = False  # of the gradients
        self._steps = STEPS
        self._waiting: set[torch.optim.Optimizer] = set()
        self._all: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._hashed, self._learned = hashlib.blake2b(digest_size=16), False
        self._waiting = set(self._all)

    def watch(
        self, parameters: Iterable[Tensor], optimizers: Iterable[torch.optim.Optimizer], *, exchanged: bool
    ) -> None:
        """Look at the gradients of the first steps.

        Args:
            parameters: those with gradients.
            optimizers: all of the worker's.
            exchanged: whether optimizers step by gradients that workers have exchanged: then they are looked at as the
                backward pass computes them.
        """
        self._all = list(optimizers)
        self._begin()
        self._hooks = [o.register_step_post_hook(self._after_step) for o in self._all]
        self._exchanged = exchanged
        if exchanged:
            leaves = [x for x in parameters if x.requires_grad]
            self._hooks += [x.register_post_accumulate_grad_hook(self._add) for x in leaves]  # type: ignore[no-untyped-call]

    @property
    def compares(self) -> bool:
        """Whether the servers are to compare anything yet."""
        return self._tell is not None

    def begin(self) -> None:
        """Begin a step."""
        if self._tell is None:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        else:
            self._notes = True
            self._noise = self._noise or digest_of_random_states()

    def note(self, batch: object) -> None:
        """Note the first data that the script draws in a step, or that the model gets."""
        if self._tell is None or not self._notes or len(self._drawn) == NOTED:
            return
        self._drawn.append(digest(batch))
        self._notes = False
        if len(set(self._drawn)) == NOTED and "" not in self._drawn:
            order = hashlib.blake2b("".join(self._drawn).encode(), digest_size=16).hexdigest()
            self._tell(order, order, "")

    def tell_nothing(self) -> None:
        """Compare nothing: lsgd divides the data, or equal data is meant."""
        self._tell = None

    def _add(self, parameter: Tensor) -> None:
        if self._tell is None or parameter.grad is None:
            return
        gradient = local(parameter.grad)
        if gradient.layout != torch.strided:
            gradient = gradient.coalesce().values()
        self._learned |= bool(gradient.any())
        self._hashed.update(head_of(gradient))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._tell is None:
            return
        if self._has_told:
            self._tell = None
            return
        if not self._exchanged:
            for parameter in (x for group in optimizer.param_groups for x in group["params"]):
                self._add(parameter)
        self._waiting.discard(optimizer)
        if self._waiting:
            return
        if self._learned:
            self._tell(self._hashed.hexdigest(), next(iter(self._drawn), ""), self._noise)
            self._has_told = True
        self._steps -= 1
        if not self._steps:
            self._tell = None
        self._begin()


class FirstData:
    """Looks at a script's passes over data: whether lsgd divides it, and whether any batches come.

    Raises:
        LsgdError: two passes in a row had no batch, so that the script would begin passes forever.
    """

    def __init__(self, steps: FirstSteps) -> None:
        self._steps = steps
        self._empty = 0  # passes in a row

    def of(self, loader: Iterable[T], world_size: int) -> Iterator[T]:
        """Return an iterator over a loader."""
        source = iter(loader)
        if getattr(loader, "is_sharded", False):
            self._steps.tell_nothing()
        elif self._steps.compares:
            warn_if_unsharded(loader, world_size)
        return self._not_empty(source)

    def _not_empty(self, source: Iterator[T]) -> Iterator[T]:
        first, source = peek(source)
        self._empty = 0 if first else self._empty + 1
        if self._empty > 1:
            raise LsgdError(
                "two passes over the data had no batch: it has ended for good, as a generator does after one pass; "
                "pass an object whose __iter__ begins again, or call worker.leave() after the last pass"
            )
        yield from source


def warn_if_unsharded(loader: object, world_size: int) -> None:
    """Warn if every worker draws from the whole dataset."""
    if not isinstance(loader, DataLoader) or isinstance(loader, ShardLoader) or world_size == 1:
        return
    if isinstance(index_sampler(loader), RandomSampler | SequentialSampler):
        logger.warning(
            "this DataLoader is not sharded: each of the %d workers draws from the whole dataset; "
            "worker.loader(dataset, ...) gives each its own shard",
            world_size,
        )


def digest(batch: object) -> str:
    """Return a digest of a batch's tensors; empty if it has none."""
    hashed = hashlib.blake2b(digest_size=16)
    leaves = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_nested and leaf.numel()]
    for tensor in tensors:
        hashed.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        hashed.update(head_of(tensor))
    return hashed.hexdigest() if tensors else ""


def head_of(tensor: Tensor) -> bytes:
    """Return the first bytes of a tensor's elements."""
    head = tensor.detach().reshape(-1)[: DIGEST_NBYTES // tensor.element_size()].cpu().contiguous()
    return head.view(torch.uint8).numpy().tobytes()


def digest_of_random_states() -> str:
    """Return a digest of the states of this process's generators."""
    hashed = hashlib.blake2b(repr(states()).encode(), digest_size=16)
    hashed.update(torch.get_rng_state().numpy().tobytes())
    return hashed.hexdigest()
