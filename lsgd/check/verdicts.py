"""What the judges say of each point."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

POINTS: Mapping[int, str] = {
    1: "it joins, steps and ends, by itself and when it is stopped",
    2: "each sample goes to one worker, and noise is each one's own",
    3: "learning rates are equal at equal places, and schedules fit the loop",
    4: "only optimizer steps and rounds change weights",
    5: "calls that all must make are made by all, and one worker saves",
    6: "stopped and resumed, it makes the same steps",
    7: "a worker that is killed comes back at the right place",
    8: "all end with one model, and the saved file is that model",
    9: "what it costs and brings",
}
"""The points, and what a tick says."""


class Status(Enum):
    """How a point was judged, and its sign in the table."""

    RIGHT = "✓"
    WRONG = "✗"
    UNJUDGED = "-"


_WORKER = re.compile(r"node\d+/worker\d+|\d+")


@dataclass(frozen=True)
class Finding:
    """A mistake.

    Args:
        where: ``path:line`` of the script; empty: none is known.
        what: happens there.
        change: what to write instead.
    """

    where: str
    what: str
    change: str = ""


@dataclass
class Verdict:
    """What is said of a point.

    Args:
        findings: mistakes; with one, it is wrong.
        unjudged: why it was not judged; empty: it was.
        notes: what else is said.
    """

    point: int
    findings: list[Finding] = field(default_factory=list)
    unjudged: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        """Whether it is right."""
        if self.findings:
            return Status.WRONG
        return Status.UNJUDGED if self.unjudged else Status.RIGHT

    def as_json(self) -> dict[str, Any]:
        """Return all that is said, for a file."""
        found = [vars(each) for each in self.findings]
        about = {"point": self.point, "says": POINTS[self.point], "status": self.status.name.lower()}
        return {**about, "findings": found, "unjudged": self.unjudged, "notes": self.notes}


def distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings without those that say the same of the same line; workers make the same mistakes."""
    return list({(each.where, _WORKER.sub("", each.what)): each for each in reversed(findings)}.values())[::-1]
