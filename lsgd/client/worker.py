"""The Worker: what a training loop embeds to take part in a run."""

import atexit
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lsgd import script_lines
from lsgd.algorithms.base import is_muon
from lsgd.algorithms.gradient import GradientAlgorithm
from lsgd.client.checkpoint.checkpoints import Checkpoints
from lsgd.client.checkpoint.extras import Stateful
from lsgd.client.checkpoint.model_files import FILE_NBYTES, save_model, save_to_store
from lsgd.client.control.closing import CodedError, exit_at_once, exit_for, leave_ended, leave_on_errors, on_error
from lsgd.client.control.identity import Identity
from lsgd.client.control.island import Island, island_of
from lsgd.client.control.joining import (
    LEAVE_WITHIN_S,
    Membership,
    find_server,
    join_run,
    log_to_stderr,
    torch_optimizers,
    unwrapped,
)
from lsgd.client.control.replicas import bare, ddp_of
from lsgd.client.data.deals import facts_of, facts_of_stream, place_in_script
from lsgd.client.data.ending import EndingLoader
from lsgd.client.data.first import FirstData, FirstSteps
from lsgd.client.data.passes import Pass, Passes, peek, rows_of
from lsgd.client.data.randomness import OwnInEachProcess, begin_own
from lsgd.client.data.samplers import options_of, shard_of
from lsgd.client.data.shards import ShardLoader, length, shard_loader
from lsgd.client.data.streams import Part, StreamLoader, is_stream
from lsgd.client.data.trainers import TrainerData
from lsgd.client.iteration.replica import Replica
from lsgd.client.iteration.reports import Timings, numbers_of
from lsgd.client.iteration.step import Event
from lsgd.client.iteration.steps import Steps
from lsgd.client.room import lack_of_room
from lsgd.errors import (
    ConfigError,
    ExchangeError,
    JoinError,
    LsgdError,
    NoConsensusError,
    ServerLostError,
)
from lsgd.flat import FlatParameters
from lsgd.observer import listen_if_asked, observed, observer
from lsgd.protocol.messages import LOOP_ENDED, MAX_LOGGED, Data, Dealt, Leave, Left, Status, StatusQuery, Stop
from lsgd.run_folder import CHECKPOINTS
from lsgd.schedulers import counts, inner
from lsgd.settings import AlgorithmSettings
from lsgd.shards import full_state_dict
from lsgd.store.objects import is_url

logger = logging.getLogger("lsgd")

T = TypeVar("T")
D = TypeVar("D", bound=EndingLoader | Part)

FINISH_WITHIN_S = 86_400.0
"""How long a worker that has finished waits for the others by default, in seconds."""


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

    A loop that is not a ``for`` over batches uses :meth:`begin_step` and :meth:`end_step`, and a script that is to stay
    as it is :func:`lsgd.wrap`, which calls them by hooks.

    If the run ended with a non-finite model, the end of the ``with`` block (or :meth:`finish`, or the end of the
    script) leaves the run, names the tensors, and ends the process with exit code 65
    (:class:`lsgd.errors.NonFiniteError`).
    """

    def __init__(
        self, membership: Membership, replica: Replica, steps: Steps, checkpoints: Checkpoints, first: FirstSteps
    ) -> None:
        self.plan = membership.plan
        """The settings of the run."""
        self._membership = membership
        self._channel = membership.channel
        self._replica = replica
        self._steps, self._checkpoints = steps, checkpoints
        self._pid = os.getpid()
        self._first, self._data = first, FirstData(first)
        leave_on_errors(self)
        self._parts = weakref.WeakSet[Part]()
        self._samplers: list[Passes] = []
        self._facts: dict[str, dict[str, str]] = {}  # last told of the data that is dealt at a place of the script
        atexit.register(_leave_at_exit, weakref.ref(self))

    @classmethod
    def join(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        timeout_s: float = 600.0,
        checkpoint_dir: Path | str | None = None,
        extra: Mapping[str, Stateful] | None = None,
        step: int = 0,
        same_data: bool = False,
        identity: Identity | None = None,
    ) -> Self:
        """Join the run of this machine's local server, and return when all expected workers have joined.

        The server's address, this worker's number on the machine and its device come from the variables
        ``LSGD_LOCAL``, ``LSGD_LOCAL_RANK`` and ``LSGD_DEVICE``, which ``lsgd launch`` sets; otherwise from torchrun's
        or Slurm's. Join after the model is on its device and in its dtype. Nothing of it changes: rounds find
        the parameters by their names.

        Args:
            model: any module with dense floating-point parameters; those that require gradients are exchanged.
            optimizer: the optimizer of these parameters, a wrapper with it as ``.optimizer`` or ``.base_optimizer``, or
                a list of them.
            timeout_s: longest wait for the local server, if it is there but busy, and for the other workers.
            checkpoint_dir: folder for this run's checkpoints. None: ``checkpoints`` in :attr:`run_dir`, if that is set.
            extra: objects to checkpoint by name, with ``state_dict`` and ``load_state_dict``, such as a GradScaler.
                If the run resumes (``LSGD_RESUME``), this call restores them, like the model and the optimizers.
            step: iteration at which the script's own loop begins, if it has resumed by itself; see :attr:`step`.
            same_data: whether workers are meant to learn from the same data with the same random numbers; otherwise the
                servers refuse two whose first gradients are equal.
            identity: this worker's place in the run, instead of the variables: several workers can so join as
                threads of one process. None: :func:`lsgd.client.control.identity.identify`.

        Raises:
            JoinError: no local server is there within 5 s, the run refuses this worker, or ``timeout_s`` has passed.
            RunOverError: the run has ended, or is about to; if the script does not handle it, the process ends with
                exit code 0.
            ConfigError: the model, an optimizer, a variable or a checkpoint cannot be used.
        """
        listen_if_asked()
        if identity is None:  # else there may be several workers in this process, each in a thread
            leave_ended()
        island, ddp = island_of(model), ddp_of(model)
        model = bare(model)
        log_to_stderr(logging.INFO if island.is_head else logging.WARNING)
        with on_error(island.close):
            optimizers = torch_optimizers(model, optimizer)
            found = find_server(island, identity, timeout_s)
            with on_error(found.close):
                identity = found.identity
                if checkpoint_dir is None and identity.run_dir is not None:
                    checkpoint_dir = identity.run_dir / CHECKPOINTS
                folder = None if checkpoint_dir is None else Path(checkpoint_dir)
                checkpoints = Checkpoints(
                    model, optimizers, extra or {}, folder, identity.resume, island, identity.stage
                )
                checkpoints.restarted = identity.restarted
                muon, load = is_muon(optimizers), checkpoints.load
                lack = lack_of_room(model) if muon else ""
                membership = join_run(model, found, timeout_s, load, island, step, bears_delay=muon and not lack)
                if lack and membership.plan.algorithm.delay_is_auto:
                    logger.warning("%s", lack)
                checkpoints.start(membership.welcome.run)
                flat = FlatParameters(model, offload=membership.plan.run.offload, layout=checkpoints.layout)
                if membership.plan.run.own_noise:
                    begin_own(membership.join.worker, island.rank, identity.restarted and identity.incarnation)
                replica = Replica(membership, flat, model, optimizers, checkpoints, ddp)
                first = FirstSteps(lambda *digests: membership.channel.send(Data(*membership.who, *digests)))
                if same_data:
                    first.tell_nothing()
                exchanged = isinstance(replica.algorithm, GradientAlgorithm)
                first.watch(model.parameters(), replica.optimizers, exchanged=exchanged)
                worker = cls(membership, replica, Steps(membership, replica, checkpoints), checkpoints, first)
                if membership.passed:
                    worker._pass()
                observer().joined(worker, model, optimizers)
                return worker

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
        return self._steps.rounds.seat.rank

    @property
    def world_size(self) -> int:
        """Members of the current generation; before the first round, those expected in it."""
        return self._steps.rounds.seat.world_size

    @property
    def part(self) -> tuple[int, int]:
        """This worker's part of the data in this generation, counted from 0, and the number of parts.

        Workers that only evaluate, are late or have finished their own loops keep theirs, so that an epoch is no longer
        for the others.
        """
        return self._steps.rounds.seat.part

    @property
    def first(self) -> bool:
        """Whether this worker saves for all: ``if worker.first: save()``.

        It is true for exactly one worker, in all processes of its island, from the join on. Only if that worker is not
        there when the run's last round makes the consensus, rank 0 of that round takes its place.
        """
        if (ending := self._steps.rounds.grants.ending) is not None and ending.late:
            return False
        members = self._steps.rounds.final_members
        gone = bool(members) and self._membership.welcome.first not in members
        return members[0] == self.name if gone else self._membership.welcome.first == self.name

    @property
    def steps(self) -> int:
        """Length of the script's own loop in iterations; 0: it has none, and the plan ends the run.

        A run whose plan has no end has as many iterations as the loops of its workers together. Set it before the
        first step: an epoch's length may depend on the number of workers.
        """
        return self._steps.rounds.grants.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        check_steps(steps)
        self._steps.rounds.grants.steps = int(steps)
        self._steps.rounds.grants.progress.expect(int(steps))

    @property
    def step(self) -> int:
        """Place of this worker in its script's own loop: iterations before the join, and those since.

        It is 0 in a new run, or what the join was told. A worker that resumes from a checkpoint of lsgd, joins later or
        is started again begins where the others are: ``for step in range(worker.step, max_steps)``.
        """
        observer().reads("step")
        step = self._membership.welcome.step + self._steps.rounds.grants.done
        return max(step, self.steps) if self._membership.passed else step

    @property
    def progress(self) -> float:
        """Share of the whole run that is done, 0 to 1, for your own schedules (:meth:`schedule` has some)."""
        return self._steps.rounds.grants.progress.share()

    @property
    def stopped(self) -> bool:
        """Whether the run has ended and the model is the consensus, or this worker has left the run."""
        observer().reads("stopped")
        return self._steps.step.has_ended

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
        return self._checkpoints.resumed.iterations + self._steps.rounds.grants.done

    @property
    def consensus_distance(self) -> float | None:
        """Mean over workers of |x - mean| / |mean| just before the consensus; None until then."""
        return self._replica.consensus_distance

    @property
    def timings(self) -> Timings:
        """Where this worker's time went since it joined, and how many bytes it sent and received."""
        return self._steps.rounds.timings()

    @observed
    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> ShardLoader | StreamLoader:
        """Return a DataLoader of this worker's shard of ``dataset``; each process of an island gets a part of it.

        Every epoch deals new shards, which are disjoint, cover the dataset, and follow the membership. A loader that is
        made anew for each epoch goes on with the epoch after those of earlier ones of the same data. The loader's
        ``state_dict()`` says how far training is; it counts batches consumed, not prefetched. A stream is divided as
        by :meth:`shard`, and neither shuffled nor seeded here. When the run ends, the pass under way ends, and later
        ones are empty.

        Args:
            dataset: object with a length and ``__getitem__``, or a stream; the same on all workers.
            batch_size: samples in a batch of this worker.
            shuffle: whether to shuffle the shard; either way every epoch deals new shards.
            seed: number for the shards and the shuffling, the same on all workers.
            options: any other argument of torch.utils.data.DataLoader except ``sampler`` and ``batch_sampler``; a
                ``generator`` is not used.

        Raises:
            ConfigError: the dataset has fewer samples than workers, or is neither a dataset nor a stream.
        """
        island, options = self._membership.island, self._own({"batch_size": batch_size, **options})
        if isinstance(dataset, DataLoader):
            raise ConfigError(
                "loader() makes a DataLoader of a dataset or of a stream; to divide a DataLoader, use "
                "worker.shard(loader)"
            )
        if is_stream(dataset):
            return self._stream_loader(dataset, options)
        loader = shard_loader(dataset, partial(_place, weakref.ref(self)), seed, shuffle, options, island.size)
        return self._deal(loader)

    def divide(self, loaders: Any, seed: int, begin_at: dict[str, Any] | None = None) -> TrainerData:
        """Let the loaders of another library's Trainer draw this worker's part; checkpoints have its place from now on.

        The loaders stay, and so does the number of batches in their passes, which the Trainer counts.

        Args:
            loaders: DataLoader, or several in lists and dicts, the same on all workers.
            seed: of the parts; the same on all workers.
            begin_at: ``state_dict()`` of what this method has returned in an earlier training; None: at the beginning.

        Raises:
            ConfigError: there is data that lsgd cannot divide.
        """
        self._first.tell_nothing()
        data = TrainerData(loaders, partial(_place, weakref.ref(self)), seed)
        if begin_at:
            data.load_state_dict(begin_at)
        self._checkpoints.extras.attend("lsgd_stream", data)
        data.tell(self._dealt)
        if self.plan.run.own_noise:
            data.begin_own()
        return data

    def _own(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return a loader's options, with which its processes draw numbers of this worker's own."""
        if (init := options.get("worker_init_fn")) is None or not self.plan.run.own_noise:
            return options
        return {**options, "worker_init_fn": OwnInEachProcess(init)}

    def _dealt(self, where: str, facts: dict[str, str]) -> Callable[[int, str], None]:
        """Tell the servers how data is dealt at a place of the script, unless they know; return what tells a pass."""
        if self._facts.get(where) != facts:
            self._facts[where] = facts
            self._channel.send(Dealt(*self._membership.who, where, facts))
        return partial(_tell, weakref.ref(self), where, facts)

    def _stream_loader(self, stream: Iterable[Any], options: dict[str, Any]) -> StreamLoader:
        gather = partial(self._membership.island.gather, "draws a batch")
        loader = StreamLoader(self._part(stream), lambda has: all(gather(has)), options)
        return self._checkpoints.data.attend(self._ending(loader))

    def _deal(self, loader: ShardLoader) -> ShardLoader:
        loader.passes.tell = self._dealt(place_in_script(), facts_of(loader.dataset, loader.passes))
        loader.passes.follow(self._samplers)
        self._samplers.append(loader.passes)
        return self._checkpoints.data.attend(self._ending(loader))

    def _ending(self, data: D) -> D:
        """Let passes over data end with the run, and those of a loader that another library makes of its sampler."""
        for each in (data, getattr(data, "passes", None)):
            if each is not None:
                each.over = partial(_has_ended, weakref.ref(self))
        return data

    @observed
    def shard(self, data: Iterable[Any]) -> Any:
        """Return this worker's part of data: of a DataLoader one like it, of a stream a stream.

        A DataLoader of a dataset with a length gets this worker's shard, and its length, as from :meth:`loader`, if it
        draws at random, in order, or by torch's DistributedSampler. Of torch's other samplers each worker takes every
        n-th index. A sampler, or batch sampler, of the script that holds the dataset draws from this worker's part of
        it; of any other, all workers draw the same order, and each takes every n-th batch. Each pass deals anew.

        What is a shard or a part already is divided as the whole that it is from. When the run ends, the pass under way
        ends, and later ones are empty; but processes of a DataLoader of your own over a part of a stream read on.

        Each pass divides a stream anew, by the members of that time. Streams of ``datasets`` and webdataset are
        divided by files where these suffice. Of any other, each worker reads all and takes every n-th element, and a
        change of members counts at once. Checkpoints have its place, if nothing reads ahead; see :meth:`attend`.

        Args:
            data: DataLoader or stream, the same on all workers, or several in a list or a dict, which stays one; a
                stream shuffled with the same seed, if at all.

        Raises:
            ConfigError: it is neither, a dataset has fewer samples than workers, or a sampler has no length.
        """
        self._first.tell_nothing()
        if isinstance(data, Mapping):
            return {name: self.shard(each) for name, each in data.items()}
        if isinstance(data, list | tuple) and any(isinstance(each, DataLoader) for each in data):
            return [self.shard(each) for each in data]
        if not isinstance(data, DataLoader):
            return self._checkpoints.data.attend(self._part(data))
        options = self._own(options_of(data))
        if is_stream(data.dataset):
            return self._stream_loader(data.dataset, options)
        return self._deal(shard_of(data, partial(_place, weakref.ref(self)), self._membership.island.size, options))

    @observed
    def rows(self, length: int, epoch: int = 0) -> range:
        """Return this worker's rows of a dataset, for a script that draws by hand: no other worker has them.

        They follow the membership, so ask again in each epoch. The rows of another epoch are another worker's of this
        one; together those of all workers are all rows. In an island each process has a part of its worker's.

        Args:
            length: number of rows, the same on all workers.
            epoch: number of the pass over them.

        Raises:
            ConfigError: there are fewer rows than workers.
        """
        self._dealt(place_in_script(), {"length": str(length)})
        return rows_of(length, _place(weakref.ref(self)), epoch)

    @observed
    def attend(self, name: str, thing: Stateful) -> None:
        """Save an object in checkpoints from now on; if the run resumes, restore it at once. As ``extra`` of the join.

        With a scheduler the optimizer gets its rates back, too. Newcomers take over schedulers and GradScalers from a
        member. All else is this worker's own, such as its place in the data; :meth:`follow` is for what is the run's.

        Args:
            name: text that no other such object has.
            thing: object with ``state_dict`` and ``load_state_dict``, such as torchdata's StatefulDataLoader.

        Raises:
            ConfigError: the name is taken, or the object has no such methods.
        """
        self._checkpoints.extras.attend(name, thing)

    @observed
    def follow(self, thing: T, place: Callable[[], int] | None = None) -> T:
        """Let an object be where the run is, also after a resume, a restart or a late join; return it.

        A torch scheduler is stepped to this worker's place: once, if the script has a loop of its own, whose
        ``scheduler.step()`` continues; before each iteration, if the plan ends the run or there is a ``place``. Then
        calls of the script do not count. In a plan with an end, it goes through all of its length.

        Anything else with ``state_dict`` and ``load_state_dict``, such as a ReduceLROnPlateau or what decides about an
        early stop, is saved in checkpoints, and newcomers take over its state from a member.

        Args:
            thing: scheduler, perhaps as accelerate has prepared it, or another object, to be alike on all workers.
            place: returns how many steps the scheduler is to have made, if it is stepped by epoch, or the plan ends the
                run and it does not say how long it is: ``lambda: worker.step // len(loader)``.

        Raises:
            ConfigError: its optimizer did not join, or it is no such object.
        """
        if counts(inner(thing)):
            self._steps.schedulers.add(thing, place)
        else:
            self._checkpoints.extras.follow(inner(thing))
        return thing

    def _part(self, stream: Iterable[Any]) -> Part:
        if isinstance(stream, Part) and stream in self._parts:
            return stream
        part = self._ending(Part(stream, partial(_place, weakref.ref(self))))
        self._dealt(place_in_script(), facts_of_stream(part.stream))
        self._parts.add(part)
        return part

    @observed
    def batches(self, loader: Iterable[T]) -> Pass[T]:
        """Return an iterable over the loader's batches, each in its own step (:meth:`begin_step`, :meth:`end_step`).

        Its length is the loader's, but it ends for good when the run stops; then no drawn batch is wasted. Rounds
        change the model between iterations only. After the last batch the worker asks for no iteration, because the
        script may pause between two passes.

        Raises:
            LsgdError: the model's parameters are others than those joined, or one was taken from its optimizer.
            JoinError: the servers refuse this worker, because it trains on another's data (exit code 77).
            EvictedError: the run continues without this worker (exit code 76: ``lsgd launch`` starts it again).
            ServerLostError: the servers were silent for longer than ``server_timeout_s`` (exit code 75).
            NoConsensusError: the run has ended for this worker without a consensus (exit code 74).
            OutlierError: its changes have not fitted to the others' for too long (exit code 65).

        Before ServerLostError and NoConsensusError are raised, this worker's state is saved. If the script does not
        handle the last five, the end of the ``with`` block ends the process with that exit code.
        """
        return Pass(loader, lambda: self._steps_over(loader))

    def _steps_over(self, loader: Iterable[T]) -> Iterator[T]:
        if self.stopped:
            return
        self._check_open()
        self._steps.close_step()
        left = length(loader)
        source = self._data.of(loader, self.world_size)
        try:
            while self.begin_step():
                try:
                    batch = next(source)
                except StopIteration:
                    return
                self._first.note(batch)
                yield batch
                left -= 1
                if left and not self.end_step():
                    return
                if not left:
                    self._steps.close_step()
                    more, source = peek(source)  # more than len() said
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
        self._first.begin()
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

    def close_step(self) -> None:
        """End a step, after the optimizer's, and leave it to :meth:`begin_step` to get the next iteration."""
        self._steps.close_step()

    @observed
    def schedule(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        kind: str | Callable[[float], float] = "wsd",
        *,
        warmup: float = 0.0,
        decay: float = 0.2,
    ) -> None:
        """Set the learning rates before each iteration from now on, by the run's progress.

        A parameter group's rate is its base rate times :func:`lsgd.learning_rate.factor`. The base is the script's rate
        at the first call; the group keeps it as ``initial_lr``.

        Args:
            optimizer: one or several that joined, perhaps wrapped.
            kind: ``wsd`` (constant, then linear to 0), ``cosine`` or ``linear``, each after the warm-up; or a function
                that returns the factor, given the progress, 0 to 1.
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
        self._steps.accumulate()
        backward = self._steps.rounds.backward
        before, backward.muted = backward.muted, lambda: True
        try:
            yield
        finally:
            backward.muted = before

    def accumulate_while(self, adds_up: Callable[[], bool]) -> None:
        """Only add up gradients in each backward pass in which a function returns true, as inside of no_sync()."""
        self._steps.rounds.backward.muted = adds_up

    @observed
    @contextmanager
    def pause(self) -> Iterator[None]:
        """Step aside to evaluate or to save: rounds continue without this worker until its next iteration.

        Pause after the step of a batch, or between two loops: an iteration that has not run is given back.
        A worker that misses a global round takes the run's model when it comes back. Algorithms that exchange changes
        of models (``local``, ``diloco``, ``sparse``) add what it has learned since its last round.
        """
        self._steps.pause()
        yield

    @observed
    def step_aside(self) -> None:
        """Pause between two iterations, until the next one; in an island only the head's call counts.

        There, one process may evaluate while the others wait.
        """
        if self._membership.island.size == 1:
            self._steps.pause()
        elif self.is_head:
            self._steps.rounds.grants.pause(self._steps.rounds.last.committed, alone=True)

    @observed
    def mean(self, numbers: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return the mean of each number over all workers that train, the same on all of them.

        Each worker calls it, with the same names, in the same order as its other calls: in each one's next call they
        meet. Until the last one has come, it takes part in rounds, and the log says whom it waits for. Workers that
        have finished, left or died do not count. It ends the iteration, so call it after ``optimizer.step()``, or
        between two loops. If the model has other weights than those that the last step left, such as an average to
        evaluate, rounds continue without this worker, as in :meth:`pause`, until its next iteration.
        For best-of saves, plateau schedules and early stopping::

            if worker.mean({"val": evaluate(model)})["val"] < best and worker.first: ...

        After the end of the run it returns this worker's numbers.

        Args:
            numbers: at most 32, with names as in :meth:`log`; NaN, or infinities of both signs, make the mean NaN.

        Raises:
            ConfigError: a name or a number is invalid, or there are too many.
            LsgdError: another worker makes another call; otherwise as batches().
        """
        own = numbers_of(numbers, "mean")
        if len(own) > MAX_LOGGED:
            raise ConfigError(f"mean() takes at most {MAX_LOGGED} numbers, not {len(own)}: call it several times")
        return own if self._steps.step.is_over else self._steps.meet(own)

    @observed
    def barrier(self) -> None:
        """Wait, as in :meth:`mean`, until all workers that train call it, too."""
        self.mean({})

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the state of the whole run, from the global server; docs/guides/monitoring.md lists the keys.

        In an island only the head can ask, and the other processes need not call this.

        Args:
            timeout_s: longest wait; None: as long as the servers may be silent.

        Raises:
            ExchangeError: there was no answer in time; ServerLostError: the servers are gone.
        """
        self._check_open()
        if not self.is_head:
            raise LsgdError(f"{self.name}: status() is for the head of an island: if worker.is_head: worker.status()")
        query = StatusQuery(self._membership.identity.incarnation)
        answer: Status = self._channel.ask(
            query, lambda m: isinstance(m, Status), what="waiting for the status", timeout_s=timeout_s
        )
        return dict(json.loads(answer.report))

    @observed
    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the whole model in host memory; after the run it is the consensus.

        In an island all processes call it; the head gets the model, the others an empty dict.
        """
        return full_state_dict(self._replica.model)

    @observed
    def save(self, folder: Path | str | None = None, *, file_nbytes: int = FILE_NBYTES) -> list[Path] | list[str]:
        """Write the whole model (after the run, the consensus) to a folder as safetensors files; return their paths.

        They have the names that Hugging Face's libraries expect: ``model.safetensors``, or several files and an index.
        Tied parameters are written once, under their first name. One worker saves: ``if worker.first``. In an
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
        if island.replicas:
            if not island.is_head:
                return []
            island = Island()  # the head writes alone
        if island.size > 1:
            self._check_open()
        if isinstance(folder, str) and is_url(folder):
            return save_to_store(self._replica.model, folder, file_nbytes, island)
        folder = Path(folder) if folder is not None else self.run_dir or Path()
        return save_model(self._replica.model, folder, file_nbytes, island)

    def leader_state_dict(self) -> dict[str, Tensor] | None:
        """Return the leader's model just before the consensus, as :meth:`state_dict` does.

        None until then, and if the plan elects no leaders: its algorithm is not ``leader``, and neither ``consensus``
        nor ``buffers`` is.
        """
        return self._replica.leader_state_dict()

    @observed
    def leave(self) -> bool:
        """Leave before the end of the run, after giving the others what this worker has learnt.

        It takes part in the next global round, or in one of each fragment. If all workers leave, that round computes
        the consensus, as at the end of the plan. If others continue, the model stays as after that round. (Where
        gradients are exchanged, models are identical after each iteration, so there is no such round.)

        Returns whether the model is the run's consensus; :attr:`stopped` is true in any case. Raises as batches(), and
        a NotTrainedError (exit code 78) if this worker has completed no iteration.
        """
        if not self._steps.step.is_over and not self._steps.finish():
            self._end(reason="it has completed its last round")
        return self._steps.rounds.has_consensus

    @observed
    def finish(self, *, timeout_s: float = FINISH_WITHIN_S) -> bool:
        """End this script's own loop: wait until those of the other workers end, and leave the run with its consensus.

        The others continue without this worker, whose last iterations the next global round takes in. Those that die
        or hang are not waited for beyond the servers' deadlines. Then all hold the same model.

        Args:
            timeout_s: longest wait for the others.

        Returns:
            Whether the model is the run's consensus.

        It raises as :meth:`batches` does. If the consensus is not finite, the process ends with exit code 65.
        """
        reason = ""
        if not self._steps.step.is_over:
            try:
                self._steps.finish(timeout_s)
            except NoConsensusError:
                raise
            except ExchangeError as error:
                logger.error("%s leaves without the run's consensus: %s", self.name, error)
                reason = "it waited for the others for too long"
                self._steps.step.advance(Event.STOP)
        self._end_judged(reason=reason)
        return self.has_consensus

    @property
    def has_consensus(self) -> bool:
        """Whether the run has ended, and the model is its consensus."""
        return self._steps.rounds.has_consensus

    def _wrong(self) -> CodedError | None:
        """Return the error if this worker ends without an iteration, or with a model that is not finite."""
        return self._steps.idle_error() or self._checkpoints.non_finite_error()

    def _end_judged(self, *, reason: str = "") -> None:
        """Leave, and end the process if something is :meth:`_wrong` at the run's end.

        The processes of an island can look together only before they leave.
        """
        judges = self.stopped and (self._open or self._membership.island.size == 1)
        broken = self._wrong() if judges else None
        self._end(reason=reason)
        if broken is not None:
            exit_for(broken, self.name)

    def _end(self, *, failed: bool = False, reason: str = "") -> None:
        """Tell the servers once that this worker leaves; unused grants go back. A fork of the process says nothing."""
        if not self._open or os.getpid() != self._pid:
            return
        if not failed:
            self._membership.ends_stage()
        ending = self._steps.rounds.grants.ending
        why = reason or (ending.reason if ending is not None else LOOP_ENDED)
        self._steps.close()
        self._steps.rounds.groups.leave(cut=failed)
        if not self.is_head:
            self._membership.close()
            return
        try:
            done, committed = self._steps.rounds.grants.done, self._steps.rounds.last.committed
            message = Leave(*self._membership.who, done, failed, why, committed)
            self._channel.ask(message, lambda m: isinstance(m, Left), what="leaving", timeout_s=LEAVE_WITHIN_S)
        except (ExchangeError, JoinError, ServerLostError) as error:
            logger.warning(
                "%s has left without an answer from the servers (%s): nothing is lost, they notice the process's end",
                *(self.name, error),
            )
        finally:
            self._membership.close()

    def _pass(self) -> None:
        """Go through a stage of the run that is over without training."""
        if not self._checkpoints.resumed.iterations:
            logger.warning(
                "%s has no checkpoint of stage %d of the run, so its model is not what was trained there",
                *(self.name, self._membership.identity.stage),
            )
        self._steps.rounds.grants.ending = Stop(0, None, "this stage of the run is over", late=True)
        self._steps.step.advance(Event.STOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end_judged()
        else:
            self.fails(error)
        if isinstance(error, CodedError):
            exit_for(error, self.name)

    def fails(self, error: BaseException) -> None:
        """Leave the run because the script ends with an error; nothing does so after an orderly end."""
        calls = ((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
        self._end(failed=True, reason=f"{type(error).__name__}: {error}{script_lines.in_words(calls)}")

    def gives_way(self) -> None:
        """Leave a run that has ended, because the script joins again."""
        if self.stopped and self._open:
            self._end_judged()

    def at_exit(self) -> None:
        """Leave the run when the script ends without having done so; :meth:`_end_judged` may set the exit code."""
        judges = self._open and self._membership.island.size == 1
        broken = self._wrong() if judges else None
        self._end()
        if broken is not None:
            exit_at_once(broken, self.name)

    @property
    def _open(self) -> bool:
        """Whether it has not left the run, even if that is over."""
        return not self._steps.step.has_left

    def _check_open(self) -> None:
        if not self._open:
            calls = "batches(), begin_step(), status() and the save() of an island"
            where = f"{calls} belong inside the with block of Worker.join, before leave()"
            raise LsgdError(f"{self.name} has left the run; {where}")


def check_steps(steps: int) -> None:
    """Raise a ConfigError if a number cannot be the length of a script's own loop."""
    if steps < 0:
        raise ConfigError(f"steps = {steps}: the length of the script's own loop in iterations is 0 or more")


def _place(me: "weakref.ref[Worker]") -> tuple[int, int]:
    """Return the rank and the number of this process among those of all workers, if these have as many.

    The first processes of all workers come first. So the processes of a worker share its part, however many they are.
    """
    worker = me()
    assert worker is not None, "the loader has outlived its worker"
    island, (part, parts) = worker._membership.island, worker.part
    return part + parts * island.rank, parts * island.size


def _tell(me: "weakref.ref[Worker]", where: str, facts: dict[str, str], epoch: int, order: str) -> None:
    """Tell the servers the order of a pass."""
    if (worker := me()) is not None:
        worker._channel.send(Dealt(*worker._membership.who, where, facts, epoch, order))


def _has_ended(me: "weakref.ref[Worker]") -> bool:
    worker = me()
    return worker is not None and worker.stopped


def _leave_at_exit(me: "weakref.ref[Worker]") -> None:
    """Leave when a script ends without ending a ``with`` block."""
    worker = me()
    if worker is not None and worker._pid == os.getpid():  # a fork has no part in the run
        worker.at_exit()
