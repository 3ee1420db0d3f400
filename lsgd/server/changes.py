"""What the parts of a run's state count."""

from dataclasses import dataclass


@dataclass(slots=True)
class Changes:
    """How often a run's state has changed in what the journal must have before the answers leave.

    Each part of the state counts its own; all parts of a run share one object.
    """

    count: int = 0
