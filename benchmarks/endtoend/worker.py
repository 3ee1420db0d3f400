"""The training script of benchmarks/endtoend for lsgd's own methods."""

from benchmarks.endtoend.recorder import parser, prepare
from lsgd.client import Worker


def main() -> None:
    """Train until the plan says stop, and write what was recorded to the run folder."""
    given = parser().parse_args()
    task, model, optimizer, recorder = prepare(given)
    with Worker.join(model, optimizer) as worker:
        for x, y in worker.batches(task.batches(worker.rank, worker.world_size, given.seed)):
            recorder.step_begins(worker.progress * worker.plan.run.iterations / worker.world_size)
            optimizer.zero_grad()
            loss = task.loss(model, x, y)
            loss.backward()
            optimizer.step()
            worker.report(loss)
        assert worker.run_dir is not None
        recorder.write(worker.run_dir)


if __name__ == "__main__":
    main()
