"""The base of gradient methods, which replace the gradient of every iteration, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from lsgd.algorithms.base import Algorithm, Commit, Flat, copy_all, finiteness
from lsgd.collectives.group import Group
from lsgd.collectives.pipeline import Pipeline
from lsgd.lazy import Tensor, no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import AlgorithmSettings, Schedule, setting


@dataclass(frozen=True)
class GradientSettings(AlgorithmSettings):
    """Base of the methods that exchange every gradient."""

    islands: ClassVar[bool] = True

    bucket_mib: float = setting(
        5.0, "MiB of gradients per bucket; each bucket is exchanged as one message", low=0.001, high=65_536, fixed=True
    )

    def schedule(self) -> Schedule:
        """Every iteration is a round."""
        return Schedule(1, 1, lockstep=True, identical=True)


def buckets(gradients: Flat, nbytes: int) -> Iterator[Tensor]:
    """Yield slices of the flat gradients, at most ``nbytes`` bytes each, from the last to the first.

    The backward pass completes the last layers' gradients first. Slices begin at multiples of their size.
    """
    for gradient in reversed(gradients):
        size = max(1, nbytes // gradient.element_size())
        starts = range(0, gradient.numel(), size)
        yield from (gradient[start : start + size] for start in reversed(starts))


def _summed(x: Tensor, group: Group) -> Iterator[None]:
    """Replace ``x`` by its sum over all members; the transfer begins after the last one of what is in flight."""
    yield
    transfer = group.all_reduce(x)
    yield
    transfer.wait()


class GradientAlgorithm(Algorithm):
    """Base of the methods that exchange gradients in every iteration.

    The order of calls is :meth:`exchange_bucket` once for each bucket, in the same order on all members; then
    :meth:`count`, if members may lack gradients; then :meth:`complete`; then :meth:`finish`. All but the last may run
    in a thread other than the backward pass's, one thread at a time. Each raises ExchangeError if the exchange failed.
    The gradients stay unchanged until :meth:`finish`, so the next generation can exchange those of a failed iteration
    again.

    Several buckets are in flight at a time (:class:`lsgd.collectives.pipeline.Pipeline`). NaN or Inf in one member's
    gradient reaches all members, at least as NaN in its place, so GradScaler skips the step on all of them.
    """

    spans_backward: ClassVar[bool] = True

    settings: GradientSettings

    def __init__(self, settings: GradientSettings) -> None:
        self.settings = settings
        self._results: dict[int, Tensor] = {}
        self._pipeline = Pipeline()

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the exchanges of the last generation."""
        self._results = {}
        self._pipeline = Pipeline()

    def buckets(self, gradients: Flat) -> list[Tensor]:
        """Return the slices of the flat gradients to exchange, in order."""
        return list(buckets(gradients, int(self.settings.bucket_mib * 2**20)))

    def after_backward(self, parameters: Flat, gradients: Flat, group: Group, order: Round) -> Commit | None:
        """Exchange all buckets now."""
        buckets = self.buckets(gradients)
        for index, bucket in enumerate(buckets):
            self.exchange_bucket(bucket, index, group, order)
        self.complete()
        return self.finish(buckets)

    @no_grad
    def exchange_bucket(self, gradient: Tensor, index: int, group: Group, order: Round) -> None:
        """Begin to exchange one bucket, and advance earlier ones; the result is kept until :meth:`finish`."""
        result = self._results.get(index)
        if result is None or result.shape != gradient.shape:
            result = self._results[index] = torch.empty_like(gradient)
        self._pipeline.start(self.reduce(gradient, result, index, group, order))

    @no_grad
    def count(self, present: Tensor, group: Group) -> None:
        """Begin to replace ``present``, 1 for each gradient that is there and else 0, by its sum over all members."""
        self._pipeline.start(_summed(present, group))

    @no_grad
    def complete(self) -> None:
        """Complete all that is in flight."""
        self._pipeline.complete()

    @no_grad
    def finish(self, buckets: Flat) -> Commit:
        """Return the commit of all buckets, which have been exchanged; it judges whether a result is non-finite."""
        results = [self._results[index] for index in range(len(buckets))]
        return Commit(partial(self._replace, buckets, results), (~finiteness(results),))

    def _replace(self, buckets: Flat, results: Flat, broken: float) -> None:
        """Replace the gradients by the results; ``broken``, equal on all members: a result is non-finite."""
        copy_all(buckets, results)

    def reduce(self, gradient: Tensor, result: Tensor, index: int, group: Group, order: Round) -> Iterator[None]:
        """Write what replaces ``gradient`` to ``result``, bit-identical on all members.

        Yields whenever it can only wait for a transfer: equally often for every bucket, on all members.
        """
        raise NotImplementedError
