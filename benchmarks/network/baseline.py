"""A process of benchmarks/network for what lsgd is compared with; it needs nothing of lsgd."""

from typing import NoReturn

from benchmarks.baselines.joining import add_arguments, end_process, joined
from benchmarks.network.meter import BATCH_SIZE, Meter, parser, workload
from benchmarks.workloads import timed_step

PORT = 47500


def main() -> NoReturn:
    """Make the steps."""
    arguments = parser()
    add_arguments(arguments)
    given = arguments.parse_args()
    model, optimizer, data, compute_s = workload(given.width, given.sleep_s)
    meter = Meter(given, compute_s)
    with joined(given, model, optimizer, BATCH_SIZE, PORT) as (wrapped, stepped):
        for step in range(given.skip + given.steps):
            meter.step_begins(step)
            start = step * BATCH_SIZE % (len(data) - BATCH_SIZE)
            timed_step(wrapped, stepped, data[start : start + BATCH_SIZE])
        meter.step_begins(given.skip + given.steps)
    meter.finish()
    end_process()


if __name__ == "__main__":
    main()
