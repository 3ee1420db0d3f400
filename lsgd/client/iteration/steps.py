"""A worker's steps: each begins with a granted iteration, and its end gets the next one."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.control.joining import Membership
from lsgd.client.iteration.replica import Replica
from lsgd.client.iteration.rounds import Rounds
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
        useful: whether an optimizer has made this step, or it added up gradients in ``no_sync()``.
    """

    def __init__(self, membership: Membership, replica: Replica, checkpoints: Checkpoints) -> None:
        self.rounds = Rounds(membership, replica, checkpoints)
        run, self._grants = membership.plan.run, self.rounds.grants
        self._run = run
        self.schedules = RateSchedules(
            lambda: self._grants.middle,
            replica.optimizers,
            has_end=lambda: run.has_end or bool(self._grants.steps),
        )
        self._name = membership.join.worker
        self._whole = membership.island.size == 1
        self._replica = replica
        self._began = membership.welcome.step
        self.schedulers = Schedulers(
            self._name,
            replica.optimizers,
            checkpoints.rates,
            lambda: [*self.schedules.optimizers, *map(optimizer_of, checkpoints.schedulers())],
        )
        self._begun = False
        self._stepped = False
        self._outside = 0  # steps of optimizers outside of steps of this worker
        self._followed = True  # the algorithm's after_step has run for the last iteration
        self.useful = False
        self._idle = 0  # steps in a row that were not useful
        self._warned = False
        self._paused = False  # since the last iteration was granted
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in replica.optimizers]
        self._hooks += [o.register_step_post_hook(self._after_step) for o in replica.optimizers]

    def begin(self) -> bool:
        """Begin a step; return False if the run has ended."""
        if self._begun:
            raise LsgdError(
                f"{self._name}: begin_step() again before end_step(); end each step, even without optimizer.step()"
            )
        self.rounds.election.check()
        self._check_optimizers()
        self.useful = False
        self._begun = self._has_next()
        self.rounds.arm(begun=self._begun)
        if self._begun:
            self.rounds.stopwatch.spend("compute")
        return self._begun

    def end(self) -> bool:
        """End the step and get the next iteration; return False if the run has ended."""
        if not self._begun and not self._grants.stopped:
            raise LsgdError(f"{self._name}: end_step() without begin_step(); batches() calls both itself")
        self.close_step()
        self.rounds.arm(begun=False)
        return self._has_next()

    def close_step(self) -> None:
        """End the step, if one has begun, without asking for another."""
        self._count()
        self._idle += self._begun and not self.useful
        self._begun = False

    def pause(self) -> None:
        """Give an unused iteration back, and let rounds continue without this worker until it asks again."""
        self._count()
        self._follow()
        if self.rounds.pending:
            self.rounds.drop("paused in the middle of an iteration")
        if not self._grants.stopped:
            self._paused = self._begun or self._grants.granted
            self._grants.pause(self.rounds.committed)

    def finish(self, *, waits: bool = False) -> bool:
        """Take part in a last global round, or with ``waits`` the run's last; return whether that is the consensus.

        Raises:
            NotTrainedError: this worker has completed no iteration, and has trained without asking, or nobody has.
        """
        if not self._grants.stopped:
            self._replica.check()
            self.close_step()
            if self._outside and not self._grants.done:
                raise self._not_trained(f"its optimizers have stepped {self._outside} times outside of the run")
            self._follow()
            if self.rounds.pending and self.rounds.gradients is None:
                self.rounds.before_step()  # models are exchanged even without a backward pass
            elif self.rounds.pending:
                self.rounds.drop("leaves in the middle of an iteration")
            with self.rounds.saving():
                self.rounds.finish(waits=waits)
            if self.rounds.has_consensus and not self.rounds.count:
                raise self._not_trained("the run ends without an iteration of any worker")
        return self.rounds.has_consensus

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
        self._replica.check()
        self._count()
        self._follow()
        if self.rounds.pending:
            self.rounds.drop("meets the others in the middle of an iteration")
        self._paused = self._begun or self._grants.granted
        with self.rounds.saving():
            met = self.rounds.meet(numbers)
        if met is not None and met.error:
            raise LsgdError(met.error)
        return numbers if met is None else met.values

    def close(self) -> None:
        """Count the last iteration, and remove the hooks."""
        self.close_step()
        for hook in self._hooks:
            hook.remove()
        self.rounds.close()

    def _count(self) -> None:
        """Count the granted iteration if an optimizer has stepped since."""
        self.rounds.stopwatch.spend("")
        self.rounds.drop_torn()
        if self._stepped and self._grants.granted:
            self._grants.complete()
            if self._grants.done == LOOK_AFTER:
                self.schedulers.look(self._loop, LOOK_AFTER)
            self._followed = False
            if self._whole:
                self._follow()
        elif self.rounds.gradients is not None and not self.rounds.pending:
            # The step was skipped, but its gradients were exchanged: the next step needs a round.
            self._grants.granted = False
        self._stepped = False

    def _follow(self) -> None:
        """Call the algorithm's ``after_step``.

        There the processes of an island may decide together. So in an island it waits for the next call that all of
        them make: a script that fails in one process ends its step too, and the others may never come.
        """
        if self._followed:
            return
        self._followed = True
        self.rounds.after_step()

    @property
    def _loop(self) -> Loop:
        all_ = self._run.iterations
        share = all_ / self.rounds.world_size if all_ else float("inf")
        step = self._began + self._grants.done
        return Loop(step, self._grants.steps, self._run.has_end, self._grants.middle, share)

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
        self._follow()
        if not self._grants.granted and not self._grants.stopped:
            self._replica.check()
            with self.rounds.saving():
                granted = self.rounds.follow()
            if granted:
                self.rounds.ask_ahead()
            self._paused = False
        if self._grants.stopped or not self._grants.granted:
            return False
        self.schedules.follow()
        self.schedulers.follow(self._loop)
        return True

    # -- the optimizers' hooks ---------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Complete the round; if a closure does that, return the step's arguments with the closure wrapped."""
        if self._paused:
            raise LsgdError(
                f"{self._name}: optimizer.step() after worker.pause(), worker.mean() or worker.barrier() in the same "
                f"step: they end this iteration or give it back to the run; call them after the step, or between two "
                f"loops"
            )
        if not self._grants.stopped:
            self.schedulers.before_step(optimizer, self._loop)
        closure = closure_in(args, kwargs)
        if closure is None or self.rounds.gradients is None:
            self.rounds.before_step(optimizer)
            return None
        return with_closure(self._evaluated_once(optimizer, closure), args, kwargs)

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
        self._outside += not self._begun
        active = self.rounds.active
        # GradScaler always calls a fused optimizer, which skips the step itself if this tensor says so.
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = (active is not None and active.skipped) or (found_inf is not None and bool(found_inf))
        if not skipped:
            self.useful, self._idle, self._stepped = True, 0, True


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
