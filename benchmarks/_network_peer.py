"""A process of benchmarks/network.py for what lsgd is compared with; it needs nothing of lsgd."""

from typing import NoReturn

from benchmarks import peers
from benchmarks._meter import BATCH_SIZE, Meter, parser, workload
from benchmarks.workloads import timed_step

PORT = 47500


def main() -> NoReturn:
    """Make the steps."""
    arguments = parser()
    arguments.add_argument("--method", required=True)
    arguments.add_argument("--rank", type=int, required=True)
    arguments.add_argument("--addresses", nargs="+", required=True, help="of all members, in rank order")
    arguments.add_argument("--period", type=int, required=True)
    given = arguments.parse_args()
    model, optimizer, data, compute_s = workload(given.width, given.sleep_s)
    meter = Meter(given, compute_s)
    own, first = given.addresses[given.rank], given.addresses[0]
    member = peers.Member(given.rank, len(given.addresses), own, first, given.period, BATCH_SIZE)
    with peers.joined(given.method, model, optimizer, member, PORT) as (wrapped, stepped):
        for step in range(given.skip + given.steps):
            meter.step_begins(step)
            start = step * BATCH_SIZE % (len(data) - BATCH_SIZE)
            timed_step(wrapped, stepped, data[start : start + BATCH_SIZE])
        meter.step_begins(given.skip + given.steps)
    meter.finish()
    peers.end_process()


if __name__ == "__main__":
    main()
