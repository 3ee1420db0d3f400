"""Where a worker stands, and how it comes from one state to another: the table that the roster holds it to."""

import enum
from typing import Self


class MemberState(enum.Enum):
    """Where a worker stands. Rounds wait for those that are *live*; :attr:`next` can follow."""

    live: bool
    next: "tuple[MemberState, ...]"

    JOINED = ("welcome, or waiting to be", False)
    HELD = ("its request has no answer yet", True)
    BUSY = ("about its round and its iteration", True)
    STRAGGLER = (
        "evicted from rounds: it kept all others waiting, or was silent and is back; its grant is still out",
        False,
    )
    CUT = ("evicted from rounds: others cannot reach it; its request waits", False)
    PAUSED = ("stepped aside until its next request", False)
    ENDED = ("was told to stop, and has only to leave", False)

    def __new__(cls, means: str, live: bool) -> Self:
        """Return the state whose value is what it means."""
        state = object.__new__(cls)
        state._value_, state.live, state.next = means, live, ()
        return state


_SHOWN = {
    MemberState.HELD: "held",
    MemberState.BUSY: "live",
    MemberState.STRAGGLER: "straggler",
    MemberState.CUT: "cut",
}


def shown(state: MemberState) -> str:
    """Return the state as people see it; the others are ``away``, and who has left the run is ``left``."""
    return _SHOWN.get(state, "away")


_AT_ONCE = "the same, while others cannot reach it"

TRANSITIONS = tuple(
    (MemberState[before], MemberState[after], upon)
    for before, after, upon in (
        ("JOINED", "HELD", "first request"),
        ("JOINED", "CUT", _AT_ONCE),
        ("HELD", "BUSY", "Go, or Stop with a round"),
        ("HELD", "ENDED", "Stop"),
        ("HELD", "PAUSED", "Pause"),
        ("HELD", "CUT", "a later request, while others cannot reach it"),
        ("BUSY", "HELD", "next request, or the same one with its round dropped"),
        ("BUSY", "CUT", _AT_ONCE),
        ("BUSY", "PAUSED", "Pause"),
        ("BUSY", "STRAGGLER", "all others held for `patience_s`"),
        ("BUSY", "ENDED", "last round completed"),
        ("STRAGGLER", "HELD", "next request, or the same one"),
        ("STRAGGLER", "CUT", _AT_ONCE),
        ("STRAGGLER", "PAUSED", "Pause"),
        ("CUT", "HELD", "global round after its time is over"),
        ("CUT", "PAUSED", "Pause"),
        ("CUT", "ENDED", "its node leaves, or the run ends"),
        ("PAUSED", "HELD", "request"),
        ("PAUSED", "CUT", _AT_ONCE),
        ("PAUSED", "ENDED", "its node leaves"),
        ("ENDED", "HELD", "a new request, which gets Stop, or joins a last round that is made again"),
        ("ENDED", "CUT", _AT_ONCE),
        ("ENDED", "PAUSED", "Pause"),
        ("ENDED", "STRAGGLER", "gone for its silence, heard again, and nobody else has the run's model"),
    )
)
"""Which state can follow which, and upon what. A member that leaves is gone, from whatever state."""

for _before, _after, _ in TRANSITIONS:
    _before.next += (_after,)


def table() -> str:
    """Return the states as the table in docs/design.md; ``python scripts/member_states.py`` writes it there."""
    rows = ["| state | live | means | left by |", "|---|---|---|---|"]
    for state in MemberState:
        ways = "; ".join(f"{upon} → {after.name}" for before, after, upon in TRANSITIONS if before is state)
        rows.append(f"| {state.name} | {'yes' if state.live else 'no'} | {state.value} | {ways} |")
    rows.append("| (gone) | | left, silent past its lease, name taken over, refused | another process joins |\n")
    return "\n".join(rows)
