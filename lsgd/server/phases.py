"""Where a worker stands, and how it comes from one phase to another: the table that :class:`Roster` holds it to."""

import enum
from typing import Self


class Phase(enum.Enum):
    """Where a worker stands. Rounds wait for those that are *live*."""

    live: bool
    means: str
    next: "tuple[Phase, ...]"

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
        """Return the phase; :attr:`next` is filled from :data:`TRANSITIONS`."""
        phase = object.__new__(cls)
        phase._value_, phase.means, phase.live, phase.next = means, means, live, ()
        return phase


_CANNOT_BE_REACHED = "the same, while others cannot reach it"

TRANSITIONS: dict[Phase, dict[Phase, str]] = {
    Phase.JOINED: {Phase.HELD: "first request", Phase.CUT: _CANNOT_BE_REACHED},
    Phase.HELD: {
        Phase.BUSY: "Go, or Stop with a round",
        Phase.ENDED: "Stop",
        Phase.PAUSED: "Pause",
        Phase.CUT: "a later request, while others cannot reach it",
    },
    Phase.BUSY: {
        Phase.HELD: "next request, or the same one with its round dropped",
        Phase.CUT: _CANNOT_BE_REACHED,
        Phase.PAUSED: "Pause",
        Phase.STRAGGLER: "all others held for `patience_s`",
        Phase.ENDED: "last round completed",
    },
    Phase.STRAGGLER: {
        Phase.HELD: "next request, or the same one",
        Phase.CUT: _CANNOT_BE_REACHED,
        Phase.PAUSED: "Pause",
    },
    Phase.CUT: {
        Phase.HELD: "global round after its time is over",
        Phase.PAUSED: "Pause",
        Phase.ENDED: "its node leaves, or the run ends",
    },
    Phase.PAUSED: {
        Phase.HELD: "request",
        Phase.CUT: _CANNOT_BE_REACHED,
        Phase.ENDED: "its node leaves",
    },
    Phase.ENDED: {
        Phase.HELD: "a new request, which gets Stop, or joins a last round that is made again",
        Phase.CUT: _CANNOT_BE_REACHED,
        Phase.PAUSED: "Pause",
        Phase.STRAGGLER: "gone for its silence, heard again, and nobody else has the run's model",
    },
}
"""From each phase those that can follow, and upon what. A member that leaves is gone, from whatever phase."""

for _phase, _followers in TRANSITIONS.items():
    _phase.next = tuple(_followers)


def table() -> str:
    """Return the phases as the table in docs/design.md; ``python scripts/phases.py`` writes it there."""
    rows = ["| phase | live | means | left by |", "|---|---|---|---|"]
    for phase, followers in TRANSITIONS.items():
        ways = "; ".join(f"{upon} → {follower.name}" for follower, upon in followers.items())
        rows.append(f"| {phase.name} | {'yes' if phase.live else 'no'} | {phase.means} | {ways} |")
    gone = "left, silent past its lease, name taken over, refused"
    rows.append(f"| (gone) | | {gone} | another process joins anew |")
    return "\n".join(rows) + "\n"
