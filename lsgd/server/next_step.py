"""What a run does next, or what it waits for: pure functions of its state. The scheduler carries it out.

They decide rules 3, 4, 10, 12, 13 and 16 at the top of :mod:`lsgd.server.coordinator`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lsgd.protocol.messages import Origin
from lsgd.server import calls, waits
from lsgd.server.greetings import origin_of
from lsgd.server.life import LifeState
from lsgd.server.phases import Stretch
from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import AWAY, Group, Has, Member, MemberState, by_place, model_of
from lsgd.server.state import RunState
from lsgd.server.waits import Wait

RETURN_LEASES = 2
"""How long a worker that failed has to be started again before a run ends without it, in leases."""

WAIT_WORDS_S = 0.2
"""How long the sentence is cached that says what requests wait for."""


@dataclass(frozen=True, slots=True)
class HoldAgain:
    """The requests of members that were cut off, or have finished, are held again; ``relents``: all evictions end."""

    members: Sequence[Member]
    relents: bool = False


@dataclass(frozen=True, slots=True)
class LimitWait:
    """From now on the last round waits for members that are away, for ``patience_s``."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """Continue from a checkpoint, or from the beginning."""

    origin: Origin
    members: Sequence[Member]


@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody has the run's model, and there is no checkpoint; ``fails``: the run waits no longer for somebody."""

    fails: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Members in a call are paused, because models will be identical: a round could take in nothing of theirs."""

    callers: Sequence[Member]


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run stops for ``reason``; ``stretch``: which begins all the same."""

    reason: Reason
    stretch: Stretch | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """Every request is answered with the end."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over: it stops, and everybody has left."""


@dataclass(frozen=True, slots=True)
class Final:
    """The round that makes the consensus."""

    members: Sequence[Member]


@dataclass(frozen=True, slots=True)
class Serve:
    """The last iterations of a phase, fewer than there are members, are granted without a round."""

    stretch: Stretch
    leaving: Sequence[Member]
    tokens: float


@dataclass(frozen=True, slots=True)
class Train:
    """A global round of ``members``, with the run's queue filled to ``tokens``; those in ``leaving`` go before it."""

    stretch: Stretch
    leaving: Sequence[Member]
    members: Sequence[Member]
    tokens: float


Here = Mapping[MemberState, Group]
"""The members by state, as of one decision."""

Step = HoldAgain | LimitWait | GoBack | Lost | Pause | EndRun | Close | Finish | Final | Serve | Train

_ENDED, _JOINING, _CONSENSUS = Wait(waits.ended), Wait(waits.joining), Wait(waits.consensus)
_TRAINING, _OTHERS, _ALL_AWAY = Wait(waits.training), Wait(waits.others), Wait(waits.all_away)


def choose(state: RunState) -> Step | Wait:
    """Return what the run does next, or what it waits for. Until all its live members are held, this costs little."""
    roster = state.roster
    if state.stopping:
        if not roster.members and not state.over:
            return Finish()
        if state.closed:
            return _ENDED
    if state.book.final:
        return _CONSENSUS
    if roster.generation is None and (roster.held < roster.live or not state.suffices(roster.live)):
        return Close() if state.stopping else _JOINING
    if roster.held < roster.live:
        return _OTHERS if roster.held else _TRAINING
    here = roster.groups()
    back = _call_back(state, here) or _let_back(state, here)
    return back or (_when_all_are_held(state, here) if roster.live else _ALL_AWAY)


def waits_for(state: RunState, now: float) -> Reason:
    """Say what the held requests wait for; as of a moment ago, if nothing has happened since."""
    if now - state.outbox.said[0] > WAIT_WORDS_S:
        step = choose(state)
        state.outbox.said = now, (step if isinstance(step, Wait) else _TRAINING).why(state, now)
    return state.outbox.said[1]


def awaited(state: RunState, member: Member) -> Reason:
    """Say what a member's request waits for."""
    if member.state is MemberState.CUT:
        return state.links.words(member.worker, state.now)
    if member.state is MemberState.FINISHED:
        return waits.others_train(state, state.now)
    return calls.awaited(state, member.call) if member.call else waits_for(state, state.now)


def _within(here: Here, states: Collection[MemberState]) -> Group:
    """Return the members in some states as one group."""
    groups = [here[each] for each in states]
    return Group([m for group in groups for m in group.members], max(group.model for group in groups))


def _call_back(state: RunState, here: Here) -> HoldAgain | None:
    """Call members back that have finished if they have the run's model, and nobody else has."""
    finished = here[MemberState.FINISHED]
    if state.stopping or not finished.members:
        return None
    others = _within(here, [each for each in MemberState if each not in (MemberState.FINISHED, MemberState.ENDED)])
    return HoldAgain(finished.members) if finished.model > others.model else None


def _let_back(state: RunState, here: Here) -> HoldAgain | None:
    """Let cut-off members back whose time is over; all of them if nobody else is left, or only they have the model."""
    cut = here[MemberState.CUT]
    left = _within(here, (MemberState.HELD, MemberState.BUSY, MemberState.STRAGGLER, MemberState.PAUSED))
    relents = not left.members or cut.model > left.model
    back = [m for m in cut.members if relents or not state.links.bars(m.worker, state.now)]
    return HoldAgain(back, relents) if back else None


def _when_all_are_held(state: RunState, here: Here) -> Step | Wait:
    members, away = here[MemberState.HELD].members, _within(here, AWAY)
    if state.roster.generation is None:
        if not _begun(state, members):
            return GoBack(_origin(members), members)
    elif obstacle := _awaits_model(state, here[MemberState.HELD], away):
        return obstacle
    if state.stopping:
        return _last(state, here)
    out = [m for m in state.roster.members.values() if m.granted]  # stragglers: nobody is busy now
    given = state.ledger.count - state.roster.gone + sum(m.granted for m in out)
    if any(m.state is MemberState.SILENT for m in out) and state.limit - given < len(members):
        return Wait(waits.leases)  # what it does not make comes back
    if given >= state.limit:
        return EndRun(state.all_made(out))
    if not any(m.iterates for m in members):  # those that stay must get the run's model first
        if away.members or missing(state):
            return Wait(waits.last_holders)
        over = Why.ALL_FINISHED if any(m.asked.steps for m in members) else Why.ALL_LEAVE
        return EndRun(over(count=state.ledger.count))
    return _training(state, members, given)


def _last(state: RunState, here: Here) -> Step | Wait:
    """Return the next step of a run that stops."""
    if here[MemberState.PAUSED].members and not _overdue(state):
        return _for_those_away(state, Wait(waits.paused))
    if here[MemberState.SILENT].members and not state.book.hopeless:
        return Wait(waits.leases)
    return Close() if state.book.hopeless else Final(here[MemberState.HELD].members)


def _for_those_away(state: RunState, wait: Wait) -> Step | Wait:
    """Wait for members that are away; once the run stops, only for so long."""
    return LimitWait() if state.life.state is LifeState.STOPPING else wait


def _training(state: RunState, members: Sequence[Member], given: int) -> Step:
    """Return the next step of a run that continues after ``given`` iterations, granted ones included."""
    count = state.ledger.count
    progress = state.share(state.now) if state.has_end else None
    steps = state.steps(len(members))
    now = state.now
    # A newcomer that downloads can follow rounds without one only.
    bears_delay = all(m.join.bears_delay and m.synced for m in members)
    stretch = state.phases.following(now, count, given, len(members), steps, progress, bears_delay=bears_delay)
    schedule, leaving = stretch.algorithm.schedule(), []
    if schedule.identical:  # nobody who leaves needs another round, unless only they have the run's model
        if callers := [m for m in members if m.call]:
            return Pause(callers)
        leaving, members = [m for m in members if not m.iterates], [m for m in members if m.iterates]
        if model_of(leaving) > model_of(members):
            return EndRun(Why.HOLDERS_LEAVE(count=count), stretch)
    left = min(state.limit, state.phases.ends[stretch.number]) - given
    if left < len(members):
        if schedule.lockstep:
            return EndRun(Why.REST_TOO_SMALL(count=count, limit=state.limit), stretch)
        if any(m.synced and m.rank >= 0 and m.iterates for m in members):
            return Serve(stretch, leaving, left)
        # No member has the run's model (a checkpoint may): as many members as there are iterations take part.
        members = sorted(sorted(members, key=lambda m: (-model_of([m]), m.place))[: int(left)], key=by_place)
    training = sum(m.has is not Has.PARTS for m in members)
    return Train(stretch, leaving, members, max(len(members), min(schedule.period * training, left)))


def _awaits_model(state: RunState, held: Group, away: Group) -> Step | Wait | None:
    """Return what must happen first because none of those ``held`` has the run's model; None: some have it.

    They alone would start over and overwrite what the run has learned. An older model of this run is better than none,
    and so is a checkpoint. With nothing to continue from, the run ends.
    """
    if away.model > held.model and not _overdue(state):
        return _for_those_away(state, Wait(waits.model_away))
    if held.model or not state.ledger.count:
        return None
    run, origin = state.plan.run, _origin(held.members)
    if origin.iterations or run.restart_from_scratch:
        return GoBack(origin, held.members)
    few = not state.suffices(len(state.roster.members)) and not state.stopping
    stranded = state.life.state is LifeState.STRANDED
    fails = not few or (stranded and state.now - state.life.since > run.join_timeout_s)
    return Wait(waits.model_lost) if stranded and not fails else Lost(fails)


def _begun(state: RunState, members: Sequence[Member]) -> bool:
    """Whether a run without a generation stands where its members' checkpoint is."""
    origin = _origin(members)
    return state.ledger.count == origin.iterations and all(m.synced == from_checkpoint(m, origin) for m in members)


def _origin(members: Sequence[Member]) -> Origin:
    return origin_of(m.join for m in members)


def missing(state: RunState) -> list[Member]:
    """Return the workers that have just failed in the middle of their own loops: they may be started again."""
    if state.now - state.gathering.since > RETURN_LEASES * state.plan.run.lease_s:
        return []
    gone = (m for m in state.roster.left.values() if m.worker not in state.roster.members)
    return [m for m in gone if m.steps_left and m.left.code.startswith((Why.FAILED.code, Why.SILENT.code))]


def from_checkpoint(member: Member, origin: Origin) -> bool:
    """Whether a member has resumed from the checkpoint that the run continues from."""
    return origin.iterations > 0 and member.join.origin == origin


def _overdue(state: RunState) -> bool:
    """Whether the last round has waited for ``patience_s``."""
    return state.life.state is LifeState.LAST_WAIT and state.now >= state.life.since + state.patience_s
