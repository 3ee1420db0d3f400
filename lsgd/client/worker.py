"""The Worker: what a training loop embeds to take part in a run."""

import atexit
import json
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lsgd.client import loader as loaders
from lsgd.client.checkpoint.checkpoints import Checkpoints, Stateful
from lsgd.client.checkpoint.run_folder import CHECKPOINTS
from lsgd.client.control.identity import identify
from lsgd.client.control.joining import LEAVE_WITHIN_S, Membership, check_optimizers, join_run, log_to_stderr
from lsgd.client.iteration.exchange import Exchanger
from lsgd.client.iteration.turns import Turns
from lsgd.errors import (
    ExchangeError,
    JoinError,
    LeftOutError,
    LsgdError,
    NoConsensusError,
    NonFiniteError,
    ServerLostError,
)
from lsgd.flat import FlatParameters
from lsgd.protocol.messages import (
    Data,
    Leave,
    Left,
    Status,
    StatusQuery,
)
from lsgd.settings import AlgorithmSettings

logger = logging.getLogger("lsgd")

T = TypeVar("T")


class Worker:
    """One process of a run: it asks before each iteration, and carries out the rounds that it is told of.

    Made by :meth:`join`; a context manager, which leaves the run at its end::

        with Worker.join(model, optimizer) as worker:
            loader = worker.loader(dataset, batch_size=64)
            while not worker.stopped:
                for x, y in worker.batches(loader):
                    loss = criterion(model(x), y)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    worker.report(loss)

    One iteration is one turn of that loop in which an optimizer stepped. A turn without a step (a micro-batch of
    gradient accumulation, a step that GradScaler skipped) asks nothing and counts nothing.

    If the run has ended with a model that is not finite, the end of the ``with`` block leaves the run, says which
    tensors, and ends the process with exit code 65 (:class:`lsgd.errors.NonFiniteError`).
    """

    def __init__(
        self,
        model: nn.Module,
        membership: Membership,
        exchanger: Exchanger,
        turns: Turns,
        checkpoints: Checkpoints,
    ) -> None:
        self.plan = membership.plan
        """The settings of the run."""
        self._model = model
        self._membership = membership
        self._channel = membership.channel
        self._exchanger = exchanger
        self._turns = turns
        self._checkpoints = checkpoints
        self._announced = False
        self._open = True
        atexit.register(_leave_at_exit, weakref.ref(self))

    @classmethod
    def join(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        timeout_s: float = 600.0,
        checkpoint_dir: Path | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> Self:
        """Join the run that this machine's local server belongs to, and return when all expected workers have.

        The server's address, this worker's number on the machine and its device come from the variables
        ``LSGD_LOCAL``, ``LSGD_LOCAL_RANK`` and ``LSGD_DEVICE``, which ``lsgd launch`` sets; else from torchrun's or
        Slurm's. Join after the model is on its device and in its dtype: the parameters move into flat buffers
        (the Parameter objects stay), and must stay there.

        Args:
            model: any module with dense floating-point parameters; those that require gradients are exchanged.
            optimizer: the optimizer of these parameters, or a list of them.
            timeout_s: longest to wait for the other workers.
            checkpoint_dir: folder for this run's checkpoints; None: ``checkpoints`` in :attr:`run_dir`, or none are
                written where there is no such folder.
            extra: what else belongs into a checkpoint, by name: objects with ``state_dict`` and ``load_state_dict``,
                such as a GradScaler. With a checkpoint to go on from (``LSGD_RESUME``), they are restored here, as
                the model and the optimizers are.

        Raises:
            JoinError: no local server answers within 5 s, the run refuses this worker, or the time is over.
            RunOverError: the run has ended, or is about to; where the script does not handle it, the process ends with
                exit code 0.
            ConfigError: the model, an optimizer, a variable or a checkpoint cannot be used.
        """
        log_to_stderr()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        check_optimizers(model, optimizers)
        identity = identify()
        flat = FlatParameters(model)
        if checkpoint_dir is None and identity.run_dir is not None:
            checkpoint_dir = identity.run_dir / CHECKPOINTS
        checkpoints = Checkpoints(model, optimizers, extra or {}, checkpoint_dir, identity.resume)
        checkpoints.restarted = identity.restarted
        membership = join_run(model, identity, timeout_s, checkpoints.load)
        checkpoints.start(membership.welcome.run)
        exchanger = Exchanger(membership, flat, model, optimizers)
        if checkpoints.algorithm is not None:
            exchanger.resume(checkpoints.algorithm)
        turns = Turns(membership, exchanger, optimizers, checkpoints)
        return cls(model, membership, exchanger, turns, checkpoints)

    # -- what a training loop uses -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This worker's name in the run: ``node0/worker1``."""
        return self._membership.join.worker

    @property
    def rank(self) -> int:
        """Rank in the current generation; before the first round, the one expected."""
        return self._turns.rounds.rank

    @property
    def world_size(self) -> int:
        """Members of the current generation; before the first round, those expected in it."""
        return self._turns.rounds.world_size

    @property
    def progress(self) -> float:
        """Share of the whole run that is made, 0 to 1, as of the last answer: for learning-rate schedules."""
        return self._turns.progress

    @property
    def stopped(self) -> bool:
        """Whether the run has ended; the model then is the consensus."""
        return self._turns.stopped

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._membership.device

    @property
    def run_dir(self) -> Path | None:
        """The folder for results that the launcher made, None without a launcher."""
        return self._membership.identity.run_dir

    @property
    def algorithm(self) -> AlgorithmSettings:
        """The algorithm of the run's current phase, with its settings as they are since the last global round."""
        return self._exchanger.algorithm.settings

    @property
    def iterations(self) -> int:
        """Iterations that this worker has made, those before the checkpoint that it goes on from included."""
        return self._checkpoints.iterations + self._turns.done

    @property
    def consensus_distance(self) -> float | None:
        """Mean over workers of |x - mean| / |mean| just before the consensus was made; None before."""
        return self._exchanger.consensus_distance

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> loaders.ShardLoader:
        """Return a DataLoader of this worker's shard of ``dataset``.

        Shards are disjoint, cover the dataset, and follow the membership from the next epoch on. The loader's
        ``state_dict()`` says how far training is; it counts batches consumed, not prefetched.

        Args:
            dataset: with a length and ``__getitem__``, the same on all workers.
            batch_size: samples in a batch of this worker.
            shuffle: whether to shuffle the shard anew each epoch.
            seed: of the shards and the shuffling; must be the same on all workers.
            options: any other argument of torch.utils.data.DataLoader but ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: the dataset has no length or fewer samples than there are workers.
        """
        me = weakref.ref(self)

        def place() -> tuple[int, int]:
            worker = me()
            assert worker is not None, "the loader has outlived its worker"
            return worker.rank, worker.world_size

        loader = loaders.shard_loader(dataset, place, seed, shuffle, {"batch_size": batch_size, **options})
        return self._checkpoints.attend(loader)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches, asking before each iteration and taking part in the rounds that come.

        Ends with the loader, or for good when the run is stopped. Rounds change the model between iterations only.

        Raises:
            DetachedError: a parameter was replaced since the join.
            LeftOutError: the run goes on without this worker. Where the script does not handle it, the end of the
                ``with`` block ends the process with exit code 76, and ``lsgd launch`` starts it again.
            ServerLostError: the servers were silent for longer than ``server_timeout_s``; this worker has written a
                checkpoint then. Where the script does not handle it, the end of the ``with`` block ends the process
                with exit code 75.
            NoConsensusError: the run has ended for this worker without a consensus, since rounds kept failing; it has
                written a checkpoint then. Where the script does not handle it, the end of the ``with`` block ends
                the process with exit code 74.
        """
        if not self._announced:
            loaders.warn_if_unsharded(loader, self.world_size)
        for batch in loaders.track(loader):
            self._turns.finish()
            if not self._turns.granted and not self._begin(batch, loader):
                return
            try:
                yield batch
            finally:
                self._turns.finish()

    def report(self, loss: Tensor | float) -> None:
        """Take in the loss of a batch: the mean of the last ones elects leaders. Never waits for a GPU."""
        self._turns.losses.add(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients: for all micro-batches of an accumulation but the last.

        As with DistributedDataParallel. Methods that exchange models do not need it.
        """
        gradients = self._turns.rounds.gradients
        if gradients is None:
            yield
            return
        gradients.muted = True
        try:
            yield
        finally:
            gradients.muted = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Step aside, to evaluate or to save: rounds go on without this worker until its next iteration.

        Pause after the step of a batch, or between two loops: an iteration that was not made is given back.
        A worker that misses a global round takes over the leader's model when it comes back.
        """
        self._turns.pause()
        yield

    def status(self) -> dict[str, Any]:
        """Return the state of the whole run, from the global server; docs/operations.md lists the keys."""
        query = StatusQuery(self._membership.identity.incarnation)
        answer: Status = self._channel.ask(
            query, lambda m: isinstance(m, Status), what="waiting for the status"
        )
        return dict(json.loads(answer.report))

    def leader_state_dict(self) -> dict[str, Tensor] | None:
        """Return the leader's own model as it was when the consensus was made, as a state dict; None before."""
        led = self._exchanger.leader_model
        if not led:
            return None
        flat = self._exchanger.flat
        state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        parameters, buffers = led[: len(flat.buffers)], led[len(flat.buffers) :]
        windows = flat.windows([z.to(x.dtype) for x, z in zip(flat.buffers, parameters, strict=True)])
        values = {id(slot.parameter): window for slot, window in zip(flat.slots, windows, strict=True)}
        values |= {
            id(b): z.view(b.shape) for b, z in zip(self._exchanger.finite.buffers(), buffers, strict=True)
        }
        for name, tensor in self._model.state_dict(
            keep_vars=True
        ).items():  # tied ones under each of their names
            if id(tensor) in values:
                state[name].copy_(values[id(tensor)])
        return state

    def leave(self, *, failed: bool = False, reason: str = "") -> None:
        """Leave the run; unused grants go back. The end of the ``with`` block does it."""
        if not self._open:
            return
        self._open = False
        self._turns.close()
        join = self._membership.join
        why = reason or ("the run is over" if self.stopped else "its training loop ended")
        self._exchanger.leave(cut=failed)
        try:
            message = Leave(
                join.worker, join.incarnation, self._turns.done, failed, why, self._turns.rounds.committed
            )
            self._channel.ask(
                message, lambda m: isinstance(m, Left), what="leaving", timeout_s=LEAVE_WITHIN_S
            )
        except (ExchangeError, JoinError, ServerLostError) as error:
            logger.warning("%s leaves without the servers' knowing: %s", self.name, error)
        finally:
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(failed=error is not None, reason=f"{kind.__name__}: {error}" if kind else "")
        if isinstance(error, ServerLostError | LeftOutError | NoConsensusError):
            self._exit(error)
        if error is None and self.stopped and (values := self._checkpoints.non_finite()):
            self._exit(self._non_finite(values))

    def _exit(self, error: ServerLostError | LeftOutError | NoConsensusError | NonFiniteError) -> NoReturn:
        logger.error("%s ends with exit code %d: %s", self.name, error.exit_code, error)
        raise SystemExit(error.exit_code) from error

    def _non_finite(self, values: str) -> NonFiniteError:
        last = self._checkpoints.last()
        return NonFiniteError(
            f"the model at the end of the run is not finite: {values}; lower the learning rate (on a resume, after "
            f"Worker.join, since a checkpoint has its own), and "
            + (f"go on from {last} with lsgd launch --resume (RESUME=1)" if last else "begin a new run")
        )

    def _begin(self, batch: object, loader: object) -> bool:
        """Ask for an iteration; return False if the run has ended."""
        if self.stopped:
            return False
        if not self._open:
            raise LsgdError(
                f"{self.name} has left the run; batches() belongs inside the with block of Worker.join"
            )
        self._announce_data(batch, loader)
        self._checkpoints.drawn_from = loader
        try:
            return self._turns.begin()
        except LeftOutError:
            raise
        except (ServerLostError, JoinError) as error:
            raise type(error)(f"{error}; {self._turns.rounds.keep()}") from error

    def _announce_data(self, batch: object, loader: object) -> None:
        """Before the first iteration on data of the user's own, let the servers compare it with the others'."""
        if self._announced or isinstance(loader, loaders.ShardLoader):
            return
        self._announced = True
        if digest := loaders.digest(batch):
            join = self._membership.join
            self._channel.send(Data(join.worker, join.incarnation, digest))


def _leave_at_exit(me: "weakref.ref[Worker]") -> None:
    """Leave for a script that ends without the end of a ``with`` block."""
    worker = me()
    if worker is not None:
        worker.leave(reason="its process ended")
