"""The two-round all-reduce in a codec, as a communication hook of DistributedDataParallel; needs no lsgd servers.

DDP calls the hook for a bucket as soon as its gradients are ready, so the exchange overlaps the rest of the backward
pass. docs/guides/algorithms.md has an example.
"""

import atexit
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lsgd.algorithms.common import rounding_codec
from lsgd.codecs import OWN_BLOCK
from lsgd.collectives.background import Background
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group, Transfer
from lsgd.collectives.pipeline import Pipeline
from lsgd.collectives.point_to_point import begin_exchange
from lsgd.collectives.two_round import QuantizedAllReduce
from lsgd.errors import ConfigError

END_WITHIN_S = 5.0
"""How long the process waits at exit for the exchange's thread."""


class QuantizedState:
    """State of :func:`quantized_hook`: the ranks, how to round, and the residuals.

    Args:
        process_group: the ranks that exchange; all by default. All must create the state together, because it makes a
            group of its own, which keeps DDP's collectives out of its messages.
        codec: the codec of the gradients, optionally with parameters (``minmax8:block=512``).
        block: the codec's elements per block; None: all of a chunk. By default what the codec has by default.
        rounding: ``nearest`` or ``stochastic``.
        error_feedback: add what rounding lost to the next gradient. A bucket's residual is dropped when DDP rebuilds
            the buckets after the first iteration.
        seed: seed of stochastic rounding.

    Raises:
        ConfigError: torch.distributed is not initialized, or the codec is unknown or does not support the rounding.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        codec: str = "minmax8",
        block: int | None = OWN_BLOCK,
        rounding: str = "nearest",
        error_feedback: bool = False,
        seed: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
        self.error_feedback = error_feedback
        self.seed = seed
        self.step = 0
        self.feedback: dict[int, ErrorFeedback] = {}
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        group = _RankGroup(dist.new_group(ranks, use_local_synchronization=process_group is not None))
        self._all_reduce = QuantizedAllReduce(group, rounding_codec(codec, block or 0, rounding), rounding=rounding)
        self._background = Background()
        self._pipeline = Pipeline()
        self._waiting: list[Future[Tensor]] = []
        self._failure: Exception | None = None
        # A thread still in C++ code when Python exits aborts the process, so wait for it first.
        atexit.register(self._background.close, END_WITHIN_S)

    def average(self, gradient: Tensor, bucket: int, step: int) -> Iterator[None]:
        """Replace a bucket's gradients by the mean over all ranks, in stages."""
        seed = ("ddp", self.seed, step, bucket)
        if not self.error_feedback:
            yield from self._all_reduce.stages(gradient, gradient, seed)
            return
        feedback = self.feedback.get(bucket)
        if feedback is None or feedback.residual.shape != gradient.shape:
            feedback = self.feedback[bucket] = ErrorFeedback(gradient.numel(), gradient.device)
        flags = yield from self._all_reduce.stages(gradient, gradient, seed, feedback)
        feedback.commit(unless=flags.any())

    def submit(self, stages: Iterator[None], gradient: Tensor, future: Future[Tensor], *, is_last: bool) -> None:
        """Have the exchange's thread exchange a bucket along with earlier ones, on a GPU in its own stream.

        ``future`` gets the gradient at the end of the stages, perhaps only after the last bucket is submitted. If an
        exchange fails, all pending and later futures get the error.
        """
        self._background.start(lambda: self._exchange(stages, gradient, future, is_last), gradient.device)

    def _exchange(self, stages: Iterator[None], gradient: Tensor, future: Future[Tensor], is_last: bool) -> None:
        self._waiting = [*(other for other in self._waiting if not other.done()), future]
        try:
            # After a failure, leftovers of earlier exchanges would be mistaken for later ones.
            if self._failure is None:
                self._pipeline.start(_completed(stages, gradient, future))
                if is_last:
                    self._pipeline.complete()
        except Exception as error:
            self._failure = error
        for other in self._waiting if self._failure is not None else ():
            if not other.done():
                other.set_exception(self._failure)  # type: ignore[arg-type]


def quantized_hook(state: QuantizedState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average one bucket of gradients over all ranks in few bits; for ``model.register_comm_hook(state, ...)``.

    The future's gradients have the same bits on all ranks. NaN or Inf on one rank is NaN on all.
    """
    gradient, index, step, is_last = bucket.buffer(), bucket.index(), state.step, bucket.is_last()
    if is_last:
        state.step += 1
    devices = [gradient.device] if gradient.device.type == "cuda" else []
    future: Future[Tensor] = Future(devices=devices)
    state.submit(state.average(gradient, index, step), gradient, future, is_last=is_last)
    return future


def _completed(stages: Iterator[None], gradient: Tensor, future: Future[Tensor]) -> Iterator[None]:
    yield from stages
    future.set_result(gradient)


class _RankGroup(Group):
    """A group of torch.distributed with only what the quantized all-reduce needs: no other operations or subgroups."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # The group's one name may be "undefined", if torch has chosen the backends, or name several.
        self._has_nccl = "cuda:nccl" in dist.get_backend_config(group).split(",")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def _begin_exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Transfer:
        device = next(iter(receives.values())).device
        if device.type == "cuda" and self._has_nccl:
            return begin_exchange(self._group, sends, receives, batch=device)
        # Gloo sends from host memory only.
        incoming = {rank: x if x.is_cpu else torch.empty_like(x, device="cpu") for rank, x in receives.items()}
        transfer = begin_exchange(self._group, {rank: x.cpu() for rank, x in sends.items()}, incoming)

        def wait() -> None:
            transfer.wait()
            for rank, x in incoming.items():
                if x is not receives[rank]:
                    receives[rank].copy_(x)

        return Transfer(wait)
