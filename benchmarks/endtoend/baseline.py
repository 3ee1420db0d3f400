"""A worker of benchmarks/endtoend for what lsgd is compared with; it needs nothing of lsgd."""

from pathlib import Path
from typing import NoReturn

from benchmarks.baselines.joining import add_arguments, end_process, joined
from benchmarks.endtoend.recorder import parser, prepare

PORT = 47600


def main() -> NoReturn:
    """Train, and write what was recorded."""
    arguments = parser()
    add_arguments(arguments)
    arguments.add_argument("--output", type=Path, required=True)
    given = arguments.parse_args()
    task, model, optimizer, recorder = prepare(given)
    batches = task.batches(given.rank, len(given.addresses), given.seed)
    with joined(given, model, optimizer, task.batch_size, PORT) as (wrapped, stepped):
        for step, (x, y) in zip(range(given.steps), batches, strict=False):
            recorder.step_begins(step)
            stepped.zero_grad()
            task.loss(wrapped, x, y).backward()
            stepped.step()
        recorder.step_begins(given.steps)
    recorder.write(given.output)
    end_process()


if __name__ == "__main__":
    main()
