"""A round in progress: ordered by the servers, and committed or dropped exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from lsgd.client.checkpoint.checkpoints import Snapshot
from lsgd.collectives.group import Group
from lsgd.errors import LsgdError
from lsgd.protocol.messages import Round


class State(Enum):
    """The state of a round, and what it means."""

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
"""The states that may follow each state; docs/concepts/worker.md shows this table."""


@dataclass(eq=False)
class ActiveRound:
    """A round in progress on one worker.

    Args:
        order: from the servers.
        snapshot: saved when the round is committed; None: nothing.

    Attributes:
        state: only :meth:`to` changes it.
        group: its members, once it is entered.
        finite: whether the exchanged values are finite. If not, all members skip the step.
        skipped: whether that step has been skipped.
        missing: for each bucket, the parameters without a gradient so far in this backward pass.
        launched: number of buckets whose exchange has begun, always in order.
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
        """Change to another state.

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
        """Whether the backward pass has yet to complete it."""
        return self.state in (State.WAITING, State.EXCHANGING)
