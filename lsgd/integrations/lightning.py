"""A callback that makes any Lightning Trainer a worker of a run."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lsgd.client.worker import Worker
from lsgd.errors import ConfigError, LsgdError
from lsgd.integrations.saved import Saved
from lsgd.integrations.shared import Integration, is_saver, state_of_run

try:
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.plugins import CheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as missing:
    raise ImportError(f"LsgdCallback needs lightning: pip install 'lsgd[lightning]' ({missing})") from missing

logger = logging.getLogger("lsgd")


class LsgdCallback(Integration, Callback):
    """Makes a Trainer a worker of a run: ``Trainer(..., callbacks=[LsgdCallback()])``.

    The worker joins when training begins, with the module and its optimizers. A batch is a step of the worker, and an
    iteration if an optimizer stepped in it. The run's end stops the Trainer, regardless of ``min_steps`` and
    ``min_epochs``; the module is then the consensus. If the Trainer stops first, the worker leaves; if the plan has no
    end, it waits for the others and has the consensus, too.

    Each worker draws its shard of the training data. It is paused while the Trainer validates or saves. Only one
    worker saves, and only the first logs.

    Args:
        shard: whether to deal the training data to the workers; False if each has its own data.
        seed: seed of the shards; the same on all workers.
        options: options of :meth:`lsgd.client.Worker.join`.

    Raises:
        ConfigError: the environment has the variables of torchrun.
    """

    def __init__(self, *, shard: bool = True, seed: int = 0, **options: Any) -> None:
        super().__init__("the Trainer", shard, options)
        self._seed = seed
        self._restored: dict[str, Any] = {}  # the stream's state in a checkpoint of Lightning
        self._saved: Saved | None = None  # while this worker trains
        self._adds_up = False  # whether the batch under way only adds up gradients
        rank_zero_only.rank = int(os.environ.get("LSGD_RANK") or 0)  # loggers begin before the join says who is first

    @property
    def worker(self) -> Worker:
        """The worker; available once training has begun."""
        return self._joined

    # -- the hooks of a Trainer, in their order ----------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reject a Trainer that cannot be a worker."""
        if stage == "fit":
            check(trainer, shards=self._shards)
            others = [each for each in trainer.callbacks if not isinstance(each, _Means)]
            trainer.callbacks[:] = [_Means(self._alike), *others]  # before all that decide

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run."""
        is_one = len(trainer.optimizers) == 1  # of several, each one's steps count in global_step
        begun, scaler = trainer.global_step if is_one else 0, getattr(trainer.precision_plugin, "scaler", None)
        worker = self._join(pl_module, trainer.optimizers, scaler, begun)
        self._shard(trainer.train_dataloader, self._seed, self._restored)
        self._restored = {}  # it is not for a second training
        worker.accumulate_while(lambda: self._adds_up)
        self._saved = Saved(worker.run_dir)
        if worker.first:
            self._saved.forget()
        iter(trainer.fit_loop._data_fetcher)  # the first pass has begun before the join, over all the data
        rank_zero_only.rank = 0 if worker.first else max(1, worker.rank)
        if not worker.first and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()
        if not isinstance(trainer.strategy.checkpoint_io, _OneSaves):
            trainer.strategy.checkpoint_io = _OneSaves(trainer.strategy.checkpoint_io, self)
        steps = trainer.estimated_stepping_batches  # -1 for a stream that nothing limits
        self._expect(steps, "max_steps, or max_epochs", counts=is_one)
        self._follow_schedules(trainer, steps if is_one else math.inf)
        for each in trainer.callbacks:
            if isinstance(each, EarlyStopping):
                worker.follow(each)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Get an iteration; if there is none left, stop the Trainer and skip the batch."""
        if not self._begin():
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0  # they would delay the stop
            raise StopIteration  # ends the epoch, as -1 from the module's hook does
        self._adds_up = pl_module.automatic_optimization and accumulates(trainer, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss; the first worker logs the run's state. The next batch, or a pause, ends the step."""
        worker = self.worker
        self._consume()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):  # of a micro-batch: its share of the step's
            worker.report(loss.detach() * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1))
        if trainer.loggers and worker.first and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause."""
        if not trainer.sanity_checking:
            self.worker.step_aside()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the Trainer stops by itself, leave before later callbacks save the model."""
        if trainer.fit_loop.done:
            self._leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run."""
        self._leave()
        if self.worker.first:
            self._log(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the worker after the last callback has saved; end the process if the consensus is not finite."""
        saved = self._saved
        self._close(None)
        if saved is not None:
            savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
            settle_paths(saved, savers, first=self.first)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Handle it as ``with Worker.join(...)`` does: tell the run, and end the process for lsgd's errors."""
        self._close(exception)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {} if self._data is None else self._data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin at this position in the data."""
        self._restored = state_dict

    # -- helpers -----------------------------------------------------------------------------------------------

    def _follow_schedules(self, trainer: Trainer, steps: float) -> None:
        """Let the module's scheduler follow the run; of manual optimization, or of several, the module has to say."""
        one = sum(not config.reduce_on_plateau for config in trainer.lr_scheduler_configs) == 1
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                self.worker.follow(config.scheduler)
            elif one and trainer.lightning_module.automatic_optimization and 0 < steps < math.inf:
                per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
                passes = steps if config.interval == "step" else math.ceil(steps / per_epoch)
                length = int(passes) // config.frequency
                self.worker.follow(config.scheduler, partial(self._place_of, trainer, steps, length))

    def _place_of(self, trainer: Trainer, steps: float, length: int) -> int:
        return self._scheduled(trainer.global_step, steps, length)

    def _close(self, error: BaseException | None) -> None:
        self._saved = None
        super()._close(error)

    def saves(self) -> bool:
        """Whether this worker is the one that saves; if so, pause it."""
        if self._saved is None:
            return self.first
        if not is_saver(self.worker):
            return False
        self._saved.tell(None)
        self.worker.step_aside()
        return True

    def _log(self, trainer: Trainer) -> None:
        numbers = {name: x for name, x in state_of_run(self.worker).items() if isinstance(x, int | float)}
        for each in trainer.loggers:
            each.log_metrics(numbers, step=trainer.global_step)


class _Means(Callback):
    """Before all that decides by a metric (early stopping, the best so far, plateaus), makes it the workers' mean."""

    def __init__(self, alike: Callable[[Mapping[str, Any]], dict[str, float]]) -> None:
        self._alike = alike
        self._of_validation: set[str] = set()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the metrics of the validation."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            names = decisive(trainer)
            self._of_validation |= names
            self._share(trainer, names)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share those of the training, which no validation has."""
        self._share(trainer, decisive(trainer) - self._of_validation)

    def _share(self, trainer: Trainer, names: set[str]) -> None:
        metrics = trainer.callback_metrics
        means = self._alike({name: metrics[name] for name in sorted(names) if metrics[name].is_floating_point()})
        with torch.inference_mode():  # as in a validation
            for name, mean in means.items():
                metrics[name].fill_(mean)  # the tensor that Lightning keeps, and gives to all


def decisive(trainer: Trainer) -> set[str]:
    """Return the names of the metrics that are there, and that something decides by."""
    plateaus = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    names = {*plateaus, *(getattr(each, "monitor", None) for each in trainer.callbacks)}
    return {name for name in names if isinstance(name, str) and name in trainer.callback_metrics}


class _OneSaves(CheckpointIO):
    """Writes and removes a Trainer's checkpoints in one worker; to Lightning each worker is the only process."""

    def __init__(self, inner: CheckpointIO, callback: LsgdCallback) -> None:
        self._inner, self._callback = inner, callback
        self._saved = False  # the last checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self._saved = self._callback.saves()
        if self._saved:
            self._inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = self._inner.load_checkpoint(*args, **kwargs)
        except FileNotFoundError as missing:
            raise LsgdError(
                f"{missing}; one worker saves for all, so load its checkpoints after the training, or there: `if "
                f"lsgd.first: trainer.test(...)`, where lsgd is the LsgdCallback"
            ) from missing
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        if self._saved:
            self._inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self._inner.teardown()


def settle_paths(saved: Saved, callbacks: Sequence[ModelCheckpoint], *, first: bool) -> None:
    """Let each ModelCheckpoint have the paths of the worker that saves, if this one sees them, and no others.

    A library may load ``best_model_path`` on every worker, once the training is over.
    """
    paths = [_paths_of(each) for each in callbacks]
    if first:
        saved.tell(paths)
    elif any(best or last for best, last, _ in paths):
        paths = saved.hear() or paths
    for each, (best, last, scores) in zip(callbacks, paths, strict=True):
        _settle(each, best, last, {path: score for path, score in scores.items() if _exists(path)})


def _paths_of(callback: ModelCheckpoint) -> tuple[str, str, dict[str, float]]:
    """Return its best and its last path, and the scores of those that it compares."""
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    return callback.best_model_path, callback.last_model_path, scores


def _settle(callback: ModelCheckpoint, best: str, last: str, scores: dict[str, float]) -> None:
    """Give a callback the best path, the last one, and its scores; none of them if nothing is there."""
    ranked = sorted(scores, key=scores.__getitem__, reverse=callback.mode == "max")
    callback.best_model_path = best if _exists(best) else next(iter(ranked), "")
    callback.last_model_path = last if _exists(last) else ""
    callback.best_k_models = {path: torch.tensor(score) for path, score in scores.items()}
    callback.best_model_score = callback.best_k_models.get(callback.best_model_path)
    callback.kth_best_model_path = ranked[-1] if ranked else ""
    if best and not callback.best_model_path:
        logger.warning(
            "another worker has saved this training's checkpoints, and this one does not see them: "
            "ModelCheckpoint.best_model_path is empty here"
        )


def _exists(path: str) -> bool:
    return bool(path) and bool(get_filesystem(path).exists(path))


def accumulates(trainer: Trainer, batch_idx: int) -> bool:
    """Whether this batch only accumulates gradients. An epoch's last batch always steps."""
    batches = batch_idx + 1
    is_last = trainer.is_last_batch or batches == trainer.num_training_batches
    return bool(batches % trainer.accumulate_grad_batches and not is_last)


def check(trainer: Trainer, *, shards: bool = True) -> None:
    """Reject a Trainer that cannot be a worker.

    Raises:
        ConfigError: it cannot.
    """
    if type(trainer.strategy) is not SingleDeviceStrategy:
        raise ConfigError(
            f"the Trainer has the strategy {type(trainer.strategy).__name__}, and lsgd takes its place: pass "
            f"Trainer(strategy='auto', devices=1, num_nodes=1), and start several workers by `lsgd launch --workers N "
            f"-- python SCRIPT`"
        )
    if shards and trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "reload_dataloaders_every_n_epochs makes loaders that are not sharded; leave it out, or give each worker "
            "data of its own and LsgdCallback(shard=False)"
        )
    if shards and trainer.overfit_batches:
        raise ConfigError(
            "overfit_batches trains on the same batches, and shards are others in each pass; leave it out, or pass "
            "LsgdCallback(shard=False)"
        )
    for each in trainer.callbacks:
        if isinstance(each, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"{type(each).__name__} would put another model in the consensus' place; leave it out: lsgd averages "
                f"the workers' models"
            )
        if isinstance(each, ModelCheckpoint) and each.save_last == "link":
            raise ConfigError(
                "ModelCheckpoint(save_last='link') links to a file that only one worker writes; pass save_last=True"
            )
