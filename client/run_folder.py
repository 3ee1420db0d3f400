"""Where a run's checkpoints lie: ``<run folder>/checkpoints/<count>/node0-worker1.safetensors``."""

from pathlib import Path

from lsgd.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""The folder of a run folder that has its checkpoints."""


def checkpoint_path(folder: Path, count: int, worker: str) -> Path:
    """Return the file of a worker in a folder of checkpoints, for the state after ``count`` iterations."""
    return folder / str(count) / _name(worker)


def counts(folder: Path, worker: str = "*") -> list[int]:
    """Return the counts that a folder has checkpoints of, of this worker (a pattern) or of any, in rising order."""
    paths = folder.glob(f"*/{_name(worker)}")
    return sorted({int(path.parent.name) for path in paths if path.parent.name.isdecimal()})


def find_run(folder: Path, node: int) -> Path:
    """Return ``folder`` if it is a run's with checkpoints of this node, else the run folder in it that got one last.

    Raises:
        ConfigError: there is none.
    """
    runs = [run for run in (folder, *folder.glob("*/")) if counts(run / CHECKPOINTS, f"node{node}/*")]
    if not runs:
        raise ConfigError(
            f"there is nothing to resume: no checkpoint of node {node} lies in {folder} or in a run folder in it; name "
            f"the run's folder (--run-dir, RUN_NAME), or start without --resume (RESUME): a node that is new in a "
            f"resumed run takes over the model of the others"
        )
    return runs[0] if runs[0] == folder else max(runs, key=lambda run: (run / CHECKPOINTS).stat().st_mtime)


def _name(worker: str) -> str:
    return f"{worker.replace('/', '-')}.safetensors"
