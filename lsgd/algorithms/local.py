"""Local SGD (Stich, arXiv 1805.09767), DiLoCo (arXiv 2311.08105), and variants in few bits."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

from lsgd.algorithms.base import Commit, Flat, begun_with, clones, copy_all, finiteness, zero_unless
from lsgd.algorithms.common import Periodic, block, codec, delay, hierarchical, period
from lsgd.algorithms.delayed import Delayed
from lsgd.algorithms.outliers import FEWEST, PATIENCE, SUMS, Outliers
from lsgd.codecs import Codec, codec_of
from lsgd.collectives.compressed_mean import CompressedMean, Mean, in_memory, sent_nbytes
from lsgd.collectives.feedback import ErrorFeedback
from lsgd.collectives.group import Group
from lsgd.collectives.two_round import chunk_bounds
from lsgd.errors import ConfigError, OutlierError
from lsgd.layers import WHOLE, Layers
from lsgd.lazy import Tensor, no_grad, torch
from lsgd.protocol.messages import Round
from lsgd.settings import Schedule, setting

log = logging.getLogger(__name__)

MEASURED_EVERY, MOST_MEASURED = 64, 64
"""Changes are measured by layer at most once in so many steps, because the page shows no more than a number a second;
and with more members not at all, because each sends all others two numbers for each layer."""

PIECE_NUMEL = 1 << 19
"""Elements of a change that are measured at a time."""

CHOSEN = -1
"""The delay ``auto``, which the servers choose, and ``keep = "auto"``, which each worker does."""

KEPT = 0.5
"""Share of a worker's steps since the round that it keeps if its optimizer is not Muon (convergence.md, A delay)."""


def rescale(*, default: bool) -> Any:
    """Declare whether the mean change is scaled to the length of the workers' own."""
    return setting(default, "scale the mean change to the length of the workers' own; above all for AdamW")


@dataclass(frozen=True)
class LocalSettings(Periodic):
    """Local SGD (arXiv 1805.09767): the models' changes are averaged every period, with an optional outer optimizer.

    ``rescale = False`` is the paper's method: the models become their mean.
    """

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "local SGD, models averaged every period (arXiv 1805.09767)"
    islands: ClassVar[bool] = True

    period: int = period(default=0)
    outer_lr: float = setting(1.0, "learning rate of the outer step; 1 without momentum and rescale: the mean", low=0)
    outer_momentum: float = setting(0.0, "Nesterov momentum of the outer step", low=0, high=1)
    rescale: bool = rescale(default=True)
    compression: str = codec("levels2", "the models' changes")
    block: int = block()
    error_decay: float = setting(
        1.0, "factor of what rounding lost when the next exchange adds it back; 0: no error feedback", low=0, high=1
    )
    hierarchical: bool = hierarchical()
    fragments: int = setting(
        1, "parts of the model, exchanged in turn: one per round, each once per period", low=1, high=1 << 16, fixed=True
    )
    delay: int = delay("apply the outer step's result", auto=CHOSEN)
    keep: float = setting(
        float(CHOSEN),
        "with delay: share of its steps since the round that a worker keeps; auto: 1 with Muon, else 0.5",
        low=0,
        high=1,
        auto=CHOSEN,
    )
    drop_outliers: bool = setting(
        True, "leave out members whose changes do not fit to the others', from three members on"
    )

    def __post_init__(self) -> None:
        self.make_codec()
        if not self.period:  # the servers choose one that fits
            return
        if self.period % self.fragments:
            raise ConfigError(
                f"period = {self.period} is not a multiple of fragments = {self.fragments}, of which one is exchanged "
                f"every period / fragments iterations; set fragments to a divisor of period"
            )
        if 0 < self.delay >= self.period // self.fragments:
            raise ConfigError(
                f"delay = {self.delay} is not less than the {self.period // self.fragments} iterations between "
                f"rounds: the next round would come first; set delay to at most {self.period // self.fragments - 1}"
            )

    def schedule(self) -> Schedule:
        """Exchange a fragment every ``period / fragments`` steps."""
        interval = (self.period or self._least_period) // self.fragments
        return Schedule(interval, interval, delay=max(self.delay, 0), parts=self.fragments, common=True)

    @property
    def delay_is_auto(self) -> bool:
        """Whether the servers choose the delay."""
        return self.delay < 0

    def with_delay(self, delay: int) -> Self:
        """Return the settings with this delay."""
        return dataclasses.replace(self, delay=delay)

    @property
    def _least_period(self) -> int:
        return self.fragments * (max(self.delay, 0) + 1)

    def with_period(self, period: int) -> Self:
        """Return the settings with this period, rounded up to a multiple of ``fragments`` with room for ``delay``."""
        whole = -(-period // self.fragments) * self.fragments
        return dataclasses.replace(self, period=max(whole, self._least_period))

    def at(self, progress: float | None, period: int | None = None) -> Self:
        """Return the settings of a stretch; ``period`` counts the iterations between rounds, as the schedule does."""
        return super().at(progress, None if period is None else period * self.fragments)

    @property
    def per_contributor(self) -> bool:
        """Whether each element's sum is divided by the number of members that sent it."""
        return False

    def make_codec(self) -> Codec:
        """Return the codec."""
        return codec_of(self.compression, self.block)

    def sent_nbytes(self, numel: int, workers: int) -> float:
        """The model's change twice, except the worker's own share, or once to each other worker."""
        codec, period = self.make_codec(), self.period or self._least_period
        if codec.lossless:
            return 2 * (workers - 1) / workers * numel * codec.element_nbytes / period
        return sent_nbytes(codec, numel, workers) / period

    def create(self, parameters: Flat, run: str = "") -> LocalSGD:
        """Return the algorithm."""
        return LocalSGD(self, parameters, run)


@dataclass(frozen=True)
class DiLoCoSettings(LocalSettings):
    """DiLoCo (arXiv 2311.08105): local SGD with an outer Nesterov step; ``local`` with other defaults."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "DiLoCo, local SGD with an outer Nesterov step (arXiv 2311.08105)"

    period: int = period()
    outer_lr: float = setting(0.7, "learning rate of the outer step", low=0)
    outer_momentum: float = setting(0.9, "Nesterov momentum of the outer step", low=0, high=1)
    rescale: bool = rescale(default=False)
    compression: str = codec("none", "the models' changes")


@dataclass(frozen=True)
class SparseSettings(LocalSettings):
    """SparseLoCo (arXiv 2508.15706): the largest changes of the models, with error feedback."""

    name: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "SparseLoCo, the largest changes of the models (arXiv 2508.15706)"

    period: int = period()
    rescale: bool = rescale(default=False)
    compression: str = codec("topk", "the models' changes")
    error_decay: float = setting(
        0.95, "factor of what was not sent when the next exchange adds it back; 0: drop it", low=0, high=1
    )
    divisor: str = setting(
        "members",
        "what an element's sum is divided by: all members, or those that sent this element",
        choices=("members", "contributors"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_contributor and not self.make_codec().sparse:
            raise ConfigError(
                f"divisor = 'contributors', but with compression = {self.compression!r} all members send all elements; "
                f"set compression to topk, or divisor to members"
            )

    @property
    def per_contributor(self) -> bool:
        """Whether ``divisor`` is ``contributors``."""
        return self.divisor == "contributors"


class MeanChange:
    """The mean of the members' changes, bit-identical on all: plain, or in a codec, with what rounding has lost.

    Attributes:
        codec: in which changes travel.
        feedback: what rounding has lost, of each fragment in each tensor; empty if nothing is.
    """

    def __init__(self, codec: Codec, tensors: Flat, fragments: Sequence[Sequence[slice]], run: str) -> None:
        self.codec = codec
        self.feedback: list[list[ErrorFeedback]] = []
        if not codec.lossless:
            codec.prepare(tensors)
            self.feedback = [
                [ErrorFeedback(place.stop - place.start, x.device) for x, place in zip(tensors, places, strict=True)]
                for places in fragments
            ]
        self._run = run
        self._mean: CompressedMean | None = None
        self._members: tuple[str, ...] = ()

    def reset(self, settings: LocalSettings, group: Group, order: Round, *, new: bool) -> None:
        """Begin with a group; if members are others, drop what their results have lost, and if one is ``new``, all."""
        if not self.codec.lossless:
            hierarchical, contributors = settings.hierarchical, settings.per_contributor
            self._mean = CompressedMean(group, self.codec, hierarchical=hierarchical, contributors=contributors)
        members = order.generation.members
        for feedback in (each for fragment in self.feedback for each in fragment):
            feedback.begin_generation(same_members=members == self._members and not new)
            if new:  # as one is that was started again
                feedback.residual.zero_()
        self._members = members

    def mean(self, change: Tensor, fragment: int, index: int, group: Group, round_id: int, decay: float) -> Mean:
        """Return the mean of ``change``, whose memory it takes, over all members.

        ``index``: of the tensor. A member that sends nothing has a change of zeros, and a ``decay`` of 0.
        """
        if self._mean is None:
            change.div_(group.size)
            group.all_reduce(change).wait()
            return in_memory(change)
        return self._mean(change, (self._run, round_id, index), self.feedback[fragment][index], decay)

    def commit(self, fragment: int) -> None:
        """Keep what rounding has lost in the last exchange of a fragment."""
        for feedback in self.feedback[fragment] if self.feedback else ():
            feedback.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding has lost, and the members of the last exchange."""
        lost = [[each.state_dict() for each in fragment] for fragment in self.feedback]
        return {"feedback": lost, "members": list(self._members)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for fragment, saved in zip(self.feedback, state["feedback"], strict=True):
            for feedback, each in zip(fragment, saved, strict=True):
                feedback.load_state_dict(each)
        self._members = tuple(state["members"])


class LocalSGD(Delayed):
    """Workers train alone; each round uses the mean change of their models as the pseudo-gradient of an outer step.

    With c the common model of the last round and d the mean over workers of ``x - c`` (algorithm 1 of DiLoCo, with
    the opposite sign), a round sets ``v ← momentum v + d``, ``c ← c + lr (d + momentum v)`` and ``x ← c``: Nesterov's
    step as in torch.optim.SGD. With ``outer_lr = 1`` and neither momentum nor ``rescale``, c is the mean of the models.
    v starts at 0 and exists only with momentum.

    With ``rescale``, the default of ``local``, d is multiplied by ``sqrt(mean |x - c|² / |d|²)``, which lies between 1
    and the root of the number of workers. In the mean, changes with little in common cancel in part. Synchronous SGD
    averages gradients before an optimizer like AdamW divides by their size, which makes up for that; local SGD
    averages after the division. The factor restores the length. The final consensus is the plain mean.

    c and v are float32 (float64 for float64 parameters) and equal on all members. In 16 bits a worker begins with a
    rounded c, so its change is measured from that; else each round would lose what c has gained since. d travels in the
    model's dtype, or in the codec of ``compression`` with error feedback: a worker sends ``Q(x - c + decay e)``, and e
    becomes what Q lost. A member keeps e when others come and go.

    With ``fragments``, each round does that for one of that many equal parts of the model, in turn (Streaming DiLoCo,
    arXiv 2501.18512). With ``delay``, d is taken at the round and c changes that many steps later. With s the model of
    the round, then ``x ← c + keep (x - s)``: ``keep`` is the share of the steps in between that a worker keeps, 1 in
    CoCoD-SGD (arXiv 1906.12043). A failed transfer changes nothing; the part's next round sends what this one would
    have sent.

    A member that has missed rounds comes back with the common model and its own change. In that round it sends nothing,
    as a newcomer, and keeps its change for the next one: ``x ← c + (x - c)``, with c after and before the round.

    With ``drop_outliers``, :class:`Outliers` says whose changes do not count. The sum is divided by the others' number.
    """

    settings: LocalSettings

    def __init__(self, settings: LocalSettings, parameters: Flat, run: str) -> None:
        super().__init__()
        self.settings = settings
        self.common = [x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in parameters]
        self._dtypes = [x.dtype for x in parameters]
        self._velocity: list[Tensor] = []
        codec = settings.make_codec()
        self._fragments = _places(parameters, settings.fragments, codec.unit)
        self._mean_change = MeanChange(codec, self.common, self._fragments, run)
        self._outliers = Outliers()
        self._gives_up = ""
        self._steps = 0
        self._taken_at = [0 for _ in self._fragments]

    @property
    def velocity(self) -> list[Tensor]:
        """The outer step's velocity, with the common model's shapes; empty without momentum."""
        if not self.settings.outer_momentum:
            self._velocity = []
        elif not self._velocity:
            self._velocity = [torch.zeros_like(c) for c in self.common]
        return self._velocity

    def reset(self, parameters: Flat, group: Group, order: Round) -> None:
        """Drop the pending transfer and, if members have changed, the residuals of results."""
        super().reset(parameters, group, order)
        self._outliers = Outliers(self._outliers.usual)
        self._mean_change.reset(self.settings, group, order, new=group.rank in self._new(order))

    @no_grad
    def before_forward(self, parameters: Flat, group: Group, order: Round) -> Commit | None:
        """Begin to average a fragment's changes; without a delay, wait for it, to take the outer step.

        Raises:
            OutlierError: this member has been left out too often.
        """
        if self._gives_up:
            raise OutlierError(self._gives_up)
        finite, counts = self.is_finite(parameters), group.rank not in self._new(order)
        fragment, now = order.exchanges % len(self._fragments), self._steps
        changes: list[Tensor] = []
        models = list(self._parts(fragment, parameters, self.common))
        for x, c in models:
            change = torch.empty_like(x, dtype=x.dtype if self._mean_change.codec.lossless else torch.float32)
            changes.append(zero_unless(finite, _subtracted(x, c, change)) if counts else change.zero_())
        delay = self.settings.schedule().delay  # that of this round: servers may choose another one for the next
        keep = 0.0
        if not counts:  # what a member has learned beside this round is still to be sent
            models, keep = [(begun_with(c, x.dtype).clone(), c) for x, c in models], 1.0
        elif delay:  # training changes them before the result is there
            models, keep = [(x.to(c.dtype, copy=True), c) for x, c in models], self._kept()
        means = [in_memory(change) for change in changes]
        measured: list[float | Tensor] = [0.0 for _ in range(SUMS * group.size)]
        starts = [place.start for place in self._fragments[fragment]]
        layers = self.layers if group.size <= MOST_MEASURED and self._is_measured(order) else WHOLE

        def transfer() -> None:
            if order.new and not _any(changes, group):
                return
            own: Tensor | None = None
            if changes and (self.settings.rescale or self._judges(group)):
                own = _squared(zip(starts, map(in_memory, changes), strict=True), layers, changes[0].device)
            sends = group.rank not in self._left_out(group, order)
            decay = self._decay(group, sends=sends)
            for index, change in enumerate(changes):
                if not sends:
                    change.zero_()
                means[index] = self._mean_change.mean(change, fragment, index, group, order.id, decay)
            if own is not None:
                beside = torch.zeros(2, dtype=own.dtype, device=own.device)
                if self._judges(group) and counts and not self.settings.per_contributor:  # else the sum is unknown
                    beside = zero_unless(finite, self._beside(models, means, changes, fragment, group, sends=sends))
                squared = _squared(zip(starts, means, strict=True), layers, own.device)
                alone = (self._outliers.usual, now - self._taken_at[fragment])
                facts = [own.sum(), squared.sum(), *beside, *(torch.full_like(own[0], each) for each in alone)]
                sums = torch.cat([torch.stack(facts), *(() if layers is WHOLE else (own, squared))])
                gathered = [torch.empty_like(sums) for _ in range(group.size)]
                group.all_gather(gathered, sums).wait()
                measured[:] = gathered

        land = partial(self._land_mean, group, order, models, means, measured, now, None if delay else finite, keep)
        return self._begin(transfer, land, parameters, delay)

    def after_step(self, parameters: Flat) -> Commit | None:
        """Count the step, and land the transfer that began ``delay`` steps ago."""
        self._steps += 1
        return super().after_step(parameters)

    def _is_measured(self, order: Round) -> bool:
        """Whether changes are measured by layer in a round: all of the model, at most every so many steps."""
        interval = self.settings.schedule().period
        return (
            order.exchanges // len(self._fragments) % max(1, MEASURED_EVERY // (interval * len(self._fragments))) == 0
        )

    def _judges(self, group: Group) -> bool:
        """Whether members judge each other's changes."""
        return self.settings.drop_outliers and group.size >= FEWEST

    def _kinds(self, group: Group) -> Sequence[int]:
        """Return numbers by rank, equal for members whose agreement with the others can be compared.

        Of what a member has learned, few elements leave a node of several workers in a round, and no one there knows
        which: the sum of the others lacks all of it, and so the agreement is less than elsewhere.
        """
        apart = self._mean_change.codec.sparse and self.settings.hierarchical
        return [size for size in group.node_sizes for _ in range(size)] if apart else ()

    def _left_out(self, group: Group, order: Round) -> Collection[int]:
        """Return the ranks whose changes do not count in this round: outliers and newcomers."""
        return self._new(order) | (self._outliers.left_out if self._judges(group) else set())

    def _new(self, order: Round) -> set[int]:
        """Return the ranks that have no change yet: their models begin in this round, or are not whole before it."""
        return {*order.new} - {order.source}

    def _decay(self, group: Group, *, sends: bool) -> float:
        """Return the share of what was not sent before that a member sends now."""
        return self.settings.error_decay if sends or self._is_of_node(group) else 0.0

    def _is_of_node(self, group: Group) -> bool:
        """Whether what rounding loses is that of a node with several workers."""
        return self.settings.hierarchical and group.node.size > 1

    def _beside(
        self,
        models: Sequence[tuple[Tensor, ...]],
        means: Sequence[Mean],
        lost: Flat,
        fragment: int,
        group: Group,
        *,
        sends: bool,
    ) -> Tensor:
        """Return the product of this member's change and the sum that the others have sent, and that sum's square.

        ``lost`` is what rounding has lost of what this one has sent. Computed in pieces; float64, shape (2,).
        """
        decay, found = self._decay(group, sends=sends), list[Tensor]()
        lossy = not self._mean_change.codec.lossless and not self._is_of_node(group)
        # A node's change travels times nodes / workers, and so does what rounding has lost of it.
        times = group.size / len(group.node_sizes) if self.settings.hierarchical else 1.0
        for index, ((x, c), dtype, mean) in enumerate(zip(models, self._dtypes, means, strict=True)):
            kept = self._mean_change.feedback[fragment][index].residual if lossy else c
            for here, piece in mean():
                parts = (torch.split(y[here], PIECE_NUMEL) for y in (x, c, kept, lost[index]))
                for now, common, residual, rest, total in zip(*parts, torch.split(piece, PIECE_NUMEL), strict=True):
                    kind = torch.promote_types(total.dtype, torch.float32)
                    own = (now - begun_with(common, dtype)).to(kind)
                    if lossy:
                        others = torch.mul(rest, times).add_(total, alpha=group.size)
                        others.sub_(residual, alpha=decay * times)
                    else:
                        others = total.to(kind) * group.size
                    if sends:
                        others -= own
                    found.append(torch.stack([torch.dot(own, others), torch.dot(others, others)]).to(torch.float64))
        return torch.stack(found).sum(0)

    def _land_mean(
        self,
        group: Group,
        order: Round,
        models: Sequence[tuple[Tensor, ...]],
        means: Sequence[Mean],
        measured: Sequence[float | Tensor],
        now: int,
        finite: Tensor | None,
        keep: float,
        parameters: Flat,
    ) -> Commit:
        """Return the commit of a round whose mean change has arrived.

        ``now`` is the worker's step in the round. ``finite`` says whether the model was so; None: it has trained since,
        with a delay. The model keeps a share ``keep`` of what it has learned since ``models``. The sums over a worker's
        processes have the usual length and the steps once for each of them: the 1.0 counts ``parts``.
        """
        if finite is None:
            finite = finiteness(parameters)

        def change(broken: float, spoilt: float, parts: float, *measured: float) -> None:
            self.replaced = bool(broken)
            if broken:
                log.warning("round %d: this worker's model is not finite and is replaced by the common one", order.id)
            each = len(measured) // group.size
            rows = [measured[start : start + each] for start in range(0, len(measured), each)]
            sums = [(*row[: SUMS - 2], row[SUMS - 2] / parts, row[SUMS - 1] / parts) for row in rows]
            left_out = self._left_out(group, order)
            share, own, mean, members = self._lengths(sums, left_out)
            self._note_layers([row[SUMS:] for row in rows], left_out, share)
            scale = share * _factor(own, mean, members) if self.settings.rescale else share
            self.agreement = mean / own if 0 < mean <= own < math.inf else None
            found: Mapping[int, str] = {}
            if self._judges(group):
                found = self._outliers.judge(sums, self._kinds(group))
            else:  # a change of the setting forgives all
                self._outliers = Outliers(self._outliers.usual)
            self._report(found, group, order)
            fragment = order.exchanges % len(self._fragments)
            if spoilt:  # on all members alike
                log.warning("round %d: the mean change is not finite; all workers take the last common model", order.id)
            elif not found:
                self._outer_step(fragment, means, scale)
            if spoilt or broken or not found:
                self._take_common(fragment, parameters, models, whole=bool(broken), keep=keep)
                self._taken_at[fragment] = now

        return Commit(change, (~finite, ~_is_finite(means, measured), 1.0, *measured))

    def _kept(self) -> float:
        """Return the share of what it learns during a transfer that a member keeps."""
        return self.settings.keep if self.settings.keep >= 0 else 1.0 if self.muon else KEPT

    def _take_common(
        self, fragment: int, parameters: Flat, models: Sequence[tuple[Tensor, ...]], *, whole: bool, keep: float
    ) -> None:
        """Replace the model by the common one: the fragment, or the ``whole`` model if it is not finite.

        It keeps a share ``keep`` of what it has learned since those in ``models``, whose memory this takes.
        """
        if whole:
            copy_all(parameters, self.common)
            return
        for (x,), (exchanged, c) in zip(self._parts(fragment, parameters), models, strict=True):
            if keep:
                x.copy_(torch.sub(x, exchanged, out=exchanged).mul_(keep).add_(c))
            else:
                x.copy_(c)

    def _lengths(self, sums: Sequence[Sequence[float]], left_out: Collection[int]) -> tuple[float, float, float, int]:
        """Return the factor of the mean that those left out ask for, and what it is of.

        Then the mean square of the members' own changes, that of their mean, and how many they are; the squares are 0
        if nobody needs them.
        """
        counted = [own for rank, (own, *_) in enumerate(sums) if rank not in left_out]
        # Where an element's sum is divided by those that have sent it, zeros of others change nothing.
        share = 1.0 if self.settings.per_contributor else len(sums) / len(counted)
        mean = statistics.fmean(of_mean for _, of_mean, *_ in sums) * share * share
        return share, statistics.fmean(counted), mean, len(counted)

    def _note_layers(self, squares: Sequence[Sequence[float]], left_out: Collection[int], share: float) -> None:
        """Note how far members agree in each layer: ``squares`` of their own changes, then of the mean, by member."""
        number = len(squares[0]) // 2
        if self.layers is WHOLE or number != len(self.layers.names):
            return
        counted = [row for rank, row in enumerate(squares) if rank not in left_out]
        found = dict(self.agreements)
        for layer, name in enumerate(self.layers.names):
            own = sum(row[layer] for row in counted) / len(counted)
            mean = sum(row[number + layer] for row in squares) / len(squares) * share * share
            if 0 < own < math.inf and mean < math.inf:
                found[name] = min(1.0, mean / own)  # what rounding had lost before makes a small layer's mean longer
        self.agreements = found

    def _report(self, found: Mapping[int, str], group: Group, order: Round) -> None:
        """Log who is left out from now on, on that member and on one other, and note if this one gives up."""
        speaker = next((rank for rank in range(group.size) if rank not in found), 0)
        for rank, reason in found.items():
            if group.rank in (rank, speaker):
                log.warning(
                    "round %d changes nothing: the change of %s does not fit to the others' (%s); it is left out until "
                    "it fits",
                    *(order.id, order.generation.members[rank], reason),
                )
        self.counts = group.rank not in self._outliers.left_out
        if self._outliers.gives_up(group.rank):
            self._gives_up = (
                f"the changes of this worker's model have not fitted to the others' in {PATIENCE} rounds, so its data, "
                f"its code or its machine's memory is wrong; look there, or set drop_outliers = false to average them "
                f"all the same"
            )

    def _outer_step(self, fragment: int, means: Sequence[Mean], factor: float) -> None:
        """Change a fragment of the common model by the mean change, times ``factor``."""
        self._mean_change.commit(fragment)
        lr, momentum = self.settings.outer_lr, self.settings.outer_momentum
        velocity = self.velocity  # without momentum this drops it, on all members in one round
        flats = (self.common, velocity) if momentum else (self.common,)
        for mean, (c, *velocities) in zip(means, self._parts(fragment, *flats), strict=True):
            for here, change in mean():
                c[here].add_(change, alpha=lr * factor)
                for v in velocities:
                    v[here].mul_(momentum).add_(change, alpha=factor)
                    c[here].add_(v[here], alpha=lr * momentum)

    def _parts(self, fragment: int, *flats: Flat) -> Iterator[tuple[Tensor, ...]]:
        """Yield a fragment's part of each tensor, side by side for several lists of tensors."""
        for place, *tensors in zip(self._fragments[fragment], *flats, strict=True):
            yield tuple(x[place] for x in tensors)

    def shared_state(self) -> list[Tensor]:
        """Return the outer step's velocity, if it has momentum, then the common model, which follows from it."""
        return [*self.velocity, *self.common]

    def common_model(self) -> list[Tensor]:
        """Return the common model: a newcomer has changed nothing in it yet."""
        return self.common

    @property
    def can_be_followed(self) -> bool:
        """Whether results are applied in their rounds."""
        return not self.settings.schedule().delay

    def state_dict(self) -> dict[str, Any]:
        """Return the common model, the outer step's velocity, what rounding lost, and what is known of changes."""
        return {
            "common": self.common,
            "velocity": self.velocity,
            **self._mean_change.state_dict(),
            "usual": self._outliers.usual,
            "steps": [self._steps - taken_at for taken_at in self._taken_at],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        copy_all(self.common, state["common"])
        self._velocity = clones(state["velocity"])
        self._mean_change.load_state_dict(state)
        self._outliers = Outliers(state.get("usual", 0.0))  # earlier checkpoints do not have it, nor the steps
        self._taken_at = [self._steps - made for made in state.get("steps", self._taken_at)]


def _subtracted(x: Tensor, common: Tensor, change: Tensor) -> Tensor:
    """Write to ``change``, and return, how far a model has moved since it took over the common one."""
    for now, began, piece in zip(*(torch.split(y, PIECE_NUMEL) for y in (x, common, change)), strict=True):
        torch.sub(now, begun_with(began, now.dtype), out=piece)
    return change


def _any(changes: Flat, group: Group) -> bool:
    """Return whether a member has a change that is not zero; at the start of a run nobody has."""
    device = changes[0].device if changes else None
    own = torch.tensor([any(bool(change.any()) for change in changes)], dtype=torch.uint8, device=device)
    found = [torch.empty_like(own) for _ in range(group.size)]
    group.all_gather(found, own).wait()
    return any(bool(each) for each in found)


def _squared(changes: Iterable[tuple[int, Mean]], layers: Layers, device: torch.device) -> Tensor:
    """Return the squared length of a change in each layer, float64, of shape (number of layers,).

    It is computed in pieces, and finite exactly if all elements are. In float32 its last bits, and then the factor's,
    would depend on how the model is sharded. ``changes``: of each vector, where it begins in it.
    """
    found, room = [list[Tensor]() for _ in layers.names], None
    for vector, (start, change) in enumerate(changes):
        for here, x in change():
            at = start + here.start
            for piece in torch.split(x, PIECE_NUMEL):
                if room is None:
                    room = torch.empty(PIECE_NUMEL, dtype=torch.float64, device=device)
                for layer, part in layers.parts(vector, at, room[: len(piece)].copy_(piece)):
                    found[layer].append(torch.dot(part, part))
                at += len(piece)
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([torch.stack(each).sum() if len(each) > 1 else [*each, nothing][0] for each in found])


def _is_finite(means: Sequence[Mean], measured: Sequence[float | Tensor]) -> Tensor:
    """Return whether the mean change is finite; its length says so where members have measured it."""
    first = measured[0]
    if isinstance(first, float):
        return finiteness(piece for mean in means for _, piece in mean())
    return first[1].isfinite()


def _factor(own: float, mean: float, members: int) -> float:
    """Return how many times longer the members' own changes are than their mean: 1 to the root of ``members``.

    The arguments are mean squares, whose last bits depend on how the model is sharded. A float32 factor hardly does.
    """
    if not 0 < mean <= own < math.inf:
        return 1.0
    return torch.tensor(min(math.sqrt(own / mean), math.sqrt(members)), dtype=torch.float32, device="cpu").item()


def _places(parameters: Flat, fragments: int, unit: int) -> list[list[slice]]:
    """Return each fragment's place in each tensor: equal parts, in whole blocks of a codec."""
    bounds = [list(pairwise(chunk_bounds(x.numel(), fragments, unit))) for x in parameters]
    return [[slice(*tensor[fragment]) for tensor in bounds] for fragment in range(fragments)]
