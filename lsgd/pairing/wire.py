"""Messages over a TCP connection between two machines that pair: each with its length before it."""

import socket
from collections import deque
from contextlib import suppress

from lsgd.pairing.session import MAX_NBYTES, Effect, End, Send, Session

_LENGTH_NBYTES = 2
_READ_NBYTES = 1 << 14


class Wire:
    """A connection and the conversation on it, which never waits.

    Args:
        link: a connected socket.
        session: this machine's side.

    Attributes:
        session: the same.
        address: of the other machine.
        own_address: of this machine, as the other one reaches it.
        ended: why it is over; None until then; empty: the other side has closed it.
    """

    def __init__(self, link: socket.socket, session: Session, now: float) -> None:
        link.setblocking(False)
        self.session = session
        self.address, self.own_address = (
            str(end[0]).removeprefix("::ffff:") for end in (link.getpeername(), link.getsockname())
        )
        self.ended: str | None = None
        self._link = link
        self._read = bytearray()
        self._due = deque[tuple[float, bytes]]()
        self._unsent = b""
        self._closes = False
        self.do(session.start(), now)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._link.fileno()

    def do(self, effects: list[Effect], now: float) -> None:
        """Carry out what the session wants to send; the end waits until all is sent."""
        for effect in effects:
            if isinstance(effect, Send):
                at = max(now + effect.pause_s, self._due[-1][0] if self._due else now)
                self._due.append((at, len(effect.data).to_bytes(_LENGTH_NBYTES, "big") + effect.data))
            elif isinstance(effect, End):
                self.ended, self._closes = effect.why, True

    def say(self, message: dict[str, object], now: float) -> None:
        """Send a message to a machine that has proved itself."""
        self.do(self.session.say(message), now)

    def turn(self, now: float) -> list[Effect]:
        """Send what is due and read what is there; return what the session makes of that."""
        effects: list[Effect] = []
        self._send(now)
        if self.ended is None:
            for data in self._receive(now):
                new = self.session.receive(data, now) if data else self.session.refuse("it is no message", now)
                self.do(new, now)
                effects += new
                if any(isinstance(effect, End) for effect in new):
                    break
        if self.ended is None:
            self.do(new := self.session.tick(now), now)
            effects += new
        return effects

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to send, and the conversation is over."""
        return self.ended is not None and (not self._closes or not (self._due or self._unsent))

    @property
    def has_sent(self) -> bool:
        """Whether all is sent."""
        return not (self._due or self._unsent)

    def close(self, now: float) -> None:
        """Close the connection."""
        self.session.lost(now)
        self.ended = self.ended or ""
        with suppress(OSError):
            self._link.close()

    def _send(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            self._unsent += self._due.popleft()[1]
        try:
            while self._unsent:
                self._unsent = self._unsent[self._link.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._lose(now)

    def _receive(self, now: float) -> list[bytes]:
        try:
            while len(self._read) <= MAX_NBYTES and (data := self._link.recv(_READ_NBYTES)):
                self._read += data
            at_end = len(self._read) <= MAX_NBYTES
        except BlockingIOError:
            at_end = False
        except OSError:
            at_end = True
        messages: list[bytes] = []
        while len(self._read) >= _LENGTH_NBYTES:
            end = _LENGTH_NBYTES + int.from_bytes(self._read[:_LENGTH_NBYTES], "big")
            if end > MAX_NBYTES:
                return [*messages, b""]
            if len(self._read) < end:
                break
            messages.append(bytes(self._read[_LENGTH_NBYTES:end]))
            del self._read[:end]
        if at_end and not messages:
            self._lose(now)
        return messages

    def _lose(self, now: float) -> None:
        self.session.lost(now)
        self._due.clear()
        self._unsent, self.ended, self._closes = b"", "" if self.ended is None else self.ended, False
