"""What a worker reports about its training: its loss, for elections, and its learning rate."""

import math
from collections.abc import Callable

from torch import Tensor

from lsgd.client.control.joining import Membership
from lsgd.client.iteration.replica import Replica
from lsgd.client.iteration.tally import Tally
from lsgd.errors import ConfigError
from lsgd.learning_rate import Fallen
from lsgd.probe import probe_loss

PROBES_A_PERIOD = 8
"""How often a probe is evaluated between two rounds, at most."""


class Standing:
    """The loss and the learning rate in a worker's requests.

    Any request may open a round, and the worker cannot know which one will. So a request evaluates the probe if its
    last value is from before the last round, or an eighth of a period old.

    Args:
        membership: its place in the run.
        replica: what it trains; its algorithm says how leaders are elected.
        tally: what it has done.
        resumed: whether its model is from a checkpoint.
    """

    def __init__(self, membership: Membership, replica: Replica, tally: Tally, *, resumed: bool = False) -> None:
        schedules = [phase.algorithm.schedule() for phase in membership.plan.phases]
        self._name = membership.join.worker
        self._needs_probe = any(schedule.election == "probe" for schedule in schedules)
        self._replica = replica
        self._tally = tally
        self._resumed = resumed
        self._fallen = Fallen()
        self._evaluate: Callable[[], Tensor | float] | None = None
        self._probed: float | None = None
        self._probed_at = (-1, 0)  # the last round then, and the iterations made

    def register(self, evaluate: Callable[[], Tensor | float]) -> None:
        """Register a probe, instead of an earlier one."""
        self._evaluate, self._probed_at = evaluate, (-1, 0)

    def check(self) -> None:
        """Check that there is a probe if a phase of the plan elects by it.

        Raises:
            ConfigError: none is registered.
        """
        if self._needs_probe and self._evaluate is None:
            raise ConfigError(
                f'{self._name}: the plan has election = "probe", but this worker has no probe; register one after '
                f"Worker.join: worker.probe(lambda: criterion(model(x), y)), with the same batch on all workers; or "
                f'set election = "random"'
            )

    def loss(self) -> float | None:
        """Return the loss, for a request that may open a round; None if there is none yet."""
        schedule, tally = self._replica.algorithm.settings.schedule(), self._tally
        if schedule.election != "probe" or self._evaluate is None:
            return tally.losses.mean()
        if not (tally.committed or self._resumed):
            return None  # it does not have the run's model yet
        committed, done = self._probed_at
        if committed != tally.committed or tally.done - done >= max(1, schedule.local_period // PROBES_A_PERIOD):
            with tally.spending("exchange"):
                self._probed = probe_loss(self._replica.model, self._evaluate)
            self._probed_at = (tally.committed, tally.done)
        return self._probed

    def rate(self) -> float | None:
        """Return the learning rate if it has fallen; None before the first iteration, when it may not be set yet."""
        return self._fallen.rate(self._replica.optimizers) if self._tally.done else None

    def trouble(self) -> str:
        """Return in words why this worker leads only if nobody has a finite loss; empty if it may lead."""
        so = "so it leads only if no worker has a finite loss"
        if self._replica.algorithm.settings.schedule().election == "probe":
            finite = self._probed is None or math.isfinite(self._probed)
            return "" if finite else f"has a probe with a non-finite loss, {so}; lower the learning rate"
        trouble = self._tally.losses.trouble()
        advice = "call worker.report(loss) after each step, and lower the learning rate if the loss is non-finite"
        return f"{trouble}, {so}; {advice}" if trouble else ""
