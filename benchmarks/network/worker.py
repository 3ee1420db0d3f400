"""The training script of benchmarks/network for lsgd's own methods."""

from torch.utils.data import TensorDataset

from benchmarks.network.meter import BATCH_SIZE, Meter, parser, workload
from benchmarks.workloads import timed_step
from lsgd.client import Worker


def main() -> None:
    """Train until the plan says stop."""
    given = parser().parse_args()
    model, optimizer, data, compute_s = workload(given.width, given.sleep_s)
    with Worker.join(model, optimizer) as worker:
        meter = Meter(given, compute_s, lambda: worker.timings.waiting_s)
        loader = worker.loader(TensorDataset(data), batch_size=BATCH_SIZE)
        while not worker.stopped:
            for (x,) in worker.batches(loader):
                meter.step_begins(worker.progress * worker.plan.run.iterations / worker.world_size)
                timed_step(model, optimizer, x)
    meter.finish()


if __name__ == "__main__":
    main()
