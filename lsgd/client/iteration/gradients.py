"""Exchanges gradients while the backward pass computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lsgd.algorithms.base import Algorithm, Commit
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.iteration.round import ActiveRound, State
from lsgd.collectives.background import Background
from lsgd.errors import LsgdError
from lsgd.flat import FlatParameters, Slot, window
from lsgd.shards import local, sharded_like


class GradientExchange:
    """Exchanges the gradients of one backward pass per iteration, bucket by bucket.

    A bucket leaves as soon as its gradients are there, while the backward pass continues. The pass ends when all
    buckets are back, so that unscaling, clipping and the optimizer see the exchanged gradients. A parameter that took
    no part in a member's pass counts as zero there. If it took part in nobody's, its gradient stays None, so that the
    optimizer leaves it alone: the last message of a pass counts who has which gradient.

    DistributedDataParallel replaces the gradients at the end of the pass by their mean inside this worker. Then the
    exchange begins after that, and passes that DDP does not reduce only add to the gradients.

    Args:
        flat: parameters; from the first pass on, gradients live in buffers of the same layout.
        complete: called by autograd at the end of the pass; waits for the exchange, and repairs a failed one.
        ddp: what reduces the gradients inside this worker; None: nothing does.
        muted: whether the backward pass under way only adds to the gradients.
    """

    def __init__(
        self,
        flat: FlatParameters,
        algorithm: GradientAlgorithm,
        complete: Callable[[], None],
        ddp: DistributedDataParallel | None = None,
        muted: Callable[[], bool] = bool,
    ) -> None:
        self._muted = muted
        self._algorithm = algorithm
        self._complete, self._ddp = complete, ddp
        self._slots = flat.slots
        self._gradients = [torch.zeros_like(x) for x in flat.buffers]
        self._parameters = [slot.parameter for slot in flat.slots]
        self._views = [self._made(slot) for slot in flat.slots]
        self._padding = [_padding(flat, index) for index in range(len(flat.buffers))]
        self._buckets = algorithm.buckets(self._gradients)
        self._present = torch.empty(len(flat.slots), device=flat.buffers[0].device)
        self._in_buckets = [self._overlap(slot) for slot in flat.slots]
        self._background = Background()
        self._round: ActiveRound | None = None
        self._hooks = [
            _after_accumulation(slot.parameter, self._hook(index, slot)) for index, slot in enumerate(flat.slots)
        ]

    @property
    def hooked(self) -> bool:
        """Whether the hooks are on the parameters that the model has now."""
        return all(slot.parameter is p for slot, p in zip(self._slots, self._parameters, strict=True))

    def _made(self, slot: Slot) -> tuple[Tensor, int]:
        """Return a gradient's view of the vector, and its address."""
        view = sharded_like(slot.parameter, window(self._gradients[slot.buffer], slot))
        return view, local(view).data_ptr()

    def _view(self, index: int) -> Tensor:
        """Return a gradient's view of the vector: another one if ``model.to(...)`` has given it other memory."""
        view, address = self._views[index]
        if local(view).data_ptr() != address:
            self._views[index] = self._made(self._slots[index])
        return self._views[index][0]

    def arm(self, active: ActiveRound | None) -> None:
        """Let the next backward pass exchange its gradients in this round; None: exchange nothing."""
        self._round = active

    def wait(self, active: ActiveRound) -> Commit:
        """Wait for the exchange under way; the commit replaces the gradients by its results.

        Raises:
            ExchangeError: it failed; the gradients are this worker's own.
        """
        self._background.finish()
        return self._replacing(active, self._algorithm.finish(self._buckets))

    def again(self, active: ActiveRound) -> Commit:
        """Exchange gradients whose round was dropped in this round instead, and wait.

        Raises:
            ExchangeError: it failed too.
        """
        self._round = active
        active.to(State.EXCHANGING)
        self._settle_all()  # a new phase's exchange has not seen that backward pass
        for index in range(len(self._buckets)):
            self._exchange(active, index)
        self._conclude(active)
        return self._replacing(active, self._algorithm.finish(self._buckets))

    def forget(self) -> None:
        """Forget the exchange under way: its backward pass has not come to its end."""
        self._background = Background()

    def _replacing(self, active: ActiveRound, commit: Commit) -> Commit:
        """Return a commit that also notes whether the results are finite, and keeps padding at zero."""

        def change(broken: float) -> None:
            commit.change(broken)
            active.finite = not broken
            # An 8-bit codec fills padding with what its block decodes to: if a number is NaN, NaN, which would stay.
            for gradient, padding in zip(self._gradients, self._padding, strict=True):
                gradient.index_fill_(0, padding, 0.0)
            lacking = [index for index, slot in enumerate(self._slots) if slot.parameter.grad is None]
            present = self._present.tolist() if lacking else []
            for index in lacking:
                if present[index]:  # on another worker, perhaps because it is frozen here: all make the same step
                    self._slots[index].parameter.grad = self._view(index)

        return Commit(change, commit.judged)

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
            if self._ddp is None:
                self._settle(index, slot.parameter, slot.name)
            active = self._round
            if active is None or self._muted() or not (self._ddp is None or self._ddp.require_forward_param_sync):
                return
            if active.state is not State.EXCHANGING:
                self._begin(active)
            if self._ddp is None:
                self._check_complete(active, index, slot.name)
                self._mark(active, index)

        return on_gradient

    def _settle(self, index: int, parameter: nn.Parameter, name: str) -> None:
        """Move a parameter's gradient into its view of the buffer."""
        assert parameter.grad is not None
        gradient, view = local(parameter.grad), local(self._view(index))
        if gradient.layout != torch.strided:
            raise LsgdError(
                f"the gradient of {name} is sparse; {type(self._algorithm).__name__} exchanges dense ones only: use "
                f"nn.Embedding(sparse=False), or choose an algorithm that exchanges models, such as leader"
            )
        if gradient.device != view.device:
            raise LsgdError(
                f"{name} is on {gradient.device}, and was on {view.device} at Worker.join; "
                f"{type(self._algorithm).__name__} exchanges gradients there: move the model before the join"
            )
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = self._view(index)

    def _begin(self, active: ActiveRound) -> None:
        if active.state is not State.WAITING:
            raise LsgdError(
                "a second backward pass in an iteration whose gradients have already been exchanged; wrap all but the "
                "last one in `with worker.no_sync():`. A reentrant checkpoint makes passes of its own: use "
                "checkpoint(..., use_reentrant=False)"
            )
        active.to(State.EXCHANGING)
        active.missing = [set() for _ in self._buckets]
        for index, overlapped in enumerate(self._in_buckets):
            for bucket in overlapped:
                active.missing[bucket].add(index)
        # Autograd calls this when the backward pass has computed everything, as in DistributedDataParallel.
        _at_end(lambda: self._end(active) if self._ddp is None else _at_end(lambda: self._end(active)))

    def _check_complete(self, active: ActiveRound, index: int, name: str) -> None:
        """Raise an error if a gradient has grown after a part of it has left."""
        if any(bucket < active.launched for bucket in self._in_buckets[index]):
            raise LsgdError(
                f"the gradient of {name} has come a second time in one backward pass, and the first part of it is "
                f"already being exchanged: a reentrant checkpoint computes its gradients in a pass of its own; use "
                f"checkpoint(..., use_reentrant=False)"
            )

    def _mark(self, active: ActiveRound, index: int) -> None:
        """Record that a gradient is there, and launch complete buckets, always in the same order."""
        for bucket in self._in_buckets[index]:
            active.missing[bucket].discard(index)
        while (launched := active.launched) < len(self._buckets) and not active.missing[launched]:
            device = self._buckets[launched].device
            self._background.start(partial(self._exchange, active, launched), device)
            active.launched += 1
            if active.launched == len(self._buckets):
                self._background.start(partial(self._conclude, active), device)

    def _exchange(self, active: ActiveRound, index: int) -> None:
        assert active.group is not None
        self._algorithm.exchange_bucket(self._buckets[index], index, active.group, active.order)

    def _conclude(self, active: ActiveRound) -> None:
        """Count on how many members each gradient is there, and complete the exchange."""
        assert active.group is not None
        present = [float(slot.parameter.grad is not None) for slot in self._slots]
        self._present.copy_(torch.tensor(present, device="cpu"))
        self._algorithm.count(self._present, active.group)
        self._algorithm.complete()

    def _end(self, active: ActiveRound) -> None:
        """At the end of the pass, launch the remaining buckets and complete the exchange."""
        self._settle_all()
        for index in range(len(self._slots)):
            self._mark(active, index)
        self._complete()

    def _settle_all(self) -> None:
        """Move every parameter's gradient into its view of the buffer; a missing one is zero there."""
        for index, slot in enumerate(self._slots):
            if slot.parameter.grad is None:
                local(self._view(index)).zero_()
            else:
                self._settle(index, slot.parameter, slot.name)


class BackwardPasses:
    """What a worker's backward passes exchange: their gradients, if its algorithm does.

    Args:
        complete: as of :class:`GradientExchange`.

    Attributes:
        exchange: of gradients; None if the algorithm exchanges models.
        muted: whether the pass under way only adds up gradients.
    """

    def __init__(self, flat: FlatParameters, ddp: DistributedDataParallel | None, complete: Callable[[], None]) -> None:
        self.exchange: GradientExchange | None = None
        self.muted: Callable[[], bool] = bool  # no pass does
        self._flat, self._ddp, self._complete = flat, ddp, complete
        self._served: Algorithm | None = None

    def serve(self, algorithm: Algorithm) -> None:
        """Let passes exchange gradients if the algorithm does, as long as the model has the parameters of now."""
        if self._served is algorithm and (self.exchange is None or self.exchange.hooked):
            return
        self.close()
        self._served, self.exchange = algorithm, None
        if isinstance(algorithm, GradientAlgorithm):
            self.exchange = GradientExchange(self._flat, algorithm, self._complete, self._ddp, lambda: self.muted())

    def arm(self, active: ActiveRound | None, algorithm: Algorithm) -> None:
        """Let passes exchange gradients in this round; None: between two steps they exchange nothing."""
        if self.exchange is not None and active is not None:
            self._flat.find()  # the script may have replaced parameters between two steps
            self.serve(algorithm)
        if self.exchange is not None:
            self.exchange.arm(active)

    def forget(self) -> None:
        """Forget the exchange under way, and exchange nothing until the next round."""
        if self.exchange is not None:
            self.exchange.arm(None)
            self.exchange.forget()

    def close(self) -> None:
        """Remove the hooks from the backward pass."""
        if self.exchange is not None:
            self.exchange.close()


def _after_accumulation(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Call a hook with each complete gradient; also of a parameter that is frozen just now, where torch refuses it."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return handle


def _at_end(call: Callable[[], None]) -> None:
    """Call something at the end of this backward pass, after what is already to be called there, such as DDP's."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _padding(flat: FlatParameters, buffer: int) -> Tensor:
    """Return the indices of the elements of a flat buffer that belong to no parameter."""
    free = torch.ones(flat.buffers[buffer].numel(), dtype=torch.bool, device=flat.buffers[buffer].device)
    for slot in flat.slots:
        if slot.buffer == buffer:
            free[slot.offset : slot.offset + slot.numel] = False
    return free.nonzero().view(-1)
