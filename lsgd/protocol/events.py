"""The events of a run, which the global server sends to whoever asks, and their MessagePack form.

A happening is a small record of one fact. The server's stream numbers happenings from 1 and stamps them with the time,
which makes each an :class:`Event`. They travel in :class:`lsgd.protocol.messages.Events`. Reasons are sentences with a
code for programs (lsgd/server/reasons.py); states of workers and of the run are those of ``lsgd status --json``.
"""

from dataclasses import dataclass, field
from typing import get_args

from lsgd.errors import ProtocolError
from lsgd.protocol.fields import build, packed, unpacked, values_of
from lsgd.protocol.messages import Generation


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A process has joined the run as ``worker``; ``gpu`` is the unique name of its GPU, or empty."""

    worker: str
    node: int
    address: str
    gpu: str


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker has changed its state.

    Args:
        state: ``live`` or ``held`` (rounds wait for it), ``straggler``, ``cut``, ``away`` (it paused, or has only to
            leave) or ``left``.
        code: of the reason: ``silent``, ``failed``, ``replaced``, ``paused``, ...
    """

    worker: str
    state: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationBegan:
    """Workers form a generation; ``reason`` says why the previous one ended, if there was one."""

    generation: Generation
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoundOrdered:
    """A round has been ordered. The history, the journal and ``metrics.jsonl`` have the same fields.

    Args:
        scope: ``local`` or ``global``.
        node: of a local round; -1: the round is global.
        worker: leader of the round; empty: nobody takes over what one worker has.
        count: the run's iterations when it was ordered.
        seconds: time since the run's first round.
        losses: by worker at that time, of the first workers in rank order and the leader.
        means: what ``worker.mean`` has returned since the global round before, by name.
    """

    round: int
    scope: str
    node: int
    worker: str
    count: int
    seconds: float
    losses: dict[str, float | None]
    means: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundCompleted:
    """All members have completed a round.

    Args:
        took_s: time since it was ordered; None if another server ordered it.
        sent_nbytes: bytes that its members have sent, each since its previous round; None if one did not report it.
    """

    round: int
    took_s: float | None
    sent_nbytes: int | None


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A member could not complete a round, which ends its generation."""

    round: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """An operator has changed settings; those of the algorithm hold from the next global round on."""

    changes: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunChanged:
    """The run is ``waiting`` (for workers), ``running``, ``stopping`` or ``over`` from now on."""

    state: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line that the server has printed; together they are its log. The code may be empty."""

    code: str
    words: str


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A worker of the run at the time of a :class:`RunProgress`.

    The totals are those of ``worker.timings`` in its last heartbeat. They are its process's: a process that replaces
    it begins at 0.

    Args:
        rank: in the generation; -1: outside it.
        state: as in :class:`WorkerChanged`; ``held``: its request waits for an answer.
        done: iterations it has made, including those of its earlier processes.
        loss: as it last reported it; None: there is none, or it is non-finite.
        heard_s: time since it was last heard.
        waiting_s: time of waiting for the servers and the others.
        sent_nbytes: bytes of tensors, like the next.
    """

    worker: str
    rank: int
    state: str
    done: int
    loss: float | None
    heard_s: float
    compute_s: float
    waiting_s: float
    exchange_s: float
    sent_nbytes: int
    received_nbytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The run as a whole at a moment: the same names in reports, events, files, the page and the metrics.

    Args:
        run: identity of the run; empty: nothing is known of it yet.
        state: ``waiting``, ``running``, ``stopping`` or ``over``.
        code, reason: obstacle that it waits for, or reason why it ends.
        period: iterations of a worker between global rounds; ``period_reason``: why this period and delay.
        delay: iterations from a round until its result is applied.
        count: iterations made by all.
        iterations: limit; 0: there is none.
        progress: completed part of the run, 0 to 1.
        participation: mean share of the run's workers that were members of the last global rounds; None: unknown.
        loss: mean of the finite losses at the last global round; None: there are none.
        seconds: time since the first round; 0 before it.
        rounds_local, rounds_global: rounds ordered.
        term: number of this server's term, and the node that it is on.
        generation: number of the last one; 0: there was none. ``nodes``: its nodes.
    """

    run: str = ""
    state: str = ""
    code: str = ""
    reason: str = ""
    algorithm: str = ""
    period: int = 0
    delay: int = 0
    period_reason: str = ""
    count: int = 0
    iterations: int = 0
    progress: float = 0.0
    participation: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    rounds_local: int = 0
    rounds_global: int = 0
    term: int = 0
    served_by: int = 0
    generation: int = 0
    nodes: int = 0


AGREEMENT = "lsgd/agreement"
"""The name under which workers log how far their changes agree; with ``/`` and the name of a layer, how far there."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far the run is, every second (less often with more than 1,000 workers).

    Args:
        workers: at most 4,096, in rank order.
        logged: numbers that scripts have logged (``worker.log``), by name: the mean over live workers that have one.
    """

    run: Summary
    workers: tuple[WorkerProgress, ...]
    logged: dict[str, float] = field(default_factory=dict)


Happening = (
    WorkerJoined
    | WorkerChanged
    | GenerationBegan
    | RoundOrdered
    | RoundCompleted
    | RoundFailed
    | SettingsChanged
    | RunChanged
    | Note
    | RunProgress
)
"""What an event can report; its position is its kind on the wire."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream.

    Args:
        seq: its number in the server's stream, from 1 without a gap.
        time: when the server published it, in seconds since the epoch by the server's clock.
    """

    seq: int
    time: float
    what: Happening


_CLASSES: tuple[type, ...] = get_args(Happening)
_KINDS = {cls: kind for kind, cls in enumerate(_CLASSES)}


def encode_event(time: float, what: Happening) -> bytes:
    """Return an event without its number as MessagePack: its time, its kind and its fields."""
    cls: type = type(what)
    return packed((time, _KINDS[cls], *values_of(cls)(what)))


def decode_event(seq: int, item: bytes) -> Event:
    """Return the event ``seq`` from what :func:`encode_event` returned.

    Raises:
        ProtocolError: it is not one well-formed event.
    """
    match unpacked(item):
        case (float(time), int(kind), *values) if 0 <= kind < len(_CLASSES):
            return Event(seq, time, build(_CLASSES[kind], tuple(values)))
    raise ProtocolError("an event that does not start with a time and a known kind")
