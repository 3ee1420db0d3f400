"""The states of a worker, and the table of transitions that the roster enforces."""

import enum
from typing import Self


class MemberState(enum.Enum):
    """The state of a worker. Rounds wait for *live* workers; :attr:`next` has the states that can follow.

    People see it as :attr:`shown`; a worker that has left the run is ``left``.
    """

    live: bool
    shown: str
    next: "tuple[MemberState, ...]"

    JOINED = ("welcome, or waiting to be", False, "away")
    HELD = ("its request has no answer yet", True, "held")
    BUSY = ("about its round and its iteration", True, "live")
    STRAGGLER = (
        "evicted from rounds: it kept all others waiting, or was silent and is back; its grant is still out",
        False,
        "straggler",
    )
    CUT = ("evicted from rounds: others cannot reach it; its request waits", False, "cut")
    PAUSED = ("stepped aside until its next request", False, "away")
    ENDED = ("was told to stop, and has only to leave", False, "away")

    def __new__(cls, means: str, live: bool, shown: str) -> Self:
        """Return the state, whose value is its meaning."""
        state = object.__new__(cls)
        state._value_, state.live, state.shown, state.next = means, live, shown, ()
        return state


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
"""Which state can follow which, and upon what. A member can leave from any state."""

for _before, _after, _ in TRANSITIONS:
    _before.next += (_after,)
