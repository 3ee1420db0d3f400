"""The connection of a node to the global server that it follows: whether that answers, and what is said if not."""

import math
from collections.abc import Callable, Sequence

from lsgd.node.allegiance import Allegiance
from lsgd.node.candidates import Link

HELLO_EVERY_S = 1.0

STARTS_WITHIN_S = 30.0
"""A global server of this node's own that has not answered for this long takes long to start."""

SILENT_AFTER_S = 4.0
"""A global server that has answered no greeting for this long counts as away."""

REFUSED_FOR_S = 10.0
"""A global server that has never accepted this node, and has refused its keys for this long, never will."""

OTHER_STARTS_WITHIN_S = 15.0
"""How long that of another node may take, which may be started a moment later, before a line says so."""

COMPLAINS_EVERY_S = 30.0
"""How much longer than its patience a node waits until it says again that its server is away."""


class Uplink:
    """One node's connection to a global server; it goes from one server to the next.

    Attributes:
        link: the connection.
        heard_at: when a global server last answered a greeting; None: none ever has.
    """

    def __init__(self, link: Link, node: int, now: float) -> None:
        self.link, self._node = link, node
        self.heard_at: float | None = None
        self._began_at = now
        self._greeted_at = self._said_at = -math.inf
        self._refused_at: float | None = None  # since when the global server refuses the keys

    @property
    def address(self) -> str:
        """Where the server is."""
        return self.link.address

    def follow(self, link: Link) -> None:
        """Go to another server, and greet it at once."""
        before, self.link = self.link, link
        before.close()
        self.greet_now()

    def greet_now(self) -> None:
        """Let a greeting be due."""
        self._greeted_at = -math.inf

    def greet(self, now: float, greeting: Callable[[], Sequence[bytes]]) -> None:
        """Send a greeting if one is due; one that could not be sent stays due."""
        if now - self._greeted_at >= HELLO_EVERY_S and self.link.send(greeting()):
            self._greeted_at = now

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; return whether the server is there to get it."""
        return self.link.send(frames)

    def thaw(self, frozen_s: float) -> None:
        """Do not count the seconds in which this process was frozen: the server had nobody to answer."""
        if self.heard_at is not None:
            self.heard_at += frozen_s

    def silent_s(self, now: float) -> float:
        """Return for how long the server has been silent."""
        return now - (self._began_at if self.heard_at is None else self.heard_at)

    def away(self, now: float, allegiance: Allegiance, standbys: Sequence[int]) -> str:
        """Return a line about a server that does not answer, or an empty text if it does."""
        answers = self.heard_at is not None and now - self.heard_at < SILENT_AFTER_S
        return "" if answers and not allegiance.stranger else self.silence(now, allegiance, standbys)

    def complaint(self, now: float, allegiance: Allegiance, standbys: Sequence[int]) -> str:
        """Return such a line if it is time to print it, and take it that this is done.

        A server first has to start, on this node or on another one.
        """
        starts_within_s = STARTS_WITHIN_S if allegiance.state.serves else OTHER_STARTS_WITHIN_S
        patience_s = starts_within_s if self.heard_at is None else SILENT_AFTER_S
        away = self.away(now, allegiance, standbys)
        if not away or now - max(self._said_at, self._began_at) <= patience_s:
            return ""
        self._said_at = now + COMPLAINS_EVERY_S
        return away

    def refusal(self, now: float) -> str:
        """Return why the server will never accept this node, and what to type; empty while it may."""
        trouble = self.link.trouble() if self.heard_at is None else ""
        self._refused_at = (self._refused_at or now) if trouble else None
        if self._refused_at is None or now - self._refused_at < REFUSED_FOR_S:
            return ""
        return (
            f"{trouble}. Start this node with the line that node 0 prints, or with its token: "
            f"lsgd-server --local --node {self._node} --connect {self.address} --token node{self._node}.token"
        )

    def silence(self, now: float, allegiance: Allegiance, standbys: Sequence[int]) -> str:
        """Return a line about how long the server has been silent, and what to do."""
        address = self.address
        if trouble := self.link.trouble():
            return f"the global server at {address} refuses this node: {trouble}"
        if self.heard_at is None and allegiance.state.serves:
            return f"this node's global server at {address} does not answer for {now - self._began_at:.0f} s yet"
        if self.heard_at is None:
            return (
                f"no global server answers at {address} yet; start node 0 there, which runs it (lsgd launch, "
                f"train.sh), or, if you start servers by hand: lsgd-server --global --listen {address}"
            )
        silent = f"the global server at {address} has been silent for {now - self.heard_at:.0f} s"
        if allegiance.stranger:
            silent = f"the global server at {address} serves another run ({allegiance.stranger})"
        if standbys:
            return f"{silent}; if it stays away, node{standbys[0]} serves the run"
        return f"{silent}; restart it there with its --journal: lsgd-server --global --listen {address}"
