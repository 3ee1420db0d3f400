"""Where a worker stands, and how it comes from one phase to another: the table that the roster holds it to."""

import enum
from typing import Self


class Phase(enum.Enum):
    """Where a worker stands. Rounds wait for those that are *live*; :attr:`next` can follow."""

    live: bool
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
        """Return the phase whose value is what it means."""
        phase = object.__new__(cls)
        phase._value_, phase.live, phase.next = means, live, ()
        return phase


_AT_ONCE = "the same, while others cannot reach it"

TRANSITIONS = (
    (Phase.JOINED, Phase.HELD, "first request"),
    (Phase.JOINED, Phase.CUT, _AT_ONCE),
    (Phase.HELD, Phase.BUSY, "Go, or Stop with a round"),
    (Phase.HELD, Phase.ENDED, "Stop"),
    (Phase.HELD, Phase.PAUSED, "Pause"),
    (Phase.HELD, Phase.CUT, "a later request, while others cannot reach it"),
    (Phase.BUSY, Phase.HELD, "next request, or the same one with its round dropped"),
    (Phase.BUSY, Phase.CUT, _AT_ONCE),
    (Phase.BUSY, Phase.PAUSED, "Pause"),
    (Phase.BUSY, Phase.STRAGGLER, "all others held for `patience_s`"),
    (Phase.BUSY, Phase.ENDED, "last round completed"),
    (Phase.STRAGGLER, Phase.HELD, "next request, or the same one"),
    (Phase.STRAGGLER, Phase.CUT, _AT_ONCE),
    (Phase.STRAGGLER, Phase.PAUSED, "Pause"),
    (Phase.CUT, Phase.HELD, "global round after its time is over"),
    (Phase.CUT, Phase.PAUSED, "Pause"),
    (Phase.CUT, Phase.ENDED, "its node leaves, or the run ends"),
    (Phase.PAUSED, Phase.HELD, "request"),
    (Phase.PAUSED, Phase.CUT, _AT_ONCE),
    (Phase.PAUSED, Phase.ENDED, "its node leaves"),
    (Phase.ENDED, Phase.HELD, "a new request, which gets Stop, or joins a last round that is made again"),
    (Phase.ENDED, Phase.CUT, _AT_ONCE),
    (Phase.ENDED, Phase.PAUSED, "Pause"),
    (Phase.ENDED, Phase.STRAGGLER, "gone for its silence, heard again, and nobody else has the run's model"),
)
"""Which phase can follow which, and upon what. A member that leaves is gone, from whatever phase."""

for _before, _after, _ in TRANSITIONS:
    _before.next += (_after,)


def table() -> str:
    """Return the phases as the table in docs/design.md; ``python scripts/phases.py`` writes it there."""
    rows = ["| phase | live | means | left by |", "|---|---|---|---|"]
    for phase in Phase:
        ways = "; ".join(f"{upon} → {after.name}" for before, after, upon in TRANSITIONS if before is phase)
        rows.append(f"| {phase.name} | {'yes' if phase.live else 'no'} | {phase.value} | {ways} |")
    rows.append(
        "| (gone) | | left, silent past its lease, name taken over, refused | another process joins |\n"
    )
    return "\n".join(rows)
