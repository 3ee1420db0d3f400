"""A round in progress: made of the servers' order, and committed or dropped exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from lsgd.client.checkpoint.checkpoints import Snapshot
from lsgd.collectives.group import Group
from lsgd.errors import LsgdError
from lsgd.protocol.messages import Round


class State(Enum):
    """Where a round stands, and what that means."""

    ORDERED = "the servers have ordered it"
    ENTERED = "its group is formed, its algorithm taken up, and newcomers have the model"
    WAITING = "it has begun, and the backward pass completes it"
    EXCHANGING = "gradients are exchanged"
    COMMITTED = "its result is in place, and the servers know"
    DROPPED = "nothing was exchanged, its group is gone, and the servers know"


TRANSITIONS: Mapping[State, tuple[State, ...]] = {
    State.ORDERED: (State.ENTERED, State.DROPPED),
    State.ENTERED: (State.WAITING, State.EXCHANGING, State.COMMITTED, State.DROPPED),
    State.WAITING: (State.EXCHANGING, State.COMMITTED, State.DROPPED),
    State.EXCHANGING: (State.COMMITTED, State.DROPPED),
    State.COMMITTED: (),
    State.DROPPED: (),
}
"""The states that may follow each state; docs/design.md shows this table."""


@dataclass(eq=False)
class ActiveRound:
    """A round in progress on one worker.

    Args:
        order: the servers'.
        snapshot: what is saved when it is committed; None: nothing.

    Attributes:
        state: where it stands; only :meth:`to` changes it.
        group: its members, once it is entered.
        finite: whether what was exchanged is finite. If not, no member makes the step.
        skipped: that step has been skipped.
        missing: for each bucket, the parameters that have no gradient yet in this backward pass.
        launched: buckets whose exchange has begun, always in order.
    """

    order: Round
    snapshot: Snapshot | None = None
    state: State = State.ORDERED
    group: Group | None = None
    finite: bool = True
    skipped: bool = False
    missing: list[set[int]] = field(default_factory=list)
    launched: int = 0

    def to(self, state: State) -> None:
        """Go on to another state.

        Raises:
            LsgdError: the table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise LsgdError(
                f"round {self.order.id} is {self.state.name} ({self.state.value}): it cannot become {state.name}"
            )
        self.state = state

    @property
    def pending(self) -> bool:
        """Whether the backward pass is still to complete it."""
        return self.state in (State.WAITING, State.EXCHANGING)
