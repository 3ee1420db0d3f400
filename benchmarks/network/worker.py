"""The training script of benchmarks/network for lsgd's own methods."""

import time
from typing import Any

from torch.utils.data import TensorDataset

from benchmarks.network.meter import BATCH_SIZE, Meter, parser, workload
from benchmarks.workloads import timed_step
from lsgd.client import Worker
from lsgd.client.control.channel import Channel
from lsgd.protocol.messages import Request


def time_requests() -> list[float]:
    """Note from now on how many seconds each request for an iteration waits, and return the list of them."""
    waited_s: list[float] = []
    ask = Channel.ask

    def timed(self: Channel, message: Any, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return ask(self, message, *arguments, **options)
        finally:
            if isinstance(message, Request):
                waited_s.append(time.perf_counter() - start)

    Channel.ask = timed  # type: ignore[method-assign]
    return waited_s


def main() -> None:
    """Train until the plan says stop."""
    given = parser().parse_args()
    model, optimizer, data, compute_s = workload(given.width, given.sleep_s)
    waited_s = time_requests()
    meter = Meter(given, compute_s, lambda: sum(waited_s))
    with Worker.join(model, optimizer) as worker:
        loader = worker.loader(TensorDataset(data), batch_size=BATCH_SIZE)
        while not worker.stopped:
            for (x,) in worker.batches(loader):
                meter.step_begins(worker.progress * worker.plan.run.iterations / worker.world_size)
                timed_step(model, optimizer, x)
    meter.finish()


if __name__ == "__main__":
    main()
