"""A backend of Ray Train: Ray's workers are the workers of a run, and actors serve it."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lsgd.client.control.closing import end_script
from lsgd.client.worker import Worker
from lsgd.errors import ConfigError, JoinError, LsgdError, RunOverError, SecondJoinError
from lsgd.integrations.ray_seats import RayWorker
from lsgd.plan.plan import read
from lsgd.protocol.keys import default_folder
from lsgd.run_folder import CHECKPOINTS, newest

try:
    import ray
    from ray.train import Checkpoint
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import TorchConfigContextManager
    from ray.train.v2._internal.execution.context import get_train_context
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup

    from lsgd.integrations.ray_servers import Servers
except ImportError as missing:
    raise ImportError(f"LsgdConfig needs Ray Train, 2.60 or newer: pip install 'lsgd[ray]' ({missing})") from missing

logger = logging.getLogger("lsgd")

REPORT_WITHIN_S = 60.0
"""How long a worker that came too late waits for the others' report."""


class LsgdConfig(TorchConfig):
    """Makes Ray's workers the workers of a run: ``TorchTrainer(train, torch_config=LsgdConfig(period=16), ...)``.

    Ray starts the workers, and another one in the place of one that has died, while the others train on
    (``FailureConfig(max_failures=...)``). If the number of workers may change, the run stops instead, all workers save,
    and Ray starts as many as fit, which resume.

    The servers are actors: the global one is on the node of Ray's controller, a local one on each node. The run folder
    is ``lsgd`` in the folder of Ray's results, if these are in a file system. It has the checkpoints, from which the
    run resumes when Ray starts all workers again.

    Args:
        plan: file of the plan; None: ``LSGD_PLAN``, or none.
        elastic: whether the number of workers may change: ``ScalingConfig(num_workers=(1, 4))``.
        settings: settings of the plan, which precede variables and file: ``algorithm="leader", iterations=1000``.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, plan: Path | str | None = None, *, elastic: bool = False, **settings: Any) -> None:
        super().__init__(backend="lsgd")
        self.elastic = elastic
        path = plan or os.environ.get("LSGD_PLAN")
        try:
            self.plan = read(Path(path) if path else None, os.environ, settings, "argument {name}").plan
        except ConfigError as error:
            raise ConfigError(f"LsgdConfig: {error}") from None
        self.keys = default_folder()

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that Ray's controller makes one of."""
        return ElasticBackend if self.elastic else LsgdBackend

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """What surrounds the training function in each worker."""
        return _training


def report(worker: Worker, metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report the end to Ray, after ``worker.finish()``: all workers call it once, and wait for one another.

    It is Ray's ``ray.train.report``, and tries again what Ray drops while it replaces a worker.

    Args:
        worker: what ``lsgd.wrap`` or ``Worker.join`` has returned.
        metrics: the same on all workers, as by ``worker.mean``; Ray's result has those of its rank 0.
        checkpoint: from ``worker.first``; None on the others.

    Raises:
        LsgdError: the worker still trains: Ray's report would hold it until all workers have come to the same place.
    """
    if not worker.stopped:
        raise LsgdError(
            f"{worker.name} reports to Ray, which makes all workers wait for one another, before worker.finish(): "
            f"report once, at the end; until then use worker.log(numbers), and lsgd's own checkpoints"
        )
    if _main is None:  # Ray's local mode
        ray.train.report(dict(metrics), checkpoint=checkpoint)
        return
    context = get_train_context()
    before = context.report_call_index
    while context.report_call_index == before:
        ray.train.report(dict(metrics), checkpoint=checkpoint)


class LsgdBackend(Backend):
    """Starts and ends the servers of a run, and tells Ray's workers where they are. It lives in Ray's controller."""

    has_replica_groups = True  # so Ray replaces only the worker that has died

    def __init__(self) -> None:
        self._servers: Servers | None = None

    def on_start(self, worker_group: Any, backend_config: LsgdConfig) -> None:
        """Give new workers their seats; if all are new, in a run with new servers.

        Raises:
            ConfigError: the number of workers may change, and lsgd's configuration does not say so.
        """
        workers: list[RayWorker] = worker_group.execute(_ray_worker)
        if workers[0].elastic and not backend_config.elastic:
            raise ConfigError(
                "ScalingConfig lets the number of workers change: say so to lsgd, too: LsgdConfig(elastic=True). Ray "
                "replaces a single worker only on the nodes that it began with"
            )
        if not isinstance(worker_group, ReplicaGroup):
            self._end()
            self._servers = Servers(backend_config.plan, backend_config.keys, workers)
        assert self._servers is not None
        for number, variables in enumerate(self._servers.seat(workers)):
            worker_group.execute_single(number, _enter, variables, self._servers.main)

    def on_shutdown(self, worker_group: Any, backend_config: LsgdConfig) -> None:
        """End the run, if all workers end."""
        if not isinstance(worker_group, ReplicaGroup):
            self._end()

    def _end(self) -> None:
        if self._servers is not None:
            self._servers.stop()
        self._servers = None


class ElasticBackend(LsgdBackend):
    """The same for a number of workers that may change: if one is lost, Ray starts all again, in as many as fit."""

    has_replica_groups = False


# -- in each worker --------------------------------------------------------------------------------------------

_main: Any = None  # the actor of the global server


def _ray_worker() -> RayWorker:
    context, storage = ray.train.get_context(), get_train_context().get_storage()
    is_shared = storage.storage_filesystem.type_name == "local"
    folder = storage.experiment_fs_path if is_shared else storage.local_working_directory
    run_dir, node_id = Path(folder, "lsgd"), ray.get_runtime_context().get_node_id()
    saved = tuple(newest(run_dir / CHECKPOINTS))
    elastic = get_train_context().train_run_context.scaling_config.elasticity_enabled
    return RayWorker(context.get_world_rank(), context.get_world_size(), node_id, str(run_dir), saved, elastic)


def _enter(variables: Mapping[str, str], main: Any) -> None:
    global _main
    os.environ.update(variables)
    _main = main


@contextmanager
def _training() -> Iterator[None]:
    """Leave the run when the training function ends, as at the end of a script; the process goes on."""
    try:
        with TorchConfigContextManager():
            yield
    except BaseException as error:
        end_script(error)
        late = isinstance(error, JoinError) and not isinstance(error, SecondJoinError)
        if late and (isinstance(error, RunOverError) or (_main and ray.get(_main.over.remote()))):
            logger.warning("this worker comes too late, and has nothing to do: %s", error)
            _report_nothing()
        elif isinstance(error, SystemExit) and isinstance(error.__cause__, LsgdError):
            raise error.__cause__ from None  # which says why
        else:
            raise
    else:
        end_script(None)


def _report_nothing() -> None:
    """Come to the others' report, if they wait there; if they have been there, nobody will come any more."""
    thread = threading.Thread(target=ray.train.report, args=({},), daemon=True)
    thread.start()
    thread.join(REPORT_WITHIN_S)
