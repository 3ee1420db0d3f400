"""Talks to a run's global server: reads its stream of events, across restarts too, and sends operators' requests."""

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from lsgd.errors import ConfigError, JoinError, ProtocolError
from lsgd.protocol.events import Event, decode_event
from lsgd.protocol.keys import OPERATOR
from lsgd.protocol.messages import (
    PROTOCOL,
    Events,
    EventsQuery,
    Moved,
    Operator,
    Refused,
    Status,
    StatusQuery,
    decode,
    encode,
)
from lsgd.protocol.sockets import Connector, ConnectorKeys, wait_for

ASK_EVERY_S = 0.25
"""How often to ask the server while it has nothing new, in seconds."""

RESEND_S = 1.0
REFUSED_AFTER_S = 0.5
"""How long a reader must have been refused before it raises an error."""

SILENT_AFTER_S = 3.0
"""How long a server may be silent before it counts as disconnected."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The result of :meth:`Reader.read`.

    Args:
        lost: number of earlier events that the server no longer has; after a loss a new ``report`` follows.
        connected: whether the server has answered within the last 3 s.
        report: state of the run as in ``lsgd status --json``, at the beginning, after a restart of the server and
            after a loss; None otherwise. It includes the events up to its ``["stream"]["last"]``.
        restarted: whether a new server process serves the run since the last batch; its events start at 1 again.
        more: whether more can be read at once.
    """

    events: tuple[Event, ...] = ()
    lost: int = 0
    connected: bool = False
    report: dict[str, Any] | None = None
    restarted: bool = False
    more: bool = False


class Reader:
    """Follows the run of the global server at ``address``. Use it from one thread.

    The first connected batch has a report. Then come the events that the server still has, oldest first. While the
    server is away, each read tries to reach it.
    """

    def __init__(self, address: str, keys: ConnectorKeys | None = None) -> None:
        self._link = _connected(address, keys)
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
            JoinError: the server has never let us in, speaks another version, or has given up for another one.
            ProtocolError: the other side is no global server.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._ask(time.monotonic())
            now = time.monotonic()
            wait_for(max(0.0, min(deadline - now, self._next_at() - now)), self._link)
            for frames in self._link.receive():
                for frame in frames[1::2]:
                    if (batch := self._take(frame)) is not None:
                        return batch
            if (now := time.monotonic()) >= deadline:
                connected = now - self._heard_at < SILENT_AFTER_S
                # The handshake may fail while the server is still starting.
                young = now - self._made_at < REFUSED_AFTER_S
                if not (connected or self._epoch or young) and (trouble := self._link.trouble()):
                    raise JoinError(f"the global server at {self._address} does not let us in: {trouble}")
                return Batch(connected=connected)

    def _next_at(self) -> float:
        return self._asked_at + (RESEND_S if self._awaits else ASK_EVERY_S)

    def _ask(self, now: float) -> None:
        if now < self._next_at():
            return
        question = StatusQuery(0) if self._wants_report else EventsQuery(PROTOCOL, self._after)
        self._awaits = self._link.send([encode(question)])
        self._asked_at = now

    def _take(self, frame: bytes) -> Batch | None:
        """Return the batch of an answer, if it has one; if there is more, ask for it at once."""
        answer = decode(frame)
        self._heard_at, self._awaits = time.monotonic(), False
        match answer:
            case Status(text):
                return self._reported(dict(json.loads(text)))
            case Events(epoch) if epoch != self._epoch:
                self._wants_report, self._asked_at = True, float("-inf")
                return None
            case Events(_, first, last, _, items):
                return self._new(first, last, items)
            case Refused(reason):
                raise JoinError(f"the global server at {self._address} refuses us: {reason}")
        raise _unusable(self._address, answer)

    def _new(self, first: int, last: int, items: tuple[bytes, ...]) -> Batch | None:
        """Return the new events; a repeated question returns some twice."""
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


ANSWER_WITHIN_S = 5.0


def ask(
    address: str, message: Operator, keys: ConnectorKeys | None = None, within_s: float | None = None
) -> dict[str, Any]:
    """Send a request to the global server at ``address``: show, end or change its run. Return the run's state.

    Raises:
        JoinError: no answer within ``within_s``, or 5 s, or the server has given up for another one.
        ConfigError: the server refuses the change, and says why; or a text in the message is no Unicode.
    """
    try:
        question = encode(message)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{error.object!r} is no valid Unicode text; type it again") from None
    started_at = time.monotonic()
    within_s = ANSWER_WITHIN_S if within_s is None else within_s
    sent = False
    with _connected(address, keys) as link:
        while (waited_s := time.monotonic() - started_at) < within_s:
            if waited_s > REFUSED_AFTER_S and (trouble := link.trouble()):
                raise JoinError(f"the global server at {address} does not let us in: {trouble}")
            sent = sent or link.send([question])
            wait_for(0.2 if sent else 0.02, link)
            for frames in link.receive():
                for frame in frames[1::2]:
                    answer = decode(frame)
                    if isinstance(answer, Status):
                        return dict(json.loads(answer.report))
                    if isinstance(answer, Refused):
                        raise ConfigError(answer.reason)
                    raise _unusable(address, answer)
    raise JoinError(silent(address, within_s))


def _connected(address: str, keys: ConnectorKeys | None) -> Connector:
    return Connector(address, f"{keys.name if keys else OPERATOR}#{secrets.randbits(63)}".encode(), keys)


def _unusable(address: str, answer: object) -> JoinError | ProtocolError:
    """Return the error for an answer without the run's state or events."""
    match answer:
        case Moved(_, place, reason):
            return JoinError(f"{reason}. The run continues on node{place.node}, at {place.address}: follow it there")
    return ProtocolError(f"the server at {address} answered {type(answer).__name__}")


def silent(address: str, silent_s: float) -> str:
    """Return the message for a server that has not answered for ``silent_s``."""
    return (
        f"no global server answers at {address} within {silent_s:.2g} s; give its address with --connect "
        f"(it prints it when it starts)"
    )
