"""The Worker: what a training loop embeds to take part in a run."""

import atexit
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lsgd.client import loader as loaders
from lsgd.client.checkpoint.checkpoints import Checkpoints, Stateful
from lsgd.client.checkpoint.model_files import FILE_NBYTES, save_model, save_to_store
from lsgd.client.control.closing import on_error
from lsgd.client.control.identity import Identity, identify
from lsgd.client.control.island import Island, island_of
from lsgd.client.control.joining import LEAVE_WITHIN_S, Membership, join_run, log_to_stderr, torch_optimizers, unwrapped
from lsgd.client.iteration.replica import Replica
from lsgd.client.iteration.reports import Timings
from lsgd.client.iteration.steps import Steps
from lsgd.client.streams import Part, StreamLoader, is_stream
from lsgd.errors import (
    ExchangeError,
    JoinError,
    LsgdError,
    NoConsensusError,
    NonFiniteError,
    NotTrainedError,
    OutlierError,
    ServerLostError,
)
from lsgd.flat import FlatParameters
from lsgd.protocol.messages import LOOP_ENDED, Data, Leave, Left, Status, StatusQuery
from lsgd.run_folder import CHECKPOINTS
from lsgd.settings import AlgorithmSettings
from lsgd.shards import full_state_dict
from lsgd.store.objects import is_url

logger = logging.getLogger("lsgd")

_EndingError = ServerLostError | JoinError | NoConsensusError | NotTrainedError | OutlierError
"""What ends a script that does not handle it with an exit code of its own."""

T = TypeVar("T")


class Worker:
    """A member of a run: it asks before each iteration, and carries out the rounds that the servers order.

    It is one process, or an island: several processes that share a model sharded by FSDP2 (``fully_shard``). All
    processes of an island call the same methods in the same order.

    :meth:`join` makes one. It is a context manager, which leaves the run at its end::

        with Worker.join(model, optimizer) as worker:
            loader = worker.loader(dataset, batch_size=64)
            while not worker.stopped:
                for x, y in worker.batches(loader):
                    loss = criterion(model(x), y)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    worker.report(loss)

    A step in which an optimizer steps is an iteration. Other steps (micro-batches of gradient accumulation, steps
    that GradScaler skips) need no iteration and do not count.

    A loop that is not a ``for`` over batches uses :meth:`begin_step` and :meth:`end_step`.

    If the run ended with a non-finite model, the end of the ``with`` block leaves the run, names the tensors, and
    ends the process with exit code 65 (:class:`lsgd.errors.NonFiniteError`).
    """

    def __init__(self, membership: Membership, replica: Replica, steps: Steps, checkpoints: Checkpoints) -> None:
        self.plan = membership.plan
        """The settings of the run."""
        self._membership = membership
        self._channel = membership.channel
        self._replica = replica
        self._steps, self._checkpoints, self._open = steps, checkpoints, True
        self._data = loaders.FirstData(lambda digest: self._channel.send(Data(*membership.who, digest)))
        self._parts = weakref.WeakSet[Part]()
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
        identity: Identity | None = None,
    ) -> Self:
        """Join the run of this machine's local server, and return when all expected workers have joined.

        The server's address, this worker's number on the machine and its device come from the variables
        ``LSGD_LOCAL``, ``LSGD_LOCAL_RANK`` and ``LSGD_DEVICE``, which ``lsgd launch`` sets; otherwise from torchrun's
        or Slurm's. Join after the model is on its device and in its dtype: the parameters move into flat buffers
        (the Parameter objects stay the same), and must stay there.

        Args:
            model: any module with dense floating-point parameters; those that require gradients are exchanged.
            optimizer: the optimizer of these parameters, a wrapper with it as ``.optimizer``, or a list of them.
            timeout_s: longest wait for the other workers.
            checkpoint_dir: folder for this run's checkpoints. None: ``checkpoints`` in :attr:`run_dir`, if that is set.
            extra: objects to checkpoint by name, with ``state_dict`` and ``load_state_dict``, such as a GradScaler.
                If the run resumes (``LSGD_RESUME``), this call restores them, like the model and the optimizers.
            identity: this worker's place in the run, instead of the variables: several workers can so join as
                threads of one process. None: :func:`lsgd.client.control.identity.identify`.

        Raises:
            JoinError: no local server answers within 5 s, the run refuses this worker, or ``timeout_s`` has passed.
            RunOverError: the run has ended, or is about to; if the script does not handle it, the process ends with
                exit code 0.
            ConfigError: the model, an optimizer, a variable or a checkpoint cannot be used.
        """
        island = island_of(model)
        log_to_stderr(logging.INFO if island.is_head else logging.WARNING)
        with on_error(island.close):
            optimizers = torch_optimizers(model, optimizer)
            identity = identity or island.share("joins", identify)
            if checkpoint_dir is None and identity.run_dir is not None:
                checkpoint_dir = identity.run_dir / CHECKPOINTS
            checkpoints = Checkpoints(model, optimizers, extra or {}, checkpoint_dir, identity.resume, island)
            checkpoints.restarted = identity.restarted
            membership = join_run(model, identity, timeout_s, checkpoints.load, island)
            checkpoints.start(membership.welcome.run)
            flat = FlatParameters(model, offload=membership.plan.run.offload, layout=checkpoints.layout)
            replica = Replica(membership, flat, model, optimizers, checkpoints)
            return cls(membership, replica, Steps(membership, replica, checkpoints), checkpoints)

    # -- what a training loop uses -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This worker's name in the run: ``node0/worker1``."""
        return self._membership.join.worker

    @property
    def is_head(self) -> bool:
        """Whether this process speaks for its worker: the first of an island, or the only one."""
        return self._membership.island.is_head

    @property
    def rank(self) -> int:
        """Rank in the current generation; before the first round, the one expected."""
        return self._steps.rounds.rank

    @property
    def world_size(self) -> int:
        """Members of the current generation; before the first round, those expected in it."""
        return self._steps.rounds.world_size

    @property
    def progress(self) -> float:
        """Share of the whole run that is done, 0 to 1, for your own schedules (:meth:`schedule` has some)."""
        return self._steps.rounds.grants.progress.share()

    @property
    def stopped(self) -> bool:
        """Whether the run has ended and the model is the consensus, or this worker has left the run."""
        return self._steps.rounds.grants.stopped

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._membership.device

    @property
    def run_dir(self) -> Path | None:
        """The results folder that the launcher made; None without a launcher."""
        return self._membership.identity.run_dir

    @property
    def algorithm(self) -> AlgorithmSettings:
        """The algorithm of the run's current phase, with its settings since the last global round."""
        return self._replica.algorithm.settings

    @property
    def iterations(self) -> int:
        """Iterations that this worker has completed, including those before the checkpoint that it resumed from."""
        return self._checkpoints.iterations + self._steps.rounds.grants.done

    @property
    def consensus_distance(self) -> float | None:
        """Mean over workers of |x - mean| / |mean| just before the consensus; None until then."""
        return self._replica.consensus_distance

    @property
    def timings(self) -> Timings:
        """Where this worker's time went since it joined, and how many bytes it sent and received."""
        return self._steps.rounds.timings()

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> loaders.ShardLoader | StreamLoader:
        """Return a DataLoader of this worker's shard of ``dataset``; each process of an island gets a part of it.

        Every epoch deals new shards, which are disjoint, cover the dataset, and follow the membership. The loader's
        ``state_dict()`` says how far training is; it counts batches consumed, not prefetched. A stream is divided as
        by :meth:`shard`, and neither shuffled nor seeded here.

        Args:
            dataset: object with a length and ``__getitem__``, or a stream; the same on all workers.
            batch_size: samples in a batch of this worker.
            shuffle: whether to shuffle the shard; either way every epoch deals new shards.
            seed: number for the shards and the shuffling, the same on all workers.
            options: any other argument of torch.utils.data.DataLoader except ``sampler`` and ``batch_sampler``.

        Raises:
            ConfigError: the dataset has fewer samples than workers, or is neither a dataset nor a stream.
        """
        island, options = self._membership.island, {"batch_size": batch_size, **options}
        if is_stream(dataset):
            agree = partial(_all_have_a_batch, island)
            return self._checkpoints.attend(StreamLoader(self._part(dataset), agree, options))
        loader = loaders.shard_loader(dataset, partial(_place, weakref.ref(self)), seed, shuffle, options, island.size)
        return self._checkpoints.attend(loader)

    def shard(self, stream: Iterable[Any]) -> Part:
        """Return this worker's part of a stream, for a loader of your own or for :meth:`batches`.

        Each pass divides the stream anew, by the members of that time. Streams of ``datasets`` and webdataset are
        divided by files where these suffice. Of any other, each worker reads all and takes every n-th element, and a
        change of members counts at once. Checkpoints have its place, if nothing reads ahead; see :meth:`attend`.

        Args:
            stream: iterable, the same on all workers: shuffled with the same seed, if at all.

        Raises:
            ConfigError: it is no stream.
        """
        return self._checkpoints.attend(self._part(stream))

    def attend(self, name: str, thing: Stateful) -> None:
        """Save an object in checkpoints from now on; if the run resumes, restore it at once. As ``extra`` of the join.

        Args:
            name: text that no other such object has.
            thing: object with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

        Raises:
            ConfigError: the name is taken, or the object has no such methods.
        """
        self._checkpoints.attend_extra(name, thing)

    def _part(self, stream: Iterable[Any]) -> Part:
        part = Part(stream, partial(_place, weakref.ref(self)))
        self._parts.add(part)
        return part

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches, each in its own step (:meth:`begin_step`, :meth:`end_step`).

        Ends with the loader, or for good when the run stops; then no drawn batch is wasted. Rounds change the model
        between iterations only. After the last batch the worker asks for no iteration, because the script may pause
        between two passes.

        Raises:
            DetachedError: a parameter was replaced, or taken from its optimizer, since the join.
            JoinError: the servers refuse this worker, because it trains on another's data (exit code 77).
            EvictedError: the run continues without this worker (exit code 76: ``lsgd launch`` starts it again).
            ServerLostError: the servers were silent for longer than ``server_timeout_s`` (exit code 75).
            NoConsensusError: the run has ended for this worker without a consensus (exit code 74).

        Before the last two are raised, this worker's state is saved. If the script does not handle the last four,
        the end of the ``with`` block ends the process with that exit code.
        """
        if self.stopped:
            return
        self._check_open()
        self._steps.close_step()
        left = loaders.length(loader)
        source = self._data.of(loader, self.world_size)
        try:
            while self.begin_step():
                try:
                    batch = next(source)
                except StopIteration:
                    return
                yield batch
                left -= 1
                if left and not self.end_step():
                    return
                if not left:
                    self._steps.close_step()
                    more, source = loaders.peek(source)  # more than len() said
                    if not more:
                        return
        finally:
            self._steps.close_step()

    def begin_step(self) -> bool:
        """Begin a step: get an iteration and carry out its round, unless :meth:`end_step` already has.

        Call it before you draw the step's batch: a checkpoint counts every drawn batch as trained on.

        Returns:
            Whether there is a step to run. If not, the run has ended, and the model is the consensus.

        Raises:
            LsgdError: the last step has not ended, no optimizer steps, or the worker has left; else as batches().
            ConfigError: the plan elects by a probe, and none is registered.
        """
        if not self.stopped:
            self._check_open()
        begun = self._steps.begin()
        for part in self._parts:
            part.follow()
        return begun

    def end_step(self, loss: Tensor | float | None = None) -> bool:
        """End a step, after the optimizer's: count it, get the next iteration, and carry out its round.

        To pause, do so before this call: a pause gives back what was granted. A loss is for :meth:`report`.

        Returns:
            Whether the run continues. If not, it has ended, and the model is the consensus.

        Raises:
            LsgdError: no step has begun; else as batches().
        """
        if loss is not None:
            self.report(loss)
        return self._steps.end()

    def schedule(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        kind: str = "wsd",
        *,
        warmup: float = 0.0,
        decay: float = 0.2,
    ) -> None:
        """Set the learning rates before each iteration from now on, by the run's progress.

        A parameter group's rate is its base rate times :func:`lsgd.learning_rate.factor`. The base is the rate at the
        first call; the group and its checkpoints keep it as ``initial_lr``.

        Args:
            optimizer: one or several that joined, perhaps wrapped.
            kind: ``wsd`` (constant, then linear to 0), ``cosine`` or ``linear``, each after the warm-up.
            warmup: share of the run in which the rate rises from 0.
            decay: share of the run in which it falls with ``wsd``.

        Raises:
            ConfigError: an argument is wrong, or the plan has no end.
        """
        self._steps.schedules.add(unwrapped(optimizer), kind, warmup, decay)

    def report(self, loss: Tensor | float) -> None:
        """Record the loss of a batch; elections compare the mean of the last ones. Never waits for a GPU."""
        self._steps.rounds.election.losses.add(loss)

    def log(self, numbers: Mapping[str, Tensor | float]) -> None:
        """Log your own numbers by name. The run shows the mean over its live workers of each one's last number.

        They reach the servers, the loggers (``user/NAME``) and the metrics within a second. A tensor on a GPU is waited
        for, so log now and then, not in every step. A non-finite number counts as none.

        Args:
            numbers: at most 32 names in all, each of at most 64 letters, digits, ``_``, ``-``, ``.`` and ``/``.

        Raises:
            ConfigError: a name or a number is invalid, or there are too many names.
        """
        self._steps.rounds.logged.add(numbers)

    def probe(self, evaluate: Callable[[], Tensor | float]) -> None:
        """Register what ``election = "probe"`` compares: a function that returns the loss on a batch all workers share.

        It is called before rounds, without gradients and with the model in evaluation mode.
        """
        self._steps.rounds.election.register(evaluate)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients: for all micro-batches of an accumulation except the last, as in DDP.

        Methods that exchange models need it only for more than 128 micro-batches.
        """
        self._steps.useful = True
        gradients = self._steps.rounds.gradients
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
        """Step aside to evaluate or to save: rounds continue without this worker until its next iteration.

        Pause after the step of a batch, or between two loops: an iteration that has not run is given back.
        A worker that misses a global round takes the leader's model when it comes back.
        """
        self._steps.pause()
        yield

    def status(self) -> dict[str, Any]:
        """Return the state of the whole run, from the global server; docs/guides/monitoring.md lists the keys.

        In an island only the head can ask, and the other processes need not call this.
        """
        self._check_open()
        if not self.is_head:
            raise LsgdError(f"{self.name}: status() is for the head of an island: if worker.is_head: worker.status()")
        query = StatusQuery(self._membership.identity.incarnation)
        answer: Status = self._channel.ask(query, lambda m: isinstance(m, Status), what="waiting for the status")
        return dict(json.loads(answer.report))

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the whole model in host memory; after the run it is the consensus.

        In an island all processes call it; the head gets the model, the others an empty dict.
        """
        return full_state_dict(self._replica.model)

    def save(self, folder: Path | str | None = None, *, file_nbytes: int = FILE_NBYTES) -> list[Path] | list[str]:
        """Write the whole model (after the run, the consensus) to a folder as safetensors files; return their paths.

        They have the names that Hugging Face's libraries expect: ``model.safetensors``, or several files and an index.
        Tied parameters are written once, under their first name. One worker saves: ``if worker.rank == 0``. In an
        island all processes call it, and the head writes.

        Args:
            folder: created if missing; or the URL of a store, such as ``s3://bucket/model``, which gets the index last.
                None: :attr:`run_dir`; without a run_dir, the current folder.
            file_nbytes: longest file, in bytes; a longer tensor gets its own file.

        Raises:
            ConfigError: ``file_nbytes`` is less than 1, or the store's package is missing.
            LsgdError: the files cannot be written, or an island has left the run.
        """
        island = self._membership.island
        if island.size > 1:
            self._check_open()
        if isinstance(folder, str) and is_url(folder):
            return save_to_store(self._replica.model, folder, file_nbytes, island)
        folder = Path(folder) if folder is not None else self.run_dir or Path()
        return save_model(self._replica.model, folder, file_nbytes, island)

    def leader_state_dict(self) -> dict[str, Tensor] | None:
        """Return the leader's model just before the consensus, as :meth:`state_dict` does; None until then."""
        return self._replica.leader_state_dict()

    def leave(self) -> bool:
        """Leave before the end of the run, after giving the others what this worker has learnt.

        It takes part in the next global round. If all workers leave, that round computes the consensus, as at the end
        of the plan. If others continue, the model stays as after that round. (Where gradients are exchanged, models
        are identical after each iteration, so there is no such round.)

        Returns whether the model is the run's consensus; :attr:`stopped` is true in any case. Raises as batches(), and
        a NotTrainedError (exit code 78) if this worker has completed no iteration, though its optimizers have stepped.
        """
        if self._open and not self.stopped and not self._steps.finish():
            self._end(reason="it has completed its last round")
        return self._steps.rounds.has_consensus

    def _end(self, *, failed: bool = False, reason: str = "") -> None:
        """Tell the servers once that this worker leaves; unused grants go back."""
        if not self._open:
            return
        self._open = False
        self._steps.close()
        why = reason or ("the run is over" if self.stopped else LOOP_ENDED)
        self._steps.rounds.entry.leave(cut=failed)
        if not self.is_head:
            self._membership.close()
            return
        try:
            done, committed = self._steps.rounds.grants.done, self._steps.rounds.committed
            message = Leave(*self._membership.who, done, failed, why, committed)
            self._channel.ask(message, lambda m: isinstance(m, Left), what="leaving", timeout_s=LEAVE_WITHIN_S)
        except (ExchangeError, JoinError, ServerLostError) as error:
            logger.warning(
                "%s has left without an answer from the servers (%s): nothing is lost, they notice the process's end",
                *(self.name, error),
            )
        finally:
            self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        looks = error is None and self.stopped and (self._open or self._membership.island.size == 1)
        broken = self._checkpoints.non_finite_error() if looks else None
        self._end(failed=error is not None, reason=f"{kind.__name__}: {error}" if kind else "")
        if isinstance(error, _EndingError):
            self._exit(error)
        if broken is not None:
            self._exit(broken)

    def _exit(self, error: _EndingError | NonFiniteError) -> NoReturn:
        logger.error("%s ends with exit code %d: %s", self.name, error.exit_code, error)
        raise SystemExit(error.exit_code) from error

    def _check_open(self) -> None:
        if not self._open:
            calls = "batches(), begin_step(), status() and the save() of an island"
            where = f"{calls} belong inside the with block of Worker.join, before leave()"
            raise LsgdError(f"{self.name} has left the run; {where}")


def _place(me: "weakref.ref[Worker]") -> tuple[int, int]:
    """Return the rank and the number of this process among the processes of all workers."""
    worker = me()
    assert worker is not None, "the loader has outlived its worker"
    island = worker._membership.island
    return worker.rank * island.size + island.rank, worker.world_size * island.size


def _all_have_a_batch(island: Island, has: bool) -> bool:
    return all(island.gather("draws a batch", has))


def _leave_at_exit(me: "weakref.ref[Worker]") -> None:
    """Leave when a script ends without ending a ``with`` block."""
    worker = me()
    if worker is not None:
        worker._end(reason="its process ended")
