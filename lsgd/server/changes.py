"""What the parts of a run's state count."""


class Changes:
    """How often a run's state has changed in what the journal must have before the answers leave.

    Each part of the state counts its own; all parts of a run share one object.
    """

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def add(self) -> None:
        """Count a change."""
        self.count += 1
