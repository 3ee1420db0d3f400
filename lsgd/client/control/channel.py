"""The worker's connection to its node's local server: one socket and the thread that owns it."""

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lsgd.errors import EvictedError, ExchangeError, JoinError, ProtocolError, RunOverError, ServerLostError
from lsgd.protocol.messages import (
    Evicted,
    GenerationOver,
    GivenUp,
    Heartbeat,
    Over,
    Published,
    Recall,
    Refused,
    StatusQuery,
    Upward,
    Waiting,
    WorkerHello,
    WorkerHelloReply,
    decode,
    encode,
)
from lsgd.protocol.sockets import Connector, Wakeup, wait_for

logger = logging.getLogger("lsgd")

RESEND_S = 1.0
"""How often an unanswered message is sent again, in seconds."""

SAY_EVERY_S, SAY_AT_LEAST_EVERY_S = 10.0, 60.0
"""How often what a worker waits for is said, at first and later, in seconds."""

MAX_OUTBOX = 1000
"""How many messages are kept while the local server is away; the oldest are dropped first."""

CLOSE_WITHIN_S = 1.0
"""How long a channel that closes tries to send what is left, in seconds."""

Totals = tuple[float, float, float, int, int, dict[str, float], str]
"""The last seven fields of a :class:`Heartbeat`."""

Message = Upward | WorkerHello | StatusQuery
"""What a worker sends its local server."""

_WHERE_S = 2.0
_RECONNECTING_S = 0.01
_FROZEN_S = 1.0  # who was not scheduled for this long heard nobody


def heartbeat_every_s(lease_s: float) -> float:
    """Return the seconds between signs of life of a process that counts as dead after a silence of ``lease_s``."""
    return min(1.0, lease_s / 5)


@dataclass(eq=False)
class Expected:
    """A message for which ``answer`` is true; ``answered`` once it has arrived."""

    answer: Callable[[Any], bool]
    answered: Any = None


@dataclass(eq=False)
class Notice:
    """When a wait began, and was last said; it may go on over several questions, with rounds between them."""

    began_at: float = -math.inf
    said_at: float = -math.inf


@dataclass(eq=False)
class _Question:
    """Messages that are sent every second until an answer comes; the fields are those of :meth:`Channel.ask`."""

    frames: Sequence[bytes]
    what: str
    timeout_s: float | None
    silence_s: float | None
    generation: int | None
    asked_at: float
    notice: Notice
    sent_at: float = -math.inf


class Clock:
    """The time, in seconds that never go back, and waits in it."""

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait until ``changed`` is notified, or for some seconds."""
        changed.wait(seconds)


class Carrier(Protocol):
    """What carries a channel's messages to the local server and back."""

    def send(self, frames: list[bytes]) -> bool:
        """Send frames as one message; return whether the local server is there to get them."""

    def receive(self) -> Iterable[Sequence[bytes]]:
        """Return the messages that have arrived."""

    def close(self) -> None:
        """End the connection."""


class Channel:
    """Sends messages and waits for their answers; safe to use from several threads.

    The thread also sends the servers a heartbeat every second, or five in a lease that is shorter than five seconds,
    and handles what they send unasked: that a generation is over, or that this worker is out of the run.

    Args:
        address: the local server's.
        silence_s: longest wait while neither server says anything.
        clock: for waits and for what is due.
        link: carries messages when :meth:`turn` is called; None: a socket, in a thread of its own.

    Attributes:
        lease_s: how long the servers take this worker's silence; unlimited before it joins a run.
        global_silence_s: longest wait while only the local server answers; unlimited at first.
        run: this worker's; empty before it joins one.
        given_up: whether no answer will come any more, so that the worker saves what there is, and leaves.
        relay: address of the relay, and the proof for it, if it has moved since the welcome.
        totals: returns what the heartbeats say; called in the channel's thread.
        when_over: called there with the number of each generation that is over, and so are those before it.
        pass_down: called there with messages about addresses and generations, for this worker's other processes.
    """

    def __init__(
        self,
        address: str,
        incarnation: int,
        silence_s: float,
        *,
        clock: Clock | None = None,
        link: Carrier | None = None,
    ) -> None:
        self.address = address
        self.silence_s = silence_s
        self.lease_s = math.inf
        self.global_silence_s = math.inf
        self.run = ""
        self.given_up = False
        self.relay = ("", b"")
        self.totals: Callable[[], Totals] = lambda: (0.0, 0.0, 0.0, 0, 0, {}, "")
        self.when_over: Callable[[int], None] = lambda generation: None
        self.pass_down: Callable[[bytes], None] = lambda frame: None
        self._incarnation = incarnation
        self._worker = ""
        self._where = b""
        self._outbox: deque[bytes] = deque(maxlen=MAX_OUTBOX)
        self._changed = threading.Condition()
        self._expected: list[Expected] = []
        self._heard_at = 0.0
        self._global_heard_at = 0.0
        self._waits_for = ""
        self._refused: JoinError | None = None
        self._recalled = False
        self._over: dict[int, str] = {}
        self._beat_at = self._introduced_at = -math.inf
        self._closing = False
        self._clock = clock or Clock()
        self._link = link
        self._wakeup: Wakeup | None = None
        if link is None:
            self._open()

    def _open(self) -> None:
        socket = Connector(self.address, str(self._incarnation).encode())
        self._link, self._wakeup = socket, Wakeup()
        sources = socket, self._wakeup
        self._thread = threading.Thread(target=self._serve, args=sources, name="lsgd-channel", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message without waiting."""
        self.put(encode(message))

    def put(self, frame: bytes) -> None:
        """Send a packed message without waiting."""
        self._outbox.append(frame)
        if self._wakeup is not None:
            self._wakeup.set()

    def expect(self, answer: Callable[[Any], bool]) -> Expected:
        """Keep the next message for which ``answer`` is true, until :meth:`ask` or :meth:`forget` takes it."""
        expected = Expected(answer)
        with self._changed:
            self._expected.append(expected)
        return expected

    def forget(self, expected: Expected) -> None:
        """Stop expecting a message."""
        with self._changed:
            self._expected.remove(expected)

    def recalled(self) -> bool:
        """Whether the servers have recalled what was granted ahead, since the last call."""
        recalled, self._recalled = self._recalled, False
        return recalled

    def ask(
        self,
        message: Message,
        answer: Callable[[Any], bool] | Expected,
        *,
        what: str,
        timeout_s: float | None = None,
        silence_s: float | None = None,
        generation: int | None = None,
        before: Sequence[Message] = (),
        notice: Notice | None = None,
    ) -> Any:
        """Send ``message`` every second until its answer arrives, and return the answer.

        Args:
            message: the question.
            answer: returns whether a message is the answer; or an expected message, which may have arrived already.
            what: words for the log and for errors.
            timeout_s: longest wait; None: as long as the servers say that there is something to wait for.
            silence_s: longest wait while they say nothing, or only that the global one is away; None: the channel's
                two limits.
            generation: give up when this generation is over.
            before: sent before ``message`` each time.
            notice: of the wait that this question continues; None: the wait begins now.

        Raises:
            JoinError: the servers refuse this worker; EvictedError: it is no longer in the run; RunOverError: it
                joins too late.
            ServerLostError: they were silent for ``silence_s``.
            ExchangeError: the generation is over, or ``timeout_s`` has passed.
        """
        expected = answer if isinstance(answer, Expected) else self.expect(answer)
        now = self._clock.now()
        frames = [encode(each) for each in (*before, message)]
        notice = notice or Notice()
        if notice.began_at == -math.inf:
            notice.began_at = notice.said_at = now
        question = _Question(frames, what, timeout_s, silence_s, generation, now, notice)
        with self._changed:
            self._heard_at = max(self._heard_at, now)
            self._global_heard_at = max(self._global_heard_at, now)
            self._waits_for = ""  # what an earlier question waited for explains nothing
        try:
            while True:
                self._repeat(question)
                with self._changed:
                    if expected.answered is None:
                        self._wait(RESEND_S / 4)
                    if expected.answered is not None:
                        return expected.answered
                self._check(question)
        finally:
            self.forget(expected)

    def _wait(self, seconds: float) -> None:
        """Wait for a change; a time in which this process was frozen is no silence of the servers."""
        began_at = self._clock.now()
        self._clock.wait(self._changed, seconds)
        now = self._clock.now()
        if (frozen_s := now - began_at - seconds) > _FROZEN_S:
            self._heard_at = min(self._heard_at + frozen_s, now)
            self._global_heard_at = min(self._global_heard_at + frozen_s, now)

    def _repeat(self, question: _Question) -> None:
        """Send a question again, and say what it waits for, when that is due."""
        now, notice = self._clock.now(), question.notice
        every_s = min(max(SAY_EVERY_S, notice.said_at - notice.began_at), SAY_AT_LEAST_EVERY_S)  # 10, 20, 40, ...
        due = now - notice.said_at >= every_s
        if now - question.sent_at >= RESEND_S:
            again = due and not self._waits_for  # twice: only a repeated question is told what it waits for
            for frame in [*question.frames, *question.frames] if again else question.frames:
                self.put(frame)
            question.sent_at = now
        if due and (self._waits_for or now - question.asked_at >= 2 * RESEND_S):
            logger.warning("%s for %.0f s: %s", question.what, now - notice.began_at, self._awaited(now))
            notice.said_at = now

    def _awaited(self, now: float) -> str:
        """Return the reason to wait: what the local server last said, unless it has fallen silent."""
        if now - self._heard_at > 3 * RESEND_S:
            return f"the local server at {self.address} has been silent for {now - self._heard_at:.0f} s"
        return self._waits_for or "no word yet"

    def _check(self, question: _Question) -> None:
        """Raise an error if no answer will come, or not in time."""
        if self._refused is not None:
            raise self._refused
        now, silence_s = self._clock.now(), question.silence_s
        if question.generation in self._over:
            raise ExchangeError(f"generation {question.generation} is over: {self._over[question.generation]}")
        if question.timeout_s is not None and now - question.asked_at > question.timeout_s:
            raise ExchangeError(f"{question.what} for {question.timeout_s:.3g} s: {self._waits_for or 'no answer'}")
        waited = f"{question.what} for {now - question.asked_at:.0f} s"
        if self.given_up:
            raise ServerLostError(f"{waited}, and its servers have ended or were given up")
        if now - self._heard_at > (silence_s or self.silence_s):
            raise ServerLostError(
                f"{waited}, and the local server at {self.address} has been silent for "
                f"{now - self._heard_at:.0f} s; start it again: lsgd-server --local --listen {self.address}"
            )
        if now - self._global_heard_at > (silence_s or self.global_silence_s):
            raise ServerLostError(f"{waited}, and {self._awaited(now)}")

    def generation_over(self, generation: int) -> str:
        """Return why a generation is over; empty while it lasts, as far as this worker knows."""
        return self._over.get(generation, "")

    def introduce(self, where: WorkerHello) -> None:
        """From now on say every two seconds who this process is: a restarted local server has to know."""
        self._where = encode(where)

    def start_heartbeat(self, worker: str) -> None:
        """From now on send heartbeats as ``worker``."""
        self._worker = worker

    def close(self) -> None:
        """Send what is left, then end the thread."""
        self._closing = True
        if self._wakeup is not None:
            self._wakeup.set()
            self._thread.join(5.0)

    # -- the thread --------------------------------------------------------------------------------------------

    def _serve(self, socket: Connector, wakeup: Wakeup) -> None:
        closed_at: float | None = None
        try:
            while True:
                if self._closing and closed_at is None:
                    closed_at = self._clock.now()
                sent = self.turn()
                if closed_at is not None and (sent or self._clock.now() - closed_at > CLOSE_WITHIN_S):
                    return
                wait_for(heartbeat_every_s(self.lease_s) / 2 if sent else _RECONNECTING_S, socket, wakeup)
                wakeup.clear()
        finally:
            socket.close()
            wakeup.close()

    def turn(self) -> bool:
        """Take what has arrived, and send what is due; return whether the local server is there to get it."""
        assert self._link is not None
        for frames in self._link.receive():
            for frame in frames:
                self._take(frame)
        now = self._clock.now()
        if self._worker and now - self._beat_at >= heartbeat_every_s(self.lease_s):
            self._outbox.append(encode(Heartbeat(self._worker, self._incarnation, *self.totals())))
            self._beat_at = now
        if self._where and now - self._introduced_at >= _WHERE_S:
            self._outbox.append(self._where)
            self._introduced_at = now
        return self._flush(self._link)

    def _flush(self, link: Carrier) -> bool:
        """Send what is queued as one message; if the local server is away, keep it and return False."""
        batch = list(self._outbox)
        if batch and not link.send(batch):
            return False
        for _ in batch:
            self._outbox.popleft()
        return True

    def _take(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except ProtocolError as error:
            logger.warning("invalid message from the local server: %s", error)
            return
        if isinstance(message, Published | GenerationOver):
            self.pass_down(frame)
        with self._changed:
            self._heard_at = self._clock.now()
            if isinstance(message, Evicted) and self.run and message.run != self.run:
                self._waits_for = _other_run(message.run, self.run)
                return
            if isinstance(message, WorkerHelloReply) and message.relay:
                self.relay = message.relay, message.relay_secret
            if not isinstance(message, WorkerHelloReply) and not (isinstance(message, Waiting) and message.away):
                self._global_heard_at = self._heard_at
            if isinstance(message, GivenUp):
                self.given_up = True
            elif isinstance(message, Waiting):
                self._waits_for = message.reason
            elif isinstance(message, Refused):
                self._refused = self._refused or JoinError(message.reason)  # the first reason counts
            elif isinstance(message, Over):
                self._refused = self._refused or RunOverError(f"the run is over: {message.reason}")
            elif isinstance(message, Evicted):
                self._refused = self._refused or EvictedError(message.reason)
            elif isinstance(message, GenerationOver):
                if self._over.get(message.generation) != message.reason:
                    logger.warning("generation %d is over: %s", message.generation, message.reason)
                self._over[message.generation] = message.reason
                self.when_over(message.generation)
            elif isinstance(message, Recall):
                self._recalled = True
            elif one := next((e for e in self._expected if e.answered is None and e.answer(message)), None):
                one.answered = message
            if isinstance(message, GivenUp | Refused | Evicted):
                self.when_over(sys.maxsize)  # nobody else will say that an exchange of this worker is over
            self._changed.notify_all()


def _other_run(theirs: str, ours: str) -> str:
    return (
        f"the global server has begun another run ({theirs}) and does not know this one ({ours}): it was started "
        f"without its journal. Stop it, and start it again with the --journal of run {ours}"
    )
