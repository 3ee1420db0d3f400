"""What a worker reports: its losses, the user's own numbers, and its time by use."""

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from lsgd.client.checkpoint.checkpoints import Resumed
from lsgd.client.control.joining import Membership
from lsgd.client.groups.staging import Copier, Copying, copier_of
from lsgd.client.iteration.replica import Replica
from lsgd.errors import ConfigError
from lsgd.observer import observer
from lsgd.probe import probe_loss
from lsgd.protocol.messages import MAX_LOGGED, MAX_LOGGED_NAME

logger = logging.getLogger("lsgd")

MAX_PENDING = 64
"""Most losses on their way from the GPU. Beyond that, the GPU is far behind, and the oldest is waited for."""

PROBES_A_PERIOD = 8
"""How often a probe is evaluated between two rounds, at most."""

Spent = Literal["", "compute", "waiting", "exchange"]
"""What the training thread is busy with; empty: the time between two steps, which is not reported."""

_NAME = re.compile(rf"[\w./-]{{1,{MAX_LOGGED_NAME}}}", re.ASCII)


class LossWindow:
    """Mean of the last ``size`` losses; ``before`` are those from a checkpoint.

    A loss on a GPU is copied to pinned memory after the work that computes it, and read once the copy is done. So
    the mean may be a few batches old, but nothing waits for the GPU.

    Args:
        copiers: returns what copies between a device and host memory; None if the device is the host.
    """

    def __init__(
        self,
        size: int,
        before: Sequence[float] = (),
        copiers: Callable[[torch.device], Copier | None] = copier_of,
    ) -> None:
        self._values: deque[float] = deque(before, maxlen=size)
        self._pending: deque[tuple[Tensor, Copying]] = deque()
        self._copiers = copiers

    def add(self, loss: Tensor | float) -> None:
        """Record the loss of a batch; raise a ConfigError for anything but one number."""
        one = isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
        copier = self._copiers(loss.device) if isinstance(loss, Tensor) and one else None
        if not isinstance(loss, Tensor) or copier is None:
            self._values.append(_loss(loss))
            return
        loss = loss.detach().reshape(())
        host = copier.host_like(loss)
        self._pending.append((host, copier.begin(host, loss)))

    @property
    def values(self) -> list[float]:
        """The losses that have arrived, oldest first."""
        self.mean()
        return list(self._values)

    def mean(self) -> float | None:
        """Return the mean of the losses that have arrived; NaN if one of them is, None before the first."""
        while self._pending and (len(self._pending) > MAX_PENDING or self._pending[0][1].query()):
            host, copying = self._pending.popleft()
            copying.synchronize()
            self._values.append(float(host))
        return sum(self._values) / len(self._values) if self._values else None

    def broken(self) -> str:
        """Return that the mean is not finite, and what to do; empty if it is finite, or not known yet."""
        mean = self.mean()
        if mean is None or math.isfinite(mean):
            return ""
        return f"reports losses that are not finite ({mean:g}): lower its learning rate, or look at its batches"

    def trouble(self) -> str:
        """Return why the mean cannot elect this worker; empty if it can."""
        mean = self.mean()
        if mean is None:
            return "" if self._pending else "has reported no loss"
        return "" if math.isfinite(mean) else f"has reported non-finite losses (mean {mean:g})"


class Logged:
    """The last number logged under each name, all finite: lsgd's own, then the script's.

    ``numbers`` is replaced, so that any thread can read it.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self._of_script: dict[str, float] = {}
        self._own: dict[str, float] = {}

    def add(self, numbers: Mapping[str, Tensor | float]) -> None:
        """Record numbers, all or none. A non-finite number removes its name until a finite one comes.

        Raises:
            ConfigError: a name or a number is invalid, or there are too many names.
        """
        merged = self._of_script | numbers_of(numbers, "log")
        merged = {name: number for name, number in merged.items() if math.isfinite(number)}
        if len(merged) > MAX_LOGGED:
            raise ConfigError(
                f"log() takes at most {MAX_LOGGED} names in a run, not {len(merged)}: leave some out "
                f"({', '.join(list(merged)[-3:])}, ...)"
            )
        self._of_script, self.numbers = merged, self._own | merged

    def note(self, numbers: Mapping[str, float | None]) -> None:
        """Record lsgd's own numbers, as far as there are any, in place of those before."""
        self._own = {name: number for name, number in numbers.items() if number is not None}
        self.numbers = self._own | self._of_script


def numbers_of(numbers: Mapping[str, Tensor | float], call: str) -> dict[str, float]:
    """Return the numbers that a script has passed to a ``call``.

    Raises:
        ConfigError: a name or a number is invalid.
    """
    return {_name(name, call): _number(name, value, call) for name, value in numbers.items()}


def _name(name: object, call: str) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"{call}() takes names of 1 to {MAX_LOGGED_NAME} letters, digits, '_', '-', '.' and '/', such as "
        f"'accuracy' or 'grad/norm', not {name!r:.100}"
    )


def _number(name: str, value: object, call: str) -> float:
    try:
        return _float(value)
    except OverflowError:
        return math.inf
    except TypeError as error:
        raise ConfigError(f"{call}() takes numbers and tensors of one element; {name!r} is {error}") from None


def _loss(value: object) -> float:
    try:
        return _float(value)
    except (OverflowError, TypeError) as error:
        raise ConfigError(
            f"worker.report(loss) takes the loss of a batch as one number, or a tensor with one, not {error}"
        ) from None


def _float(value: object) -> float:
    """Return one real number as a float.

    Raises:
        TypeError: it is something else; the message says what.
        OverflowError: it is an integer beyond all floats.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value.detach())
        raise TypeError(f"a {'complex ' * value.is_complex()}tensor of {tuple(value.shape)}")
    if hasattr(value, "__float__"):  # also a NumPy array of one element; a text and a complex number have none
        try:
            return float(value)
        except OverflowError:
            raise OverflowError("an integer beyond all floats") from None
    raise TypeError(f"a {type(value).__name__}: {value!r:.100}")


@dataclass(frozen=True)
class Timings:
    """Totals of one worker since it joined. Subtract an earlier one to measure a part of a run.

    Seconds are those of the training thread. Work beside it, such as a delayed transfer or a GPU's queue, counts where
    the thread waits for it; nothing is synchronized just to measure.

    Attributes:
        steps: completed iterations.
        compute_s: from the start of each step to its end, without the next two.
        waiting_s: for the servers' answers, including the wait for a round's other members.
        exchange_s: in rounds (forming groups, transfers, applying results) and in the algorithm's part after each step.
        sent_nbytes: bytes of tensors sent to others in rounds, without protocol overhead.
        received_nbytes: bytes of tensors received.
    """

    steps: int
    compute_s: float
    waiting_s: float
    exchange_s: float
    sent_nbytes: int
    received_nbytes: int

    def __sub__(self, earlier: Self) -> "Timings":
        return Timings(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class Stopwatch:
    """Counts where the training thread's time goes; safe to read from any thread."""

    def __init__(self) -> None:
        seconds: dict[Spent, float] = {"": 0.0, "compute": 0.0, "waiting": 0.0, "exchange": 0.0}
        spent: Spent = ""  # on what, since the time after it; all three are replaced at once, so threads can read them
        self._state = seconds, spent, time.perf_counter()

    def spend(self, spent: Spent) -> Spent:
        """Count time as ``spent`` from now on; return what it counted as until now."""
        now, (_, before, _) = time.perf_counter(), self._state
        self._state = self._totals(now), spent, now
        return before

    @contextmanager
    def spending(self, spent: Spent) -> Iterator[None]:
        """Count the time inside as ``spent``."""
        before = self.spend(spent)
        try:
            with observer().exchanging() if spent == "exchange" else nullcontext():
                yield
        finally:
            self.spend(before)

    def seconds(self) -> tuple[float, float, float]:
        """Return the seconds of compute, waiting and exchange until now."""
        total = self._totals(time.perf_counter())
        return total["compute"], total["waiting"], total["exchange"]

    def _totals(self, now: float) -> dict[Spent, float]:
        seconds, spent, since = self._state
        return {**seconds, spent: seconds[spent] + now - since}


class ElectionInput:
    """The loss in a worker's requests.

    Any request may open a round, and the worker cannot know which one will. So a request evaluates the probe if its
    last value is from before the last round, or an eighth of a local period old.

    Args:
        resumed: what the worker has of the checkpoint that it resumes from.
    """

    def __init__(self, membership: Membership, replica: Replica, stopwatch: Stopwatch, resumed: Resumed) -> None:
        self.losses = LossWindow(membership.plan.loss_window, resumed.losses)
        schedules = [phase.algorithm.schedule() for phase in membership.plan.phases]
        self._name = membership.join.worker
        self._needs_probe = any(schedule.election == "probe" for schedule in schedules)
        self._replica = replica
        self._stopwatch = stopwatch
        self._resumed = resumed.iterations > 0
        self._evaluate: Callable[[], Tensor | float] | None = None
        self._probed: float | None = None
        self._probed_at = (-1, 0)  # the last round then, and the iterations made
        self._warned = False

    def register(self, evaluate: Callable[[], Tensor | float]) -> None:
        """Register a probe, instead of an earlier one."""
        self._evaluate, self._probed_at = evaluate, (-1, 0)

    def check(self) -> None:
        """Raise a ConfigError if a phase of the plan elects by a probe, and none is registered."""
        if self._needs_probe and self._evaluate is None:
            raise ConfigError(
                f'{self._name}: the plan has election = "probe", but this worker has no probe; register one after '
                f"Worker.join: worker.probe(lambda: criterion(model(x), y)), with the same batch on all workers; or "
                f'set election = "random"'
            )

    def loss(self, done: int, committed: int) -> float | None:
        """Return the loss after ``done`` iterations and this last round; None if there is none yet."""
        schedule = self._replica.algorithm.settings.schedule()
        if schedule.election != "probe" or self._evaluate is None:
            return self.losses.mean()
        if not (committed or self._resumed):
            return None  # it does not have the run's model yet
        then, made = self._probed_at
        if then != committed or done - made >= max(1, schedule.local_period // PROBES_A_PERIOD):
            with self._stopwatch.spending("exchange"):
                self._probed = probe_loss(self._replica.model, self._evaluate)
            self._probed_at = (committed, done)
        return self._probed

    def warn(self, *, elects: bool) -> None:
        """Warn once if its losses are not finite or, where leaders are elected, cannot be used for that."""
        if not self._warned and (trouble := self.trouble(elects=elects)):
            self._warned = True
            logger.warning("%s %s", self._name, trouble)

    def trouble(self, *, elects: bool) -> str:
        """Return what is wrong with its losses, and where leaders are elected why it does not lead; empty: nothing."""
        if not elects:
            return self.losses.broken()
        so = "so it leads only if no worker has a finite loss"
        if self._replica.algorithm.settings.schedule().election == "probe":
            finite = self._probed is None or math.isfinite(self._probed)
            return "" if finite else f"has a probe with a non-finite loss, {so}; lower the learning rate"
        trouble = self.losses.trouble()
        advice = "call worker.report(loss) after each step, and lower the learning rate if the loss is non-finite"
        return f"{trouble}, {so}; {advice}" if trouble else ""
