"""Makes a script a worker of a run without changing its loop: torch's own hooks call begin_step, close_step and pause.

An iteration begins at the model's first forward pass in training mode with gradients, and ends when all optimizers have
stepped. There, where no graph is alive, the round comes that changes the model; one that spans the backward pass begins
before the next forward pass. Forward passes in evaluation mode are an evaluation.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from lsgd.algorithms.base import clones
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.control.joining import unwrapped
from lsgd.client.control.replicas import bare
from lsgd.client.data.passes import Pass
from lsgd.client.iteration.rounds import Rounds
from lsgd.client.iteration.step import StepState
from lsgd.client.iteration.steps import WARN_AFTER_STEPS, Steps, closure_in, with_closure
from lsgd.client.worker import Worker, check_steps
from lsgd.errors import ConfigError, LsgdError
from lsgd.flat import written_buffers

logger = logging.getLogger("lsgd")

T = TypeVar("T")

EVALUATES_FROM = 2
"""How many forward passes in evaluation mode, one after the other, are an evaluation: one may be a teacher's."""

COPY_EVALUATES_FROM = 10
"""How many of a copy of the model, such as a teacher that sees some views of each batch, or a mean of the weights."""


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    steps: int = 0,
    step: int = 0,
    accumulate: int = 1,
    **options: Any,
) -> "WrappedWorker":
    """Join the run, and let the script's own loop be a worker of it; return the worker.

    ::

        worker = lsgd.wrap(model, optimizer, steps=max_steps)
        loader = worker.shard(loader)        # its passes end with the run
        ...                                  # the loop, and at the end of each epoch: if worker.stopped: break
        worker.finish()
        if worker.first:
            save(model)

    Model and optimizers stay the objects they are, with hooks. The loss is what the model returns as ``.loss`` or as a
    scalar; otherwise call ``worker.report``.

    Args:
        model: as for :meth:`Worker.join`. The loop must call this object, not its ``forward``; of a container that
            cannot be called, such as a ``ModuleDict`` of a GAN's networks, its parts.
        optimizer: as there. Of several optimizers each steps once in an iteration.
        steps: optimizer steps of the script's own loop. The run has those of all workers, if the plan has no length.
        step: where that loop begins, if the script has resumed by itself; ``worker.step`` is where it is to begin.
        accumulate: micro-batches before each step; only algorithms that exchange gradients need to know.
        options: others of :meth:`Worker.join`.

    Raises:
        ConfigError: an argument is wrong; otherwise as Worker.join.
    """
    if accumulate < 1:
        raise ConfigError(f"accumulate = {accumulate}: the number of micro-batches before a step is 1 or more")
    check_steps(steps)
    hooks = _Hooks(model, unwrapped(optimizer), accumulate)
    try:
        worker = WrappedWorker.join(model, optimizer, step=step, **options)
    except BaseException:
        hooks.close()
        raise
    worker.hooks, worker.steps = hooks, steps
    hooks.attach(worker)
    return worker


class WrappedWorker(Worker):
    """A worker whose steps hooks begin and end; :func:`wrap` makes one."""

    hooks: "_Hooks"

    def report(self, loss: Tensor | float) -> None:
        """Record the loss of a batch, from now on instead of what the model returns."""
        self.hooks.reports = False
        super().report(loss)

    def batches(self, loader: Iterable[T]) -> Pass[T]:
        """Return :meth:`Worker.batches`, whose steps replace those of the hooks."""
        self.hooks.close()
        self._checkpoints.data.forget()
        return super().batches(loader)

    def at_exit(self) -> None:
        """Say that the script has ended without :meth:`finish`, and leave: too early, for the launcher."""
        if self._open and self.hooks.worker is not None and not self.has_consensus:
            logger.error(
                "%s: the script ends after %d steps without worker.finish(), so its model is not the run's consensus, "
                "and what it has saved is this worker's own: call worker.finish() after the loop, and save after it",
                *(self.name, self.iterations),
            )
        super().at_exit()

    def _end(self, *, failed: bool = False, reason: str = "") -> None:
        self.hooks.close()
        super()._end(failed=failed, reason=reason)

    def mean(self, numbers: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return :meth:`Worker.mean`; an evaluation after it is another one, and steps aside anew."""
        means = super().mean(numbers)
        self.hooks.forget_passes()
        return means


class _Hooks:
    """The hooks on a model and its optimizers, which drive a worker's steps from the join on.

    Attributes:
        worker: None before the join, and once the hooks are removed.
        reports: whether to report what the model returns as its loss.
    """

    _steps: Steps  # the worker's, from the join on

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], accumulate: int) -> None:
        self.worker: WrappedWorker | None = None
        self.reports = True
        self._roots, self._optimizers, self._accumulate = roots(model), optimizers, accumulate
        self._in_closure = False  # which an optimizer's step evaluates
        self._passes = 0  # forward passes since the optimizers stepped
        self._without = Counter[bool]()  # forward passes without gradients, one after the other; of copies: False
        self._buffers: list[Tensor] = []  # copies of the model's before a forward pass after the end of the run
        self._said: set[str] = set()
        before, after = eager(self._before_forward), eager(self._after_forward)
        removable: list[Any] = [
            root.register_forward_pre_hook(before, prepend=True, with_kwargs=True) for root in self._roots
        ]
        removable += [root.register_forward_hook(after) for root in self._roots]
        removable += [o.register_step_pre_hook(self._before_step) for o in optimizers]
        self._removable = removable

    def attach(self, worker: WrappedWorker) -> None:
        """Drive the worker's steps. Its own hooks on the optimizers run after those before a step, and before these."""
        self.worker, self._steps = worker, worker._steps
        worker.accumulate_while(lambda: self._passes % self._accumulate > 0)
        worker._checkpoints.data.restore_between()
        worker._checkpoints.data.note()  # checkpoints of the next round count the batches drawn by now
        self._removable += [o.register_step_post_hook(self._after_step) for o in self._optimizers]

    def close(self) -> None:
        """Remove the hooks."""
        if self.worker is not None:
            self.worker.accumulate_while(bool)
        self.worker = None
        for hook in self._removable:
            hook.remove()

    def _in_step(self, closure: Callable[[], T]) -> T:
        """Return what a closure evaluates, whose forward passes belong to the step of its optimizer."""
        before, self._in_closure = self._in_closure, True
        try:
            return closure()
        finally:
            self._in_closure = before

    # -- the model's -------------------------------------------------------------------------------------------

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        worker = self.worker
        if worker is None:
            return
        training = bare(model).training  # eval() may have been called inside of DDP
        own, trains = self._is_root(model), training and torch.is_grad_enabled()
        if self._in_closure or self._steps.step.state is StepState.ROUND:
            pass  # it belongs to an optimizer's step, or is a probe
        elif own and trains:
            self._without.clear()
            self._next_step(worker)
            worker._first.note((args, kwargs))
            self._passes += 1
        elif not (training if own else trains):  # in training mode it belongs to the step, as for pseudo-labels
            self._evaluate(worker, own=own)  # or that of a copy of the model, which has its hooks
        if own:
            self._buffers = clones(written_buffers(model)) if worker.stopped and training else []

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_root(model):
            return
        for x, kept in zip(written_buffers(model), self._buffers, strict=False):  # the statistics of batch norm
            x.data.copy_(kept)  # a change that the backward pass does not see
        self._buffers = []
        if self.worker is not None and len(self._optimizers) > 1:
            _guard(output, self._steps.rounds, self.worker.name, type(model).__name__)
        if self.worker is not None and self.reports and model.training and torch.is_grad_enabled():
            if (loss := loss_in(output)) is not None:
                self._steps.rounds.election.losses.add(loss)

    def _next_step(self, worker: WrappedWorker) -> None:
        """Begin an iteration, or its next micro-batch; with several optimizers a pass may be for the next of them."""
        if self._steps.rounds.skips:  # which ends the iteration, though a GradScaler has not let all optimizers step
            self._steps.called.clear()
        if self._steps.called:
            self._warn_of_missing(worker)
            return
        if self._steps.step.is_open:
            self._warn_of_exchanges(worker)
            worker.close_step()
        worker.begin_step()

    def forget_passes(self) -> None:
        """Count the forward passes of an evaluation from here on."""
        self._without.clear()

    def _evaluate(self, worker: WrappedWorker, *, own: bool) -> None:
        """Step aside at the start of an evaluation, unless an iteration is under way or none has been."""
        self._without[own] += 1
        many = EVALUATES_FROM if own else COPY_EVALUATES_FROM
        between = self._steps.step.state in (StepState.AWAY, StepState.GRANTED, StepState.COUNTED, StepState.GIVEN_BACK)
        if self._without[own] == many and self._steps.rounds.grants.done and between:
            worker.step_aside()

    # -- the optimizers' ---------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        worker, closure = self.worker, closure_in(args, kwargs)
        if worker is None:
            return None
        step = self._steps.step
        if step.is_open and closure is None:
            self._check_accumulation(worker)
        if not (step.is_open or worker.stopped):  # the forward pass did not call the model
            if _exchanges_gradients(worker) and closure is None:
                raise LsgdError(
                    f"{worker.name}: optimizer.step() without a forward pass of the wrapped model, in which "
                    f"{worker.algorithm.name} begins an iteration: call model(...), not model.forward(...) or a part "
                    f"of it, in training mode"
                )
            if closure is None and step.state is not StepState.GRANTED:
                self._steps.check_graphs(
                    "in the first optimizer's step a round may come, because no call of the model did"
                )
            self._next_step(worker)
        if worker.stopped:
            self._say_over(worker)
            worker._replica.drop_gradients(optimizer)
            closure = closure and partial(_without_gradients, worker, optimizer, closure)
        return closure and with_closure(partial(self._in_step, closure), args, kwargs)

    def _check_accumulation(self, worker: WrappedWorker) -> None:
        """Raise a LsgdError if the last backward pass did not exchange gradients: micro-batches are left over."""
        if self._passes % self._accumulate and _exchanges_gradients(worker):
            raise LsgdError(
                f"{worker.name}: optimizer.step() after {self._passes} forward passes, but with accumulate="
                f"{self._accumulate} one backward pass in {self._accumulate} exchanges gradients: let each epoch have "
                f"a multiple of {self._accumulate} batches; or leave out accumulate, and put all backward passes but "
                f"a step's last one into `with worker.no_sync():`"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (worker := self.worker) is not None and len(self._steps.called) == len(self._optimizers):
            worker.close_step()
            worker._checkpoints.data.note()
            self._passes = 0
            self._steps.proceed()

    def _is_root(self, model: nn.Module) -> bool:
        return any(root is model for root in self._roots)

    # -- what is said once -------------------------------------------------------------------------------------

    def _say(self, what: str, message: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(message, *values)

    def _say_over(self, worker: WrappedWorker) -> None:
        """Say that steps change nothing, from the second one on: the first one's batch may be from before the end."""
        if "ended" not in self._said:
            self._said.add("ended")
            return
        left = f"{max(1, worker.steps - worker.step)} more of " if worker.steps else ""
        self._say(
            "over",
            "%s: the run has ended after %d iterations of this worker, and its model is final: %sthis script's steps "
            "change nothing; to end its loop, too: if worker.stopped: break",
            *(worker.name, worker.iterations, left),
        )

    def _warn_of_missing(self, worker: WrappedWorker) -> None:
        if self._passes >= WARN_AFTER_STEPS:
            missing = [type(o).__name__ for o in self._optimizers if o not in self._steps.called]
            self._say(
                "missing",
                "%s: %d forward passes in one iteration, in which %s has not stepped: an iteration counts when all "
                "optimizers have; leave out of lsgd.wrap those that do not step as often as the others",
                *(worker.name, self._passes, ", ".join(missing)),
            )

    def _warn_of_exchanges(self, worker: WrappedWorker) -> None:
        exchanged = _exchanges_gradients(worker) and not self._steps.rounds.pending
        if self._accumulate == 1 and self._passes > 1 and exchanged:
            self._say(
                "accumulates",
                "%s: gradients are exchanged in every micro-batch; to exchange once in a step of N, pass "
                "accumulate=N to lsgd.wrap (a GradScaler that skips steps needs nothing)",
                worker.name,
            )


def roots(model: nn.Module) -> list[nn.Module]:
    """Return what a loop calls of a model: itself, or of a container that cannot be called what is in it."""
    if "forward" in vars(model) or type(model).forward is not nn.Module.forward:
        return [model]
    return [root for child in model.children() for root in roots(child)]


def _exchanges_gradients(worker: WrappedWorker) -> bool:
    return isinstance(worker._replica.algorithm, GradientAlgorithm)


def _guard(output: Any, rounds: Rounds, worker: str, model: str) -> None:
    """Raise a LsgdError in a backward pass that reaches what a model returned before a round changed its weights."""
    made = rounds.last.committed

    def check(_: Tensor) -> None:
        if rounds.last.committed > made:
            raise LsgdError(
                f"{worker}: this backward pass needs a forward pass of {model} that was made before round "
                f"{rounds.last.committed}, which has changed its weights since: a round comes when all optimizers have "
                f"stepped, so make the forward passes of the next turn after the last of these steps, not between them"
            )

    for each in (output, *_items(output)):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(check)  # type: ignore[no-untyped-call]


def _without_gradients(worker: WrappedWorker, optimizer: torch.optim.Optimizer, closure: Callable[[], T]) -> T:
    """Return the loss that a closure computes, and drop the optimizer's gradients."""
    loss = closure()
    worker._replica.drop_gradients(optimizer)
    return loss


def eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile does not trace.

    In a pickled model, one that does nothing takes its place: Python's own, so that reading it needs no lsgd.
    """

    class Hook:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def __call__(self, *args: Any) -> None:
            hook(*args)

        def __deepcopy__(self, memo: object) -> Self:
            return self  # as functions do

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (nullcontext(), "__exit__")

    return Hook()


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what a model has returned: ``.loss``, or the first scalar with gradients; None: there is none.

    It looks into tuples, lists and dicts, one level deep. A tensor with one element is a scalar only without
    dimensions, but for ``.loss`` with one: else it may be what the model predicts of a batch of one.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found, dimensions in ((named, 1), *((each, 0) for each in (output, *_items(output)))):
        if isinstance(found, Tensor) and found.numel() == 1 and found.dim() <= dimensions and found.requires_grad:
            return found.detach()
    return None


def _items(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        yield from output.values()
    elif isinstance(output, tuple | list):
        yield from output
