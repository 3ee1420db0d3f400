"""A callback that makes any Hugging Face Trainer a worker of a run."""

import logging
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from lsgd.client.worker import Worker
from lsgd.errors import ConfigError
from lsgd.integrations.shared import Integration, is_saver, state_of_run
from lsgd.schedulers import counts

try:
    from accelerate.state import GradientState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState
    from transformers.trainer_utils import SaveStrategy
except ImportError as missing:
    raise ImportError(
        f"LsgdCallback needs transformers and accelerate: pip install 'lsgd[transformers]' ({missing})"
    ) from missing

logger = logging.getLogger("lsgd")


class LsgdCallback(Integration, TrainerCallback):
    """Makes a Trainer a worker of a run: ``Trainer(..., callbacks=[LsgdCallback()])``.

    The worker joins when training begins, with the objects that accelerate has prepared. Each optimizer step is an
    iteration. The run's end stops the Trainer, and the model is then the consensus. If the Trainer stops first, the
    worker leaves; if the plan has no end, it waits for the others and has the consensus, too.

    Each worker draws its shard of the training data. The Trainer's learning-rate schedule follows the run. The worker
    is paused while the Trainer evaluates or saves, and only the first one saves. At the end, the Trainer evaluates and
    saves the consensus, if it evaluates and saves at all.

    It may be used in a ``with`` statement around ``train()``: then the run learns of an exception there, and lsgd's
    errors end the process with the exit codes of ``with Worker.join(...)``.

    Args:
        shard: whether to deal the training data to the workers; False if each has its own data.
        options: options of :meth:`lsgd.client.Worker.join`.

    Raises:
        ConfigError: the environment has the variables of torchrun.
    """

    def __init__(self, *, shard: bool = True, **options: Any) -> None:
        super().__init__("the Trainer", shard, options)
        self._at_end: dict[str, Tensor] | None = None  # the model, if the run ended while the worker paused
        self._losses: list[Tensor] = []  # of the step's micro-batches
        self._has_losses = False  # the model has returned one
        self._summed = False  # whether they add up to the step's loss
        self._hook: Any = None  # on the model, while it trains
        self._saves = True  # whether this is the worker that may save now
        self._save_strategy = SaveStrategy.NO

    @property
    def worker(self) -> Worker | None:
        """The worker; None before training begins."""
        return self._worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    # -- the events of a Trainer, in their order ---------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Reject arguments with which the Trainer cannot be a worker."""
        check(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Join the run; a second training joins anew."""
        check(args)
        if self._hook is not None:  # of an earlier training that was interrupted
            args.save_strategy = self._save_strategy
            self._close(None)
        self._has_losses, self._at_end = False, None
        self._losses.clear()
        worker = self._join(model, optimizer, getattr(optimizer, "scaler", None), state.global_step)
        self._shard(train_dataloader, args.data_seed or 0)  # args.seed may be another on each worker
        worker.accumulate_while(lambda: not GradientState().sync_gradients)
        self._hook = model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._save_strategy = args.save_strategy
        state.is_world_process_zero = worker.first  # has the progress bar; later, that must not change
        self._expect(state.max_steps, "max_steps, or num_train_epochs")
        if counts(lr_scheduler):
            worker.follow(lr_scheduler, lambda: self._scheduled(state.global_step, state.max_steps, state.max_steps))
        else:
            worker.follow(lr_scheduler)
        worker.follow(Decisions(state, callbacks_here()))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: Any,
    ) -> None:
        """Get an iteration."""
        has_step = self._begin()
        args.save_strategy = self._save_strategy
        if not has_step:  # the end came while this worker paused, or before; the Trainer takes one more step and stops
            self._at_end = {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
            control.should_training_stop = True

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count a micro-batch."""
        self._consume()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the iteration, or pause to evaluate or save."""
        worker = self._joined
        if self._at_end is not None:
            state.global_step -= 1
            self._stop(control)
            return
        self._consume()
        control.should_training_stop |= 0 < worker.steps <= worker.step + 1  # this one counts when it has ended
        if self._losses:
            worker.report(torch.stack(self._losses).sum() / (1 if self._summed else len(self._losses)))
            self._losses.clear()
        ends_epoch = state.epoch is not None and state.epoch % 1 == 0
        may_pause = ends_epoch and "epoch" in (args.eval_strategy, self._save_strategy)  # in on_epoch_end, in this step
        if control.should_training_stop:
            self._stop(control)
        elif not self._paused(args, control) and not may_pause and not worker.end_step():
            self._stop(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """If the Trainer stops, leave and evaluate and save the final model; else pause if due."""
        if not control.should_training_stop:
            self._paused(args, control)
            return
        self._leave()
        if self._at_end is not None:
            model.load_state_dict(self._at_end, strict=False)
            self._at_end = None
        self._let_save(args, self.first)
        control.should_evaluate = args.eval_strategy != "no"
        control.should_save = args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let only one worker save, also if a callback before this one has asked for that in view of the metrics."""
        control.should_save &= self._saves

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, logs: dict[str, Any], **_: Any
    ) -> None:
        """Add the run's state to the first worker's logs; report the loss if the model does not return it."""
        if self._worker is None:  # an evaluation before the training
            return
        worker = self._joined
        self._share_decisions(args, state, logs)
        if "loss" in logs and not self._has_losses:
            worker.report(logs["loss"])
        if not worker.first or not {"loss", "train_loss"} & logs.keys():
            return
        more = state_of_run(worker)
        logs |= more
        state.log_history[-1] |= more

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the run."""
        args.save_strategy = self._save_strategy
        self._leave()
        self._close(None)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _close(self, error: BaseException | None) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        super()._close(error)

    def _share_decisions(self, args: TrainingArguments, state: TrainerState, logs: dict[str, Any]) -> None:
        """Replace the metric that decides (early stopping, the best so far, plateaus) by its mean over the workers.

        The Trainer logs the dict of metrics that it then gives to all that decide.
        """
        metric = args.metric_for_best_model or ""
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        if metric in logs:
            logs |= self._alike({metric: logs[metric]})
            state.log_history[-1] |= {metric: logs[metric]}

    def _stop(self, control: TrainerControl) -> None:
        """Stop the Trainer; the end of the epoch follows, with the last evaluation and saving."""
        control.should_training_stop = True
        control.should_evaluate = control.should_save = False

    def _paused(self, args: TrainingArguments, control: TrainerControl) -> bool:
        """Pause the worker if the Trainer is about to evaluate or save; return whether it is."""
        if not control.should_evaluate and not control.should_save:
            return False
        self._let_save(args, is_saver(self._joined))
        control.should_save &= args.save_strategy != SaveStrategy.NO
        self._joined.step_aside()
        return True

    def _let_save(self, args: TrainingArguments, saves: bool) -> None:
        """Allow or prevent saving until the next step; the Trainer also checks this after an evaluation."""
        self._saves = saves
        args.save_strategy = self._save_strategy if saves else SaveStrategy.NO

    def _after_forward(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """Record the loss: with ``num_items_in_batch`` a share of the step's, else the micro-batch's."""
        loss = output.get("loss") if isinstance(output, dict) else None
        if model.training and loss is not None:
            self._has_losses = True
            self._losses.append(loss.detach().float().mean())
            self._summed = options.get("num_items_in_batch") is not None


class Decisions:
    """What a Trainer and its callbacks have counted to decide by: a worker that is started again has that of the run.

    Args:
        callbacks: the Trainer's; those that can export their state count, such as EarlyStoppingCallback.
    """

    def __init__(self, state: TrainerState, callbacks: Sequence[TrainerCallback]) -> None:
        self._state = state
        self._callbacks = [each for each in callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric so far, and what each callback has counted."""
        counted = [[type(each).__name__, each.state()["attributes"]] for each in self._callbacks]
        return {"best": self._state.best_metric, "step": self._state.best_global_step, "counted": counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these; a callback that is no longer the same keeps its own."""
        self._state.best_metric, self._state.best_global_step = state["best"], state["step"]
        for each, (name, attributes) in zip(self._callbacks, state["counted"], strict=False):
            if type(each).__name__ == name:
                vars(each).update(attributes)


def callbacks_here() -> Sequence[TrainerCallback]:
    """Return the callbacks of the Trainer that is calling one of them; it does not tell them of one another."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back  # type: ignore[assignment]
    return [] if frame is None else list(frame.f_locals["self"].callbacks)


def check(args: TrainingArguments) -> None:
    """Reject arguments with which a Trainer cannot be a worker.

    Raises:
        ConfigError: there are some.
    """
    if args.world_size > 1 or args.parallel_mode.value == "distributed":
        raise ConfigError(
            f"accelerate has set up distributed training ({args.world_size} processes), and lsgd takes its place: "
            f"start the script by `lsgd launch -- python SCRIPT`, without torchrun, accelerate launch or mpirun"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"this process sees {args.n_gpu} GPUs, and the Trainer would use them all by DataParallel; show each "
            f"worker one, by this line before torch is imported: "
            f"os.environ['CUDA_VISIBLE_DEVICES'] = os.environ.get('LSGD_LOCAL_RANK', '0')"
        )
    if args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end would put another model in the consensus' place; leave it out: with save_strategy="
            "'best' one worker saves the best model by the workers' mean of metric_for_best_model, to load afterwards"
        )
    if args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size begins training again after the join; set per_device_train_batch_size")
