"""A worker of benchmarks/endtoend.py for what lsgd is compared with; it needs nothing of lsgd."""

from pathlib import Path
from typing import NoReturn

from benchmarks import peers
from benchmarks._endtoend_recorder import parser, prepare

PORT = 47600


def main() -> NoReturn:
    """Train, and write what was recorded."""
    arguments = parser()
    arguments.add_argument("--method", choices=peers.PEERS, required=True)
    arguments.add_argument("--rank", type=int, required=True)
    arguments.add_argument("--addresses", nargs="+", required=True, help="of all members, in rank order")
    arguments.add_argument("--period", type=int, required=True)
    arguments.add_argument("--output", type=Path, required=True)
    given = arguments.parse_args()
    task, model, optimizer, recorder = prepare(given)
    own, first, size = given.addresses[given.rank], given.addresses[0], len(given.addresses)
    member = peers.Member(given.rank, size, own, first, given.period, task.batch_size)
    batches = task.batches(given.rank, size, given.seed)
    with peers.joined(given.method, model, optimizer, member, PORT) as (wrapped, stepped):
        for step, (x, y) in zip(range(given.steps), batches, strict=False):
            recorder.step_begins(step)
            stepped.zero_grad()
            task.loss(wrapped, x, y).backward()
            stepped.step()
        recorder.step_begins(given.steps)
    recorder.write(given.output)
    peers.end_process()


if __name__ == "__main__":
    main()
