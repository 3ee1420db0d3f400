"""The worker's connection to its node's local server: one socket and the thread that owns it."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from lsgd.client.control.waiting import Endings, Expected, Notice, Question, Silence
from lsgd.errors import ExchangeError, ProtocolError, ServerLostError
from lsgd.protocol.messages import (
    GenerationOver,
    Heartbeat,
    Published,
    Recall,
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


def heartbeat_every_s(lease_s: float) -> float:
    """Return the seconds between signs of life of a process that counts as dead after a silence of ``lease_s``."""
    return min(1.0, lease_s / 5)


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


class SignsOfLife:
    """What a worker sends its local server unasked: that it lives, and who it is, which a restarted server must learn.

    Attributes:
        lease_s: how long the servers take this worker's silence; unlimited before it joins a run.
        totals: returns what the heartbeats say; called in the channel's thread.
    """

    def __init__(self, incarnation: int) -> None:
        self.lease_s = math.inf
        self.totals: Callable[[], Totals] = lambda: (0.0, 0.0, 0.0, 0, 0, {}, "")
        self._incarnation = incarnation
        self._worker = ""
        self._where = b""
        self._beat_at = self._introduced_at = -math.inf

    def introduce(self, where: WorkerHello) -> None:
        """From now on say every two seconds who this process is."""
        self._where = encode(where)

    def live_as(self, worker: str) -> None:
        """From now on send heartbeats as ``worker``: every second, or five in a lease of less than five seconds."""
        self._worker = worker

    def due(self, now: float) -> Iterable[bytes]:
        """Return the packed messages that are due."""
        if self._worker and now - self._beat_at >= heartbeat_every_s(self.lease_s):
            self._beat_at = now
            yield encode(Heartbeat(self._worker, self._incarnation, *self.totals()))
        if self._where and now - self._introduced_at >= _WHERE_S:
            self._introduced_at = now
            yield self._where


class Channel:
    """Sends messages and waits for their answers; safe to use from several threads.

    The thread also sends the servers this worker's signs of life, and handles what they send unasked: that a generation
    is over, or that this worker is out of the run.

    Args:
        address: the local server's.
        silence_s: longest wait while neither server says anything.
        clock: for waits and for what is due.
        link: carries messages when :meth:`turn` is called; None: a socket, in a thread of its own.

    Attributes:
        silence: of its servers, and how long it waits then.
        endings: what ends a wait before its answer: this worker's part in the run is over, or a generation.
        signs: what it sends unasked.
        relay: address of the relay, and the proof for it, if it has moved since the welcome.
        pass_down: called in the thread with messages about addresses and generations, for this worker's other
            processes.
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
        self.silence, self.endings, self.signs = Silence(silence_s), Endings(), SignsOfLife(incarnation)
        self.relay = ("", b"")
        self.pass_down: Callable[[bytes], None] = lambda frame: None
        self._outbox: deque[bytes] = deque(maxlen=MAX_OUTBOX)
        self._changed = threading.Condition()
        self._expected: list[Expected] = []
        self._recalled = False
        self._clock, self._link = clock or Clock(), link
        self._thread = self._open(incarnation) if link is None else None

    def _open(self, incarnation: int) -> "_Thread | None":
        """Connect to the local server by a socket in a thread; return that."""
        self._link = socket = Connector(self.address, str(incarnation).encode())
        return _Thread(self, socket)

    def send(self, message: Message) -> None:
        """Send a message without waiting."""
        self.put(encode(message))

    def put(self, frame: bytes) -> None:
        """Send a packed message without waiting."""
        self._outbox.append(frame)
        if self._thread is not None:
            self._thread.wake()

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
        question = Question(frames, what, timeout_s, silence_s, generation, now, notice)
        with self._changed:
            self.silence.renew(now)
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
        """Wait for a change."""
        began_at = self._clock.now()
        self._clock.wait(self._changed, seconds)
        now = self._clock.now()
        self.silence.thaw(now - began_at, seconds, now)

    def _repeat(self, question: Question) -> None:
        """Send a question again, and say what it waits for, when that is due."""
        now, notice = self._clock.now(), question.notice
        every_s = min(max(SAY_EVERY_S, notice.said_at - notice.began_at), SAY_AT_LEAST_EVERY_S)  # 10, 20, 40, ...
        due = now - notice.said_at >= every_s
        if now - question.sent_at >= RESEND_S:
            again = due and not self.silence.reason  # twice: only a repeated question is told what it waits for
            for frame in [*question.frames, *question.frames] if again else question.frames:
                self.put(frame)
            question.sent_at = now
        if due and (self.silence.reason or now - question.asked_at >= 2 * RESEND_S):
            logger.warning("%s for %.0f s: %s", question.what, now - notice.began_at, self._awaited(now))
            notice.said_at = now

    def _awaited(self, now: float) -> str:
        """Return the reason to wait: what the local server last said, unless it has fallen silent."""
        if (silent_s := now - self.silence.local_at) > 3 * RESEND_S:
            return f"the local server at {self.address} has been silent for {silent_s:.0f} s"
        return self.silence.reason or "no word yet"

    def _check(self, question: Question) -> None:
        """Raise an error if no answer will come, or not in time."""
        self.endings.check(question)
        now, silence, silence_s = self._clock.now(), self.silence, question.silence_s
        if question.timeout_s is not None and now - question.asked_at > question.timeout_s:
            raise ExchangeError(f"{question.what} for {question.timeout_s:.3g} s: {silence.reason or 'no answer'}")
        waited = f"{question.what} for {now - question.asked_at:.0f} s"
        if self.endings.given_up:
            raise ServerLostError(f"{waited}, and its servers have ended or were given up")
        if (silent_s := now - silence.local_at) > (silence_s or silence.local_s):
            raise ServerLostError(
                f"{waited}, and the local server at {self.address} has been silent for {silent_s:.0f} s; start it "
                f"again: lsgd-server --local --listen {self.address}"
            )
        if now - silence.global_at > (silence_s or silence.global_s):
            raise ServerLostError(f"{waited}, and {self._awaited(now)}")

    def close(self) -> None:
        """Send what is left, then end the thread."""
        if self._thread is not None:
            self._thread.close()

    def turn(self) -> bool:
        """Take what has arrived, and send what is due; return whether the local server is there to get it."""
        assert self._link is not None
        for frames in self._link.receive():
            for frame in frames:
                self._take(frame)
        self._outbox.extend(self.signs.due(self._clock.now()))
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
            if (foreign := self.endings.foreign(message)) is not None:
                self.silence.hear(foreign, self._clock.now())
                return
            self.silence.hear(message, self._clock.now())
            if isinstance(message, WorkerHelloReply) and message.relay:
                self.relay = message.relay, message.relay_secret
            if isinstance(message, Recall):
                self._recalled = True
            elif not (self.endings.note(message) or isinstance(message, Waiting)):
                one = next((e for e in self._expected if e.answered is None and e.answer(message)), None)
                if one is not None:
                    one.answered = message
            self._changed.notify_all()


class _Thread:
    """The thread that owns a channel's socket."""

    def __init__(self, channel: Channel, socket: Connector) -> None:
        self._channel, self._socket = channel, socket
        self._closing, self._wakeup = False, Wakeup()
        self._thread = threading.Thread(target=self._serve, name="lsgd-channel", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the channel's next turn now."""
        self._wakeup.set()

    def close(self) -> None:
        """Send what is left, then end."""
        self._closing = True
        self._wakeup.set()
        self._thread.join(5.0)

    def _serve(self) -> None:
        channel, closed_at = self._channel, math.inf
        try:
            while True:
                if self._closing:
                    closed_at = min(closed_at, time.monotonic())
                sent = channel.turn()
                if closed_at < math.inf and (sent or time.monotonic() - closed_at > CLOSE_WITHIN_S):
                    return
                every_s = heartbeat_every_s(channel.signs.lease_s)
                wait_for(every_s / 2 if sent else _RECONNECTING_S, self._socket, self._wakeup)
                self._wakeup.clear()
        finally:
            self._socket.close()
            self._wakeup.close()
