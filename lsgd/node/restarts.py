"""When a process that has died is started again, and how often."""

from typing import NamedTuple

RESTART_WINDOW_S = 600.0
"""Deaths longer ago than this do not count toward a process's restarts."""

EVICTED_WAIT_S = 1.0
"""Wait before an evicted worker is restarted; evictions do not count toward its restarts."""

SERVER_BACKOFF_S = 4.0
"""Longest wait before a server is restarted: the workers' leases keep running."""

MOST_RESTARTS = 60
"""Most restarts of a process within :data:`RESTART_WINDOW_S`, although it works between its deaths."""


class Restart(NamedTuple):
    """A restart after ``wait_s``; ``left``: how many more there may be."""

    wait_s: float
    left: int


class Restarts:
    """The deaths of a node's processes, by name.

    A process that worked before it died (a worker that had completed a round, a server that had answered) is started
    again at once, because what killed it came from outside. One that did not gets a second, then two, four, ..., and
    only so many chances.
    """

    def __init__(self) -> None:
        self._deaths: dict[str, list[tuple[float, bool]]] = {}  # when, and whether it had worked

    def __contains__(self, name: object) -> bool:
        """Whether this process has died or was evicted before."""
        return name in self._deaths

    def evicted(self, name: str) -> Restart:
        """Return the restart of a worker that the run evicted: the network's fault, and each takes a whole lease."""
        self._deaths.setdefault(name, [])
        return Restart(EVICTED_WAIT_S, MOST_RESTARTS)

    def died(self, name: str, now: float, most: int, *, worked: bool, serves: bool) -> Restart | None:
        """Return the restart of a process with ``most`` restarts without having worked; None: it has had them."""
        known = [(at_s, well) for at_s, well in self._deaths.get(name, []) if now - at_s < RESTART_WINDOW_S]
        deaths = self._deaths[name] = [*known, (now, worked)]
        in_vain = sum(not well for _, well in deaths)
        left = min(most - in_vain, MOST_RESTARTS - len(deaths))
        if left < 0 or not most:
            return None
        longest_s = SERVER_BACKOFF_S if serves else RESTART_WINDOW_S
        return Restart(0.0 if worked else min(2.0 ** (in_vain - 1), longest_s), left)
