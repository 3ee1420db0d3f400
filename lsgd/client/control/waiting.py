"""How long a worker waits for what its servers say, and what ends its waits."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lsgd.errors import EvictedError, ExchangeError, JoinError, RunOverError
from lsgd.protocol.messages import Evicted, GenerationOver, GivenUp, Over, Refused, Waiting, WorkerHelloReply

logger = logging.getLogger("lsgd")

FROZEN_S = 1.0
"""A process that was not scheduled for this long heard nobody, in seconds."""


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
class Question:
    """Messages that are sent every second until an answer comes; the fields are those of ``ask`` in channel.py."""

    frames: Sequence[bytes]
    what: str
    timeout_s: float | None
    silence_s: float | None
    generation: int | None
    asked_at: float
    notice: Notice
    sent_at: float = -math.inf


@dataclass(eq=False)
class Silence:
    """Since when the servers are silent, and how long a question waits then.

    Attributes:
        local_s: longest silence of the local server.
        global_s: longest silence of the global one, while the local one answers; unlimited at first.
        local_at, global_at: when they were last heard, or a question began.
        reason: what the local server has last said that the question waits for.
    """

    local_s: float
    global_s: float = math.inf
    local_at: float = 0.0
    global_at: float = 0.0
    reason: str = ""

    def renew(self, now: float) -> None:
        """Begin a question; what an earlier one waited for explains nothing."""
        self.local_at, self.global_at, self.reason = max(self.local_at, now), max(self.global_at, now), ""

    def hear(self, message: Any, now: float) -> None:
        """Note that a message has come; some come from the local server alone."""
        self.local_at = now
        if not isinstance(message, WorkerHelloReply) and not (isinstance(message, Waiting) and message.away):
            self.global_at = now
        if isinstance(message, Waiting):
            self.reason = message.reason

    def thaw(self, waited_s: float, planned_s: float, now: float) -> None:
        """Leave out a time in which this process was frozen: it is no silence of the servers."""
        if (frozen_s := waited_s - planned_s) > FROZEN_S:
            self.local_at = min(self.local_at + frozen_s, now)
            self.global_at = min(self.global_at + frozen_s, now)


@dataclass(eq=False)
class Endings:
    """What the servers have said to be over: generations, and this worker's part in the run.

    Attributes:
        run: this worker's; empty before it joins one.
        given_up: whether no answer will come any more, so that the worker saves what there is, and leaves.
        refused: the error of a worker that is refused, evicted, or too late; None: it is none of these.
        generations: why those are over that are, by number.
        when_over: called in the channel's thread with the number of each generation that is over, and so are those
            before it.
    """

    run: str = ""
    given_up: bool = False
    refused: JoinError | None = None
    generations: dict[int, str] = field(default_factory=dict)
    when_over: Callable[[int], None] = lambda generation: None

    def foreign(self, message: Any) -> Waiting | None:
        """Return what the worker waits for if a server of another run has sent this message, else None."""
        if not isinstance(message, Evicted) or not self.run or message.run == self.run:
            return None
        reason = (
            f"the global server has begun another run ({message.run}) and does not know this one ({self.run}): it was "
            f"started without its journal. Stop it, and start it again with the --journal of run {self.run}"
        )
        return Waiting(0, reason, away=True)

    def note(self, message: Any) -> bool:
        """Note what is over now; return whether the message says so. The first reason counts."""
        match message:
            case GivenUp():
                self.given_up = True
            case Refused(reason):
                self.refused = self.refused or JoinError(reason)
            case Over(reason):
                self.refused = self.refused or RunOverError(f"the run is over: {reason}")
            case Evicted(reason):
                self.refused = self.refused or EvictedError(reason)
            case GenerationOver(number, reason):
                if self.generations.get(number) != reason:
                    logger.warning("generation %d is over: %s", number, reason)
                self.generations[number] = reason
                self.when_over(number)
            case _:
                return False
        if isinstance(message, GivenUp | Refused | Evicted):
            self.when_over(sys.maxsize)  # nobody else will say that an exchange of this worker is over
        return True

    def check(self, question: Question) -> None:
        """Raise an error if the worker is refused, or a question's generation is over; the channel asks ``given_up``.

        Raises:
            JoinError: it is refused, evicted, or too late.
            ExchangeError: the generation is over.
        """
        if self.refused is not None:
            raise self.refused
        if question.generation in self.generations:
            number = question.generation
            raise ExchangeError(f"generation {number} is over: {self.generations[number]}")

    def generation_over(self, generation: int) -> str:
        """Return why a generation is over; empty while it lasts, as far as this worker knows."""
        return self.generations.get(generation, "")
