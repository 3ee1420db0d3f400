"""Reads a run's stream of events from its global server, across restarts of it, and never waits longer than told."""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from lsgd.errors import JoinError, ProtocolError
from lsgd.protocol.events import Event, decode_event
from lsgd.protocol.keys import OPERATOR
from lsgd.protocol.messages import PROTOCOL, Events, EventsQuery, Refused, Status, StatusQuery, decode, encode
from lsgd.protocol.sockets import Connector, ConnectorKeys, Poller

ASK_EVERY_S = 0.25
"""How often the server is asked while it has nothing new, in seconds."""

RESEND_S = 1.0
"""How often a question without an answer is asked again."""

REFUSED_AFTER_S = 0.5
"""A reader that was never let in is told so after so long."""

SILENT_AFTER_S = 3.0
"""A server that has not answered for so long counts as not connected."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a call of :meth:`Reader.read` has found.

    Args:
        events: in order; perhaps none.
        lost: events before these that the server keeps no more; after a loss a new ``report`` follows.
        connected: the server has answered within the last 3 s.
        report: the state of the run as ``lsgd status --json`` has it, at the beginning, after a restart of the server
            and after a loss; None otherwise. It includes the events up to its ``["stream"]["last"]``.
        restarted: another process serves the run since the last batch; its events are numbered from 1 again.
        more: there is more to be read at once.
    """

    events: tuple[Event, ...] = ()
    lost: int = 0
    connected: bool = False
    report: dict[str, Any] | None = None
    restarted: bool = False
    more: bool = False


class Reader:
    """Follows one run; to be used from one thread.

    The first batch that is connected has a report; then come the events that the server still has, from the oldest
    on. A server that is away is looked for as long as the reader is asked.

    Args:
        address: of the global server.
        keys: for a server that wants them.
    """

    def __init__(self, address: str, keys: ConnectorKeys | None = None) -> None:
        name = keys.name if keys else OPERATOR
        self._link = Connector(address, f"{name}#{secrets.randbits(63)}".encode(), keys)
        self._poller = Poller(self._link)
        self._address = address
        self._made_at = time.monotonic()
        self._epoch = ""
        self._after = 0
        self._wants_report = True
        self._asked_at = self._heard_at = float("-inf")
        self._awaits = False  # an answer to the last question

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, timeout_s: float) -> Batch:
        """Return what is new as soon as there is something, or an empty batch after ``timeout_s``.

        Raises:
            JoinError: the server does not let us in, from the beginning on, or speaks another version.
            ProtocolError: what answers is no global server.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._ask(time.monotonic())
            now = time.monotonic()
            self._poller.wait(max(0.0, min(deadline - now, self._next_at() - now)))
            for frames in self._link.receive():
                for frame in frames[1::2]:
                    if (batch := self._take(frame)) is not None:
                        return batch
            if (now := time.monotonic()) >= deadline:
                connected = now - self._heard_at < SILENT_AFTER_S
                # A handshake that fails may be that of a server which is just being started.
                young = now - self._made_at < REFUSED_AFTER_S
                if not (connected or self._epoch or young) and (trouble := self._link.trouble()):
                    raise JoinError(f"the global server at {self._address} does not let us in: {trouble}")
                return Batch(connected=connected)

    def _next_at(self) -> float:
        """Return when a question is due, or worth another try."""
        return self._asked_at + (RESEND_S if self._awaits else ASK_EVERY_S)

    def _ask(self, now: float) -> None:
        if now < self._next_at():
            return
        question = StatusQuery(0) if self._wants_report else EventsQuery(PROTOCOL, self._after)
        self._awaits = self._link.send([encode(question)])
        self._asked_at = now

    def _take(self, frame: bytes) -> Batch | None:
        """Return what an answer says, if anything; ask on at once where there is more."""
        answer = decode(frame)
        self._heard_at, self._awaits = time.monotonic(), False
        match answer:
            case Status(text):
                return self._reported(dict(json.loads(text)))
            case Events(epoch) if epoch != self._epoch:
                self._wants_report, self._asked_at = True, float("-inf")
                return None
            case Events(_, first, last, _, items):
                return self._told(first, last, items)
            case Refused(reason):
                raise JoinError(f"the global server at {self._address} refuses us: {reason}")
        raise ProtocolError(f"the server at {self._address} answered {type(answer).__name__}")

    def _told(self, first: int, last: int, items: tuple[bytes, ...]) -> Batch | None:
        """Return the events that are new; a question that was asked twice brings some twice."""
        known = max(0, self._after + 1 - first)
        events = tuple(decode_event(first + i, item) for i, item in enumerate(items) if i >= known)
        if not events:
            return None
        lost = events[0].seq - 1 - self._after
        self._wants_report |= lost > 0 and self._after > 0
        self._after = events[-1].seq
        more = self._wants_report or self._after < last
        if more:
            self._asked_at = float("-inf")
        return Batch(events, lost, connected=True, more=more)

    def _reported(self, report: dict[str, Any]) -> Batch | None:
        if not self._wants_report:
            return None
        if not (stream := report.get("stream")):
            where = f"the global server at {self._address}"
            raise JoinError(f"{where} has no stream of events; install the same release of lsgd on both")
        self._wants_report, self._asked_at = False, float("-inf")
        before, self._epoch = self._epoch, str(stream["epoch"])
        if self._epoch != before:
            self._after = 0
        return Batch(connected=True, report=report, restarted=before not in ("", self._epoch), more=True)
