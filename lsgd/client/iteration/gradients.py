"""Exchanges gradients while the backward pass computes them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.iteration.round import ActiveRound, State
from lsgd.collectives.background import Background
from lsgd.errors import DetachedError, LsgdError
from lsgd.flat import FlatParameters, Slot
from lsgd.shards import local, sharded_like


class GradientExchange:
    """Replaces the gradients of one backward pass an iteration by what the members agree on, bucket by bucket.

    A bucket leaves as soon as the gradients in it are there, and while the backward pass goes on; the pass ends when
    all have come back, so that unscaling, clipping and the optimizer see the exchanged gradients. A parameter that
    took no part in the pass counts as zero. Passes inside :attr:`muted` only add to the gradients.

    Args:
        flat: the model's parameters; the gradients live in buffers of the same layout from the first pass on.
        algorithm: what to do with a bucket.
        complete: called by autograd at the end of the pass, to wait for the exchange and to mend a failed one.
    """

    def __init__(self, flat: FlatParameters, algorithm: GradientAlgorithm, complete: Callable[[], None]) -> None:
        self.muted = False
        self._algorithm = algorithm
        self._complete = complete
        self._slots = flat.slots
        self._gradients = [torch.zeros_like(x) for x in flat.buffers]
        views = flat.views(self._gradients)
        self._views = [sharded_like(slot.parameter, view) for slot, view in zip(flat.slots, views, strict=True)]
        self._padding = [_padding(flat, index) for index in range(len(flat.buffers))]
        self._buckets = algorithm.buckets(self._gradients)
        self._in_buckets = [self._overlap(slot) for slot in flat.slots]
        self._background = Background()
        self._round: ActiveRound | None = None
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(index, slot))  # type: ignore[no-untyped-call]
            for index, slot in enumerate(flat.slots)
        ]

    def arm(self, active: ActiveRound | None) -> None:
        """Let the next backward pass exchange its gradients in this round; None: let it exchange nothing."""
        self._round = active

    def wait(self, active: ActiveRound) -> None:
        """Wait for the exchange that is under way and put its results in the place of the gradients.

        Raises:
            ExchangeError: it failed; the gradients are those that this worker computed.
        """
        self._background.finish()
        self._finish(active)

    def again(self, active: ActiveRound) -> None:
        """Exchange the gradients of a pass whose round was dropped in another round, and wait.

        Raises:
            ExchangeError: it failed too.
        """
        self._round = active
        active.to(State.EXCHANGING)
        self._settle_all()  # another phase's algorithm may have to make up for a pass of the last one's
        for index in range(len(self._buckets)):
            self._exchange(active, index)
        self._algorithm.complete()
        self._finish(active)

    def _finish(self, active: ActiveRound) -> None:
        assert active.group is not None
        active.finite = self._algorithm.finish(self._buckets, active.group)
        # In 8 bits, padding gets what its block decodes to: NaN if one number is NaN, which would stay for ever.
        for gradient, padding in zip(self._gradients, self._padding, strict=True):
            gradient.index_fill_(0, padding, 0.0)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _overlap(self, slot: Slot) -> list[int]:
        """Return the indices of the buckets that hold a part of a parameter's gradient."""
        start = self._gradients[slot.buffer].data_ptr() + slot.offset * slot.parameter.element_size()
        end = start + slot.numel * slot.parameter.element_size()
        return [
            index
            for index, bucket in enumerate(self._buckets)
            if bucket.data_ptr() < end and start < bucket.data_ptr() + bucket.nbytes
        ]

    def _hook(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            self._settle(index, slot.parameter, slot.name)
            active = self._round
            if self.muted or active is None:
                return
            if active.state is not State.EXCHANGING:
                self._begin(active)
            self._mark(active, index)

        return on_gradient

    def _settle(self, index: int, parameter: nn.Parameter, name: str) -> None:
        """Move a parameter's gradient to its window."""
        assert parameter.grad is not None
        gradient, view = local(parameter.grad), local(self._views[index])
        if gradient.layout != torch.strided:
            raise DetachedError(
                f"the gradient of {name} is sparse; {type(self._algorithm).__name__} exchanges dense ones "
                f"(nn.Embedding: sparse=False), or choose an algorithm that exchanges models, such as leader"
            )
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = self._views[index]

    def _begin(self, active: ActiveRound) -> None:
        if active.state is not State.WAITING:
            raise LsgdError(
                "a second backward pass in an iteration whose gradients were exchanged already; wrap all but the "
                "last one in `with worker.no_sync():`"
            )
        active.to(State.EXCHANGING)
        active.missing = [set() for _ in self._buckets]
        for index, overlapped in enumerate(self._in_buckets):
            for bucket in overlapped:
                active.missing[bucket].add(index)
        # Called by autograd when this backward pass has computed everything, as DistributedDataParallel does.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(active))

    def _mark(self, active: ActiveRound, index: int) -> None:
        """Note that a gradient is there, and launch the buckets that are complete; always in the same order."""
        for bucket in self._in_buckets[index]:
            active.missing[bucket].discard(index)
        while (launched := active.launched) < len(self._buckets) and not active.missing[launched]:
            device = self._buckets[launched].device
            self._background.start(partial(self._exchange, active, launched), device)
            active.launched += 1
            if active.launched == len(self._buckets):
                self._background.start(self._algorithm.complete, device)

    def _exchange(self, active: ActiveRound, index: int) -> None:
        assert active.group is not None
        self._algorithm.exchange_bucket(self._buckets[index], index, active.group, active.order)

    def _end(self, active: ActiveRound) -> None:
        """Launch what is left at the end of the pass, and see the exchange through."""
        self._settle_all()
        for index in range(len(self._slots)):
            self._mark(active, index)
        self._complete()

    def _settle_all(self) -> None:
        """Have the gradient of every parameter in its window, zero where there is none."""
        for index, slot in enumerate(self._slots):
            if slot.parameter.grad is None:
                local(self._views[index]).zero_()
                slot.parameter.grad = self._views[index]
            else:
                self._settle(index, slot.parameter, slot.name)


def _padding(flat: FlatParameters, buffer: int) -> Tensor:
    """Return the indices of the elements of a flat buffer that belong to no parameter."""
    free = torch.ones(flat.buffers[buffer].numel(), dtype=torch.bool, device=flat.buffers[buffer].device)
    for slot in flat.slots:
        if slot.buffer == buffer:
            free[slot.offset : slot.offset + slot.numel] = False
    return free.nonzero().view(-1)
