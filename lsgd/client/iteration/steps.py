"""A worker's steps: each begins with a granted iteration, and its end gets the next one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.replica import Replica
from lsgd.client.iteration.rounds import Rounds
from lsgd.client.iteration.step import Event, Step, StepState
from lsgd.errors import LsgdError, NotTrainedError
from lsgd.learning_rate import RateSchedules
from lsgd.schedulers import LOOK_AFTER, Loop, Schedulers, optimizer_of

logger = logging.getLogger("lsgd")

WARN_AFTER_STEPS = 128
"""A worker warns after this many steps in a row without an optimizer step; steps with no_sync() do not count.

GradScaler skips about twenty at its start, and gradient accumulation rarely has more micro-batches than this."""

FAIL_AFTER_STEPS = 1024
"""After this many, it fails: it would never complete an iteration, and not hear of the run's end."""


class Steps:
    """The steps of one worker. A step in which an optimizer steps is an iteration; other steps keep the grant.

    Attributes:
        step: where the worker is in its step; changed here, and by a run that ends in a backward pass.
        called: the optimizers that have been called since the step began, though one may have skipped its step.
    """

    def __init__(self, membership: Membership, replica: Replica, checkpoints: Checkpoints) -> None:
        self.step, self.called = Step(membership.join.worker), set[torch.optim.Optimizer]()
        self.rounds = Rounds(membership, replica, checkpoints, self.step)
        self._membership, self._replica, self._grants = membership, replica, self.rounds.grants
        self.schedules = RateSchedules(
            lambda: self._grants.middle,
            replica.optimizers,
            has_end=lambda: membership.plan.run.has_end or bool(self._grants.steps),
        )
        self.schedulers = Schedulers(
            self._name,
            replica.optimizers,
            checkpoints.extras.rates,
            lambda: [*self.schedules.optimizers, *map(optimizer_of, checkpoints.extras.schedulers())],
        )
        self._resumed = checkpoints.resumed.iterations > 0
        self._outside = 0  # steps of optimizers outside of steps of this worker
        self._idle = 0  # steps in a row in which no optimizer stepped
        self._warned = self._said_aside = False
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in replica.optimizers]
        self._hooks += [o.register_step_post_hook(self._after_step) for o in replica.optimizers]

    @property
    def _name(self) -> str:
        return self._membership.join.worker

    @property
    def _whole(self) -> bool:
        return self._membership.island.size == 1

    @property
    def _at(self) -> int:
        """This worker's place in the script's own loop."""
        return self._membership.welcome.step + self._grants.done

    def begin(self) -> bool:
        """Begin a step; return False if the run has ended."""
        if self.step.is_open:
            raise LsgdError(
                f"{self._name}: begin_step() again before end_step(); end each step, even without optimizer.step()"
            )
        self.rounds.election.check()
        self._check_optimizers()
        begins = self._has_next()
        self.rounds.arm(begun=begins)
        if begins:
            self.step.advance(Event.BEGIN)
            self.called.clear()
            self.schedules.follow()
            self.schedulers.follow(self._loop)
            self.rounds.stopwatch.spend("compute")
        return begins

    def end(self) -> bool:
        """End the step and get the next iteration; return False if the run has ended."""
        if not (self.step.is_open or self.step.is_over or self.step.state is StepState.GIVEN_BACK):
            raise LsgdError(f"{self._name}: end_step() without begin_step(); batches() calls both itself")
        self.close_step()
        self.rounds.arm(begun=False)
        return self._has_next()

    def close_step(self) -> None:
        """End the step, if one has begun, without asking for another."""
        if self.step.state is StepState.BEGUN:
            self._idle = 0 if self.rounds.backward.muted() else self._idle + 1
        self._count()
        if self.step.state in (StepState.BEGUN, StepState.GIVEN_BACK):
            self.step.advance(Event.CLOSE)
        self.called.clear()

    def proceed(self) -> None:
        """Get the next iteration now, where no graph is alive: all optimizers have just stepped.

        Not if its round spans the backward pass, which a pause before the next step would fail for all; nor after the
        last step of the script's own loop; nor in an island, where one process may evaluate while the others wait.
        """
        if self._whole and not self._replica.algorithm.spans_backward and not 0 < self._grants.steps <= self._at:
            self._has_next()

    def accumulate(self) -> None:
        """Expect no optimizer to step in this step: its gradients are only added up."""
        self._idle = -1

    def pause(self) -> None:
        """Give an unused iteration back, and let rounds continue without this worker until it asks again."""
        self._take("paused in the middle of an iteration")
        if not self.step.is_over:
            self._grants.pause(self.rounds.last.committed)

    def _take(self, why: str) -> bool:
        """Take the rest of a step away from it, and drop its round; return whether there was something to take."""
        within = self.step.is_granted
        trained = not self._others()
        self._count(trained=trained)
        self._act(trained=trained)
        if self.rounds.pending:
            self.rounds.drop(why)
        if within:
            self.step.advance(Event.TAKE)
        return self.step.state is StepState.GIVEN_BACK

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Be in a round, which the block ends with an event; an error inside leads back to between two iterations."""
        self._replica.trained.check()
        if self.step.is_granted:
            self.step.advance(Event.TAKE)
        if self.step.state is StepState.GIVEN_BACK:
            self.step.advance(Event.CLOSE)
        self.step.advance(Event.ASK)
        try:
            with self._replica.copies.trained(), self.rounds.saving():
                yield
        except BaseException:
            if self.step.state is StepState.ROUND:
                self.step.advance(Event.FAIL)
            raise

    def finish(self, within_s: float | None = None) -> bool:
        """Take part in a last global round, or in the run's last; return whether that is the consensus.

        ``within_s``: longest wait for an answer of the servers until the run's last; None: it is not waited for.

        Raises:
            NotTrainedError: this worker has completed no iteration, or nobody has.
        """
        if not self.step.is_over:
            self._replica.trained.check()
            self.close_step()
            if (idle := self.idle_error()) is not None:
                raise idle
            self._act()
            if self.rounds.pending and self.rounds.backward.exchange is None:
                with self._replica.copies.trained():
                    self.rounds.before_step()  # models are exchanged even without a backward pass
            elif self.rounds.pending:
                self.rounds.drop("leaves in the middle of an iteration")
            with self._asking():
                self.rounds.finish(within_s)
                self.step.advance(Event.STOP)
            if self.rounds.has_consensus and not self.rounds.last.count:
                raise self._not_trained("the run ends without an iteration of any worker")
        return self.rounds.has_consensus

    def idle_error(self) -> NotTrainedError | None:
        """Return the error if this worker ends without an iteration, else None.

        A newcomer may find that all are granted to others, and one that is resumed that its loop has ended; a stage
        that was over needs none.
        """
        welcome = self._membership.welcome
        begins = not (welcome.newcomer or welcome.step or self._resumed)
        if self._grants.done or self._membership.passed or not (self._outside or begins):
            return None
        if (ending := self._grants.ending) is not None:
            return self._not_trained(f"the run has ended before its first iteration was complete: {ending.reason}")
        steps = f"its optimizers have stepped {self._outside} times outside of the run"
        return self._not_trained(steps if self._outside else "its loop has ended without an iteration")

    def _not_trained(self, why: str) -> NotTrainedError:
        return NotTrainedError(
            f"{self._name} has trained nothing: {why}. Only steps of the run count and are exchanged: draw batches "
            f"with `for batch in worker.batches(loader)`, call begin_step() and end_step(), or use lsgd.wrap"
        )

    @torch.inference_mode(False)  # it is called in evaluations, and the tensors of a round outlive it
    def meet(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return the means over all workers, once all have made this call, between two iterations.

        Raises:
            LsgdError: another worker makes another call, or the iteration is not over.
        """
        self._replica.trained.check()
        within = self._take("meets the others in the middle of an iteration")
        try:
            others = self._others()
            self._say_aside(others)
            with self._asking():
                met = self.rounds.meet(numbers, aside=bool(others))
                self.step.advance(Event.STOP if met is None else Event.MEET)
                if not others:
                    self._replica.trained.note()
        finally:
            if within and not self.step.is_over:
                self.step.advance(Event.TAKE)
        if met is not None and met.error:
            raise LsgdError(met.error)
        return numbers if met is None else met.values

    def _say_aside(self, others: list[str]) -> None:
        """Say once that this worker takes part in no round while it waits in a call, because of other weights."""
        if others and not self._said_aside:
            self._said_aside = True
            logger.info(
                "%s waits in mean() or barrier() with other weights in its model than those that its last step left "
                "(%s): rounds exchange what was trained, so they continue without it until its next iteration; to take "
                "part in them, put the trained weights back before the call",
                *(self._name, ", ".join(others[:2]) + (", ..." if len(others) > 2 else "")),
            )

    def close(self) -> None:
        """Count the last iteration, remove the hooks, and leave."""
        try:
            self.close_step()
        finally:
            for hook in self._hooks:
                hook.remove()
            self.rounds.backward.close()
            self.step.advance(Event.LEAVE)

    def _others(self) -> list[str]:
        """Return the names of parameters with other weights than the trained ones; in an island nobody looks."""
        return self._replica.trained.others() if self._whole else []

    def _count(self, *, trained: bool = True) -> None:
        """Count the granted iteration if an optimizer has stepped since; ``trained``: as in :meth:`_act`."""
        self.rounds.stopwatch.spend("")
        self.rounds.drop_torn()
        if self.step.state is StepState.STEPPED:
            self.step.advance(Event.CLOSE)
            self._grants.complete()
            if self._grants.done == LOOK_AFTER:
                self.schedulers.look(self._loop, LOOK_AFTER)
            if self._whole:
                self._act(trained=trained)
        elif self.step.state is StepState.BEGUN and self.rounds.backward.exchange and not self.rounds.pending:
            self.step.advance(Event.SKIP)  # its gradients were exchanged, so the next step needs a round

    def _act(self, *, trained: bool = True) -> None:
        """Call the algorithm's ``after_step``, if an iteration counts since the last time.

        It changes the weights, so it is left out if those in the model are not ``trained``.
        There the processes of an island may decide together. So in an island it waits for the next call that all of
        them make: a script that fails in one process ends its step too, and the others may never come.
        """
        if self.step.state is StepState.COUNTED:
            self.step.advance(Event.ACT)
            if trained:
                with self._replica.copies.trained():
                    self.rounds.after_step()
                    self._replica.trained.note()

    @property
    def _loop(self) -> Loop:
        run = self._membership.plan.run
        share = run.iterations / self.rounds.seat.world_size if run.iterations else float("inf")
        return Loop(self._at, self._grants.steps, run.has_end, self._grants.middle, share)

    def _check_optimizers(self) -> None:
        """Warn, and later fail, if no joined optimizer steps."""
        if self._idle < WARN_AFTER_STEPS:
            return
        message = (
            f"{self._name}: {self._idle} steps without a step of a joined optimizer, so only {self._grants.done} "
            f"iterations count: optimizer.step() is missing, or its optimizer was created after Worker.join; or "
            f"every step is skipped because gradients are non-finite; or the loop evaluates, which belongs in "
            f"worker.pause(). To accumulate this many micro-batches, use worker.no_sync()"
        )
        if self._idle >= FAIL_AFTER_STEPS:
            raise LsgdError(message)
        if not self._warned:
            self._warned = True
            logger.warning("%s; at %d steps this is an error", message, FAIL_AFTER_STEPS)

    def _has_next(self) -> bool:
        """Get an iteration, and carry out its round; return False if the run has ended."""
        self._act()
        if not self.step.is_granted and not self.step.is_over:
            with self._asking():
                granted = self.rounds.follow()
                self.step.advance(Event.GRANT if granted else Event.STOP)
                self._replica.trained.note()
            if granted:
                self.rounds.ask_ahead()
        return self.step.is_granted

    # -- the optimizers' hooks ---------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Complete the round; if a closure does that, return the step's arguments with the closure wrapped."""
        if self.step.state is StepState.GIVEN_BACK:
            raise LsgdError(
                f"{self._name}: optimizer.step() after worker.pause(), worker.mean() or worker.barrier() in the same "
                f"step: they end this iteration or give it back to the run; call them after the step, or between two "
                f"loops"
            )
        if not self.step.is_over:
            self.schedulers.before_step(optimizer, self._loop)
        if self.rounds.pending and self.rounds.backward.exchange is None:
            self.check_graphs("in the first optimizer's step this algorithm replaces the model")
        closure = closure_in(args, kwargs)
        if closure is None or self.rounds.backward.exchange is None:
            self.rounds.before_step(optimizer)
            return None
        return with_closure(self._evaluated_once(optimizer, closure), args, kwargs)

    def check_graphs(self, why: str) -> None:
        """Raise a LsgdError if a change of the model could come between a forward pass and its backward pass.

        One backward pass before the steps of all optimizers gives each of them gradients. If one has none, a pass of
        its own follows, and its forward pass may have been made.
        """
        several = self._replica.optimizers if len(self._replica.optimizers) > 1 and not self.called else ()
        if missing := [o for o in several if _lacks_gradients(o)]:
            raise LsgdError(
                f"{self._name}: {why}, but no parameter of {type(missing[0]).__name__} has a gradient yet, so a "
                f"forward pass that it needs may lie before that, as in a GAN: pass lsgd.wrap a "
                f"nn.ModuleDict(g=G, d=D) whose parts the loop calls, and choose a method that exchanges models "
                f"between two iterations, such as local or leader"
            )

    def _evaluated_once(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that exchanges its gradients and may run once a step: all workers exchange equally often."""
        evaluated = False

        def evaluate() -> Any:
            nonlocal evaluated
            if evaluated:
                raise LsgdError(
                    f"{self._name}: {type(optimizer).__name__} evaluates its closure twice in one step, but all "
                    f"workers must exchange gradients equally often: once a step. Let it evaluate once (LBFGS: "
                    f"max_iter=1), or choose an algorithm that exchanges models, such as leader"
                )
            evaluated = True
            loss = closure()
            self.rounds.before_step(optimizer)
            return loss

        return evaluate

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.called.add(optimizer)
        self._outside += not self.step.is_open
        # GradScaler always calls a fused optimizer, which skips the step itself if this tensor says so.
        found_inf = getattr(optimizer, "found_inf", None)
        if not (self.rounds.skips or (found_inf is not None and bool(found_inf))):
            self._idle = 0
            if self.step.is_open:
                self.step.advance(Event.STEP)
                self._replica.trained.note()


def _lacks_gradients(optimizer: torch.optim.Optimizer) -> bool:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return bool(trained) and all(p.grad is None for p in trained)


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of an optimizer's step, of which the first is the optimizer; or None."""
    closure = kwargs.get("closure") or (*args, None)[1]
    return closure if callable(closure) else None


def with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an optimizer's step with another closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}
