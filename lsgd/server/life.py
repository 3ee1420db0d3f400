"""A run's life: its states, and what may follow; pure."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Self

from lsgd.server.changes import Changes
from lsgd.server.reasons import NO_REASON, Reason


class LifeState(Enum):
    """Where a run is in its life, and how reports and events name that."""

    GATHERING = ("enough workers have not joined yet", "waiting")
    WELCOMING = ("enough have joined, and their first requests are awaited", "waiting")
    TRAINING = ("workers train", "running")
    STRANDED = ("nobody who is here has the run's model, and no checkpoint has it", "running")
    STOPPING = ("no iteration is granted any more; the last round comes when all live members are held", "stopping")
    LAST_WAIT = ("the same, and members that are away are waited for, for `patience_s`", "stopping")
    CLOSED = ("every request is answered with the end", "over")
    OVER = ("nobody is waited for any more", "over")

    def __init__(self, means: str, shown: str) -> None:
        self.means, self.shown = means, shown

    @property
    def ends(self) -> bool:
        """Whether the run is ending, or has ended."""
        return self.shown in ("stopping", "over")


_S = LifeState

TRANSITIONS: Mapping[LifeState, Mapping[LifeState, str]] = {
    _S.GATHERING: {
        _S.WELCOMING: "enough workers have joined",
        _S.TRAINING: "the first generation, of workers that an earlier server has welcomed",
        _S.STOPPING: "an order, or a failure",
    },
    _S.WELCOMING: {
        _S.TRAINING: "the first generation",
        _S.GATHERING: "too few asked within `join_timeout_s`",
        _S.STOPPING: "an order, or a failure",
    },
    _S.TRAINING: {
        _S.STRANDED: "the last who had the model are gone",
        _S.STOPPING: "its length, an order, all have left or finished, rounds keep failing, a failure",
    },
    _S.STRANDED: {_S.TRAINING: "a round, or a checkpoint", _S.STOPPING: "`join_timeout_s` is over, or an order"},
    _S.STOPPING: {
        _S.LAST_WAIT: "all live members are held, and others are away",
        _S.CLOSED: "the consensus, or there can be none",
        _S.OVER: "all have left",
    },
    _S.LAST_WAIT: {_S.CLOSED: "the consensus, or there can be none", _S.OVER: "all have left"},
    _S.CLOSED: {_S.OVER: "all have left, or 10 s have passed"},
    _S.OVER: {},
}
"""Which state can follow which, and upon what. docs/concepts/protocol.md shows this table."""


class Life:
    """The life of one run.

    Attributes:
        state: where it is; :meth:`move` alone changes it.
        since: when that began, in seconds of the coordinator's clock.
        reason: why it ends; none until then.
        failed: whether it ends without what it has learned.
        changes: counts what the journal must have.
    """

    def __init__(self, state: LifeState, since: float, reason: Reason = NO_REASON, *, failed: bool = False) -> None:
        self.state, self.since, self.reason, self.failed = state, since, reason, failed
        self.changes = Changes()

    def move(self, state: LifeState, now: float) -> None:
        """Go to a state; raise a RuntimeError if it cannot follow."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a run that is {self.state.name} cannot become {state.name}")
        self.state, self.since = state, now
        self.changes.count += 1

    def ends_for(self, reason: Reason, *, failed: bool = False) -> None:
        """Note why the run ends, instead of an earlier reason."""
        self.reason, self.failed = reason, failed
        self.changes.count += 1

    @property
    def closed(self) -> bool:
        """Whether every request is answered with the end."""
        return self.state.shown == "over"

    def to_json(self) -> tuple[bool, bool, Any, bool]:
        """Return what a server that continues the run has to know of its end."""
        return self.state.ends, self.closed, self.reason.to_json(), self.failed

    @classmethod
    def from_json(cls, saved: Sequence[Any], now: float) -> Self:
        """Return the life that :meth:`to_json` described; one that does not end begins anew."""
        ends, closed, reason, failed = saved
        state = LifeState.CLOSED if closed else LifeState.STOPPING if ends else LifeState.GATHERING
        return cls(state, now, Reason(*reason), failed=failed)
