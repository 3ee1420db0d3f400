"""The copy of the global server's journal that a standby holds."""

import json
import zlib
from collections import deque
from typing import Any

from lsgd.errors import ProtocolError
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.messages import Copy
from lsgd.server.rounds import MAX_ELECTIONS
from lsgd.server.standbys import MAX_ROUNDS

MAX_NBYTES = 64 << 20
"""Longest text that is taken from a copy."""


class HeldCopy:
    """The last copy, and the last rounds.

    Attributes:
        run: that of the last copy.
        number: of the last copy; 0: there is none.
        certificate, allowed: as in the last :class:`Copy` that had them.
    """

    def __init__(self) -> None:
        self.run, self.number = "", 0
        self.certificate = b""
        self.allowed: dict[str, bytes] = {}
        self._state = b""
        self._rounds: deque[str] = deque(maxlen=MAX_ELECTIONS)
        self._last = 0  # id of the last round
        self._lacks_rounds = False

    @property
    def copied(self) -> int:
        """What a greeting says: the last copy's number; negative if rounds in between were lost."""
        return -self.number if self._lacks_rounds else self.number

    def store(self, copy: Copy) -> None:
        """Store the state of a copy, and its rounds if none before them is missing here.

        Raises:
            ProtocolError: it is damaged.
        """
        rounds = _text(copy.rounds).splitlines() if copy.rounds else []
        try:
            last = int(json.loads(rounds[-1])["round"]) if rounds else copy.after
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"a copy of the journal with a damaged round: {error}") from None
        if copy.after == 0:
            self._rounds.clear()
            self.certificate, self.allowed = copy.certificate, copy.allowed
        self._lacks_rounds = copy.after not in (0, self._last)
        if not self._lacks_rounds:
            self._rounds += rounds
            self._last = last
        self.run, self.number, self._state = copy.run, copy.number, copy.state

    def offer(self) -> Copy:
        """Return it for a server that takes over, with as many rounds as a copy has at most."""
        rounds = zlib.compress("\n".join(list(self._rounds)[-MAX_ROUNDS:]).encode(), 1) if self._rounds else b""
        return Copy(self.run, self.number, self._state, 0, rounds)

    def load(self) -> tuple[dict[str, Any], list[RoundOrdered]]:
        """Return the state and the rounds, as :meth:`lsgd.server.journal.Journal.load` does.

        Raises:
            ProtocolError: the copy is damaged, or there is none.
        """
        try:
            state = dict(json.loads(_text(self._state)))
            return state, [RoundOrdered(**json.loads(each)) for each in self._rounds]
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"the copy of the journal is damaged: {error}") from None


def _text(packed: bytes) -> str:
    try:
        return zlib.decompressobj().decompress(packed, MAX_NBYTES).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"a copy of the journal that cannot be unpacked: {error}") from None
