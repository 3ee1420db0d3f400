"""Why nothing is due. A rule that lets a run wait names one of these; the sentence is made when somebody asks."""

from collections.abc import Callable
from dataclasses import dataclass

from lsgd.server.reasons import Reason, Why
from lsgd.server.roster import Has, MemberState, named, transfer_of
from lsgd.server.state import RunState

LONG_ROUND_S = 3.0
"""After how long a round that nobody waits for is mentioned."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is due; ``why`` says what is waited for, given the state and the time."""

    why: Callable[[RunState, float], Reason]


def ended(state: RunState, now: float) -> Reason:
    """Everybody has only to leave."""
    return Why.ENDED(reason=state.stopping)


def joining(state: RunState, now: float) -> Reason:
    """Workers join, and make their first requests."""
    members = state.roster.members.values()
    if not state.suffices(len(members)):
        return state.joined(names=True)
    return Why.FIRST_REQUESTS(who=named(m for m in members if not m.held))


def consensus(state: RunState, now: float) -> Reason:
    """The last round is open."""
    who = [m for m in state.roster.members.values() if m.round is not None]
    return Why.CONSENSUS(who=named(who), transfer=transfer_of(who))


def training(state: RunState, now: float) -> Reason:
    """No request is held."""
    opened = next(iter(state.book.open.values()), None)
    if opened is None or opened.opened_at is None or now - opened.opened_at < LONG_ROUND_S:
        return Why.NOBODY(joined=state.joined())
    for_s, who = now - opened.opened_at, named(opened.waiting)
    return Why.UNDER_WAY(id=opened.round.id, for_s=for_s, who=who, transfer=transfer_of(opened.waiting))


def others(state: RunState, now: float) -> Reason:
    """Some live members are held, and others are not."""
    held, busy = state.roster.within(MemberState.HELD), state.roster.within(MemberState.BUSY)
    if all(m.has is Has.PARTS for m in held):
        return Why.CATCHES_UP(who=named(held), transfer=transfer_of(held))
    opened = next(iter(state.book.open.values()), None)
    transfer = transfer_of(opened.waiting) if opened else ""
    unfinished = f" (round {opened.round.id} is not completed yet{transfer})" if opened else ""
    return Why.BUSY(waited_s=now - min(m.held_at for m in held), who=named(busy), open_round=unfinished)


def all_away(state: RunState, now: float) -> Reason:
    """No member is live."""
    return paused(state, now) if state.roster.within(MemberState.PAUSED) else training(state, now)


def paused(state: RunState, now: float) -> Reason:
    """The next round waits for who paused."""
    return Why.AWAY(who=named(state.roster.within(MemberState.PAUSED)))


def model_away(state: RunState, now: float) -> Reason:
    """None of those that are held has the best model that is left."""
    away = state.roster.away()
    return Why.MODEL_AWAY(who=named([m for m in away if m.synced] or away))


def leases(state: RunState, now: float) -> Reason:
    """What is left to do is granted to those who are silent, or they may yet take part in the last round."""
    silent = state.roster.within(MemberState.SILENT)
    return Why.LEASE(who=named(silent), quiet_s=now - max(m.heard_at for m in silent))


def model_lost(state: RunState, now: float) -> Reason:
    """Nobody has the run's model, and there is no checkpoint."""
    return Why.MODEL_LOST(count=state.ledger.count)


def last_holders(state: RunState, now: float) -> Reason:
    """All that are held leave, and the others need the run's model first."""
    away = state.roster.away()
    return Why.LAST_HOLDERS(who=named(away)) if away else others_train(state, now)


def others_train(state: RunState, now: float) -> Reason:
    """Workers whose own loop is over wait for the others."""
    return Why.TRAIN_ON(who=named(m for m in state.roster.members.values() if m.iterates) or "one that failed")
