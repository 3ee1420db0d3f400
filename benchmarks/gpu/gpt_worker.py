"""The training script of part 4 for lsgd's methods. With ``--profile`` it looks for calls that wait for the GPU."""

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.gpt_training import SIZES, Meter, generated, loss_of, made, parser, warm_up, write
from lsgd.client import Worker, device

PROFILED = 12
"""Steps that are profiled, those with a round included."""

WAITING = frozenset(
    f"{api}{call}"
    for api, calls in {
        "cuda": ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize", "Memcpy"),
        "cu": ("CtxSynchronize", "StreamSynchronize", "EventSynchronize"),
    }.items()
    for call in calls
)
"""Calls of CUDA in which the processor waits for the GPU."""

RANGE = "lsgd step"


class Profile:
    """Profiles some steps, each from the loop's body to the next one's.

    Args:
        home: the model's device.
        rounds: returns the number of rounds that are committed.
    """

    def __init__(self, home: torch.device, rounds: Callable[[], int]) -> None:
        cuda = [ProfilerActivity.CUDA] if home.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
        self._rounds = rounds
        self._before = -1
        self._without: list[bool] = []
        self._range: record_function | None = None

    def step_begins(self) -> bool:
        """Note that a step begins; return whether there are enough."""
        if self._range is None:
            self._profile.start()
        else:
            self._range.__exit__(None, None, None)
            self._without.append(self._rounds() == self._before)
        if len(self._without) == PROFILED:
            return True
        self._before = self._rounds()
        self._range = record_function(RANGE)
        self._range.__enter__()
        return False

    def found(self) -> dict[str, object]:
        """Return how many steps had no round, and the calls in those that waited for the GPU."""
        self._profile.stop()
        events = self._profile.events() or []
        ranges = [event.time_range for event in events if event.name == RANGE and event.device_type.name == "CPU"]
        clean = [each for each, without in zip(sorted(ranges, key=_start), self._without, strict=True) if without]
        calls = [event for event in events if event.name in WAITING]
        within = [e.name for e in calls if any(r.start <= e.time_range.start <= r.end for r in clean)]
        return {"steps": len(clean), "waiting": dict(Counter(within))}


def _start(time_range: torch.autograd.profiler_util.Interval) -> float:
    return float(time_range.start)


def main() -> None:
    """Train until all workers have made the steps that are measured, and the profiled ones."""
    arguments = parser()
    arguments.add_argument("--profile", action="store_true")
    given = arguments.parse_args()
    size, home = SIZES[given.size], device()
    warm_up(size, given.warm_up, home)
    model, optimizer = made(size, home)
    with Worker.join(model, optimizer) as worker:
        meter = Meter(given, worker.rank, worker.world_size, home)
        profiled = Profile(home, lambda: worker._steps.rounds.last.committed) if given.profile else None
        for tokens in worker.batches(generated(size, worker.rank, home)):
            if meter.step_begins():
                if profiled is not None and profiled.step_begins():
                    write(given.notes / f"{worker.rank}.profile", profiled.found())
                    profiled = None
                if profiled is None and meter.all_have_measured():
                    break
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            worker.report(loss)
        worker.finish()


if __name__ == "__main__":
    main()
