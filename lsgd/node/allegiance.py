"""Whom a node follows in its run, and whether its own servers serve it: one state, and what may follow.

1. A node's own servers run in the states that say so, and in no other: they are started and ended as those begin.
2. Nobody follows a server before its own node does, so ending one that its node has not followed harms nobody.
3. An event that :data:`TRANSITIONS` does not list for a state changes nothing.

docs/concepts/failover.md shows the table.
"""

import enum
from dataclasses import dataclass, replace

RETIRES_S = 4.0
"""How long a server that has given up may take to tell its nodes so, and to end."""


class State(enum.Enum):
    """What a node can be.

    Attributes:
        means: in words.
        servers: whether servers of this node run. serves: whether other nodes may need them.
        searches: whether it looks for the run elsewhere, however short the silence.
    """

    FOLLOWING = "follows the server of another node, which answers", ""
    SEARCHING = "looks at the other places, because its server is silent", "searches"
    YIELDING = "looks where the run continues, because its server has given up", "searches"
    STRAYED = "looks for its run, because another one has begun at its server's place", "searches"
    CLAIMING = "takes over: starts servers from its copy, which nobody follows yet", "searches servers serves"
    UNABLE = "could not take over: looks at the other places, and tries again after 5 s", "searches"
    SERVING = "follows its own server", "servers serves"
    RETIRING = "looks where the run continues, while its own server, which has given up, says so", "searches servers"
    FENCED = "follows another server, while its own one says so and ends", "servers"
    CLOSING = "leaves the run that it serves; its servers end by themselves", "servers serves"
    LEAVING = "leaves the run", ""

    def __init__(self, means: str, marks: str) -> None:
        self.means = means
        self.searches, self.servers, self.serves = (mark in marks.split() for mark in ("searches", "servers", "serves"))


class Event(enum.Enum):
    """What happens to a node."""

    WELCOME = "its server answers a greeting"
    SILENCE = "its server is silent for 2 s"
    STRANGER = "a server of another run answers in its server's place"
    GIVES_WAY = "its server says where the run continues"
    FOLLOW = "it finds a server in a later term"
    DUE = "it is its turn to serve"
    UP = "its own server answers, and it is still its turn"
    VAIN = "the host of the old server answers after all"
    FAILED = "its server could not be started, or has ended"
    GONE = "its server has ended, because it gave up"
    LATE = "4 s are over"
    END = "the run is over, or the node leaves it"


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.FOLLOWING: {
        Event.SILENCE: State.SEARCHING,
        Event.GIVES_WAY: State.YIELDING,
        Event.STRANGER: State.STRAYED,
        Event.END: State.LEAVING,
    },
    State.SEARCHING: {
        Event.WELCOME: State.FOLLOWING,
        Event.FOLLOW: State.FOLLOWING,
        Event.GIVES_WAY: State.YIELDING,
        Event.STRANGER: State.STRAYED,
        Event.DUE: State.CLAIMING,
        Event.END: State.LEAVING,
    },
    State.YIELDING: {
        Event.WELCOME: State.FOLLOWING,
        Event.FOLLOW: State.FOLLOWING,
        Event.DUE: State.CLAIMING,
        Event.END: State.LEAVING,
    },
    State.STRAYED: {
        Event.WELCOME: State.FOLLOWING,
        Event.FOLLOW: State.FOLLOWING,
        Event.STRANGER: State.STRAYED,
        Event.DUE: State.CLAIMING,
        Event.END: State.LEAVING,
    },
    State.CLAIMING: {
        Event.UP: State.SERVING,
        Event.WELCOME: State.FOLLOWING,
        Event.FOLLOW: State.FOLLOWING,
        Event.GIVES_WAY: State.YIELDING,
        Event.VAIN: State.SEARCHING,
        Event.FAILED: State.UNABLE,
        Event.STRANGER: State.CLAIMING,
        Event.END: State.LEAVING,
    },
    State.UNABLE: {
        Event.DUE: State.CLAIMING,
        Event.WELCOME: State.FOLLOWING,
        Event.FOLLOW: State.FOLLOWING,
        Event.GIVES_WAY: State.YIELDING,
        Event.STRANGER: State.UNABLE,
        Event.END: State.LEAVING,
    },
    State.SERVING: {
        Event.GIVES_WAY: State.RETIRING,
        Event.FOLLOW: State.FENCED,
        Event.GONE: State.YIELDING,
        Event.END: State.CLOSING,
    },
    State.RETIRING: {
        Event.FOLLOW: State.FENCED,
        Event.GONE: State.YIELDING,
        Event.LATE: State.YIELDING,
        Event.WELCOME: State.SERVING,
        Event.END: State.LEAVING,
    },
    State.FENCED: {
        Event.GONE: State.FOLLOWING,
        Event.LATE: State.FOLLOWING,
        Event.GIVES_WAY: State.YIELDING,
        Event.STRANGER: State.STRAYED,
        Event.END: State.LEAVING,
    },
    State.CLOSING: {},
    State.LEAVING: {},
}
"""Which state follows upon what. The last two end with the node's process."""


@dataclass(frozen=True)
class Allegiance:
    """The state of a node.

    Args:
        since: when it began, in seconds of the node's clock.
        stranger: the run that has begun at the place of the server that this node follows; empty: none that is known.
    """

    state: State = State.FOLLOWING
    since: float = 0.0
    stranger: str = ""

    def may(self, event: Event) -> bool:
        """Whether the table lists the event for this state."""
        return event in TRANSITIONS[self.state]

    def upon(self, event: Event, now: float, stranger: str = "") -> "Allegiance":
        """Return what follows; ``stranger``: the other run, upon ``STRANGER``."""
        if not self.may(event):
            return self
        after = TRANSITIONS[self.state][event]
        if event is not Event.STRANGER and after in (State.CLAIMING, State.UNABLE):
            stranger = self.stranger
        if after is self.state:
            return replace(self, stranger=stranger)
        return Allegiance(after, now, stranger)

    def at(self, now: float, silent_s: float, silence_s: float) -> "Allegiance":
        """Return what follows from time alone.

        Args:
            now: the time.
            silent_s: for how long the server that this node follows has been silent.
            silence_s: from when on that is a silence.
        """
        if self.may(Event.LATE) and now - self.since >= RETIRES_S:
            return self.upon(Event.LATE, now)
        return self.upon(Event.SILENCE, now) if silent_s >= silence_s else self
