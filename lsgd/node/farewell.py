"""How a local server leaves the run: pure, and one step after the other."""

from enum import Enum

from lsgd.server.daemon import LAST_WORDS_S

LEAVE_WITHIN_S, LAST_LEAVE_WITHIN_S = 15.0, 3.0
"""How long the workers have to leave once the run or the node ends; then, this server to tell the global server so."""

SAY_EVERY_S = 1.0
"""How often the node says that it leaves, until the global server has heard it."""


class Parting(Enum):
    """How far a local server has got; each follows the one before it."""

    STAYS = "it serves its workers"
    LEAVES = "it has told the global server that the node leaves, and waits for its workers to do so"
    LAST_WORD = "its workers are gone, and it says so: greetings since the first word have brought the node back"


class Farewell:
    """The farewell of one local server.

    Attributes:
        stage: how far it has got.
        reason: why it leaves; empty while it stays.
    """

    def __init__(self) -> None:
        self.stage, self.reason = Parting.STAYS, ""
        self._ends_at = self._said_at = 0.0
        self._heard = False

    def __bool__(self) -> bool:
        """Whether it has begun."""
        return self.stage is not Parting.STAYS

    def begin(self, reason: str, now: float) -> None:
        """Begin; it has not begun yet."""
        assert not self
        self.stage, self.reason, self._ends_at = Parting.LEAVES, reason, now + LEAVE_WITHIN_S

    def workers_are_gone(self, now: float, *, answers: bool) -> None:
        """Say the last word; ``answers``: whether a global server is there that can hear it."""
        if self.stage is Parting.LEAVES:
            self.stage, self._heard, self._said_at = Parting.LAST_WORD, False, 0.0
            self._ends_at = min(self._ends_at, now + (LAST_LEAVE_WITHIN_S if answers else LAST_WORDS_S))

    def is_asked_for(self) -> None:
        """Note that the global server waits for it: it says so again."""
        self._heard, self._said_at = False, 0.0

    def is_heard(self, now: float) -> None:
        """Note that the global server has heard it."""
        self._heard = True
        if self.stage is Parting.LAST_WORD:
            self._ends_at = min(self._ends_at, now + LAST_WORDS_S)

    def says(self, now: float) -> bool:
        """Return whether to tell the global server now, and take it that this is done."""
        due = bool(self) and not self._heard and now - self._said_at >= SAY_EVERY_S
        self._said_at = now if due else self._said_at
        return due

    def is_late(self, now: float) -> bool:
        """Whether all have heard it, or have had the time to."""
        return bool(self) and now > self._ends_at
