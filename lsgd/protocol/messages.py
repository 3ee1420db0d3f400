"""The messages between workers, local servers and the global server, and their MessagePack form.

A message is one frame: the array ``[kind, field, field, ...]`` in the order of its dataclass. Everything that
arrives is checked here, once, for size, counts and the type of every field; behind this edge messages are trusted
to be well formed. The first field of the greetings (:class:`Where`, :class:`Join`, :class:`NodeHello`) is the
protocol's version, and the form of :class:`Refused` never changes, so that two versions can tell that they differ.
"""

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self, Union

import msgpack

from lsgd.errors import ProtocolError

PROTOCOL = 2
"""Version of the messages; a greeting with another one is refused."""

MAX_NBYTES = 1 << 20
"""Largest frame that is parsed, in bytes."""

MAX_ITEMS = 1 << 16
"""Most elements of one array or map in a frame."""


class VersionError(ProtocolError):
    """A greeting of another protocol version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the peer speaks version {version} of the protocol, this side speaks {PROTOCOL}")
        self.version = version


@dataclass(frozen=True, slots=True)
class Where:
    """A worker's first word to its node's local server, which answers :class:`Here`, or :class:`Refused`.

    Args:
        protocol: :data:`PROTOCOL` of the sender.
        incarnation: a random number that this process drew.
        pid: number of the process, so that the local server sees at once when it ends; 0: unknown.
        pid_namespace: in which that number counts (the inode of ``/proc/self/ns/pid``).
    """

    protocol: int
    incarnation: int
    pid: int = 0
    pid_namespace: int = 0


@dataclass(frozen=True, slots=True)
class Here:
    """The local server is there: the index of its node, and the address of the global server."""

    node: int
    address: str


class Origin(NamedTuple):
    """The checkpoint that a worker, or a run, goes on from.

    Args:
        iterations: of the run then; 0: there is no checkpoint.
        run: that wrote it.
    """

    iterations: int = 0
    run: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """A worker asks to belong to the run.

    Answered by :class:`Welcome` once the run can start, :class:`Refused` or :class:`Over`.

    Args:
        protocol: :data:`PROTOCOL` of the sender.
        worker: its name, unique in the run, that of its place: ``node0/worker1``.
        incarnation: a random number that this process drew; tells it from an earlier one of the same name.
        node: index of its machine.
        index: its number on the machine.
        versions: of lsgd, torch, cuda and nccl (an empty text where there is none).
        model: digest of the names, shapes and dtypes of the model; equal on all workers.
        model_summary: the same for people.
        gpu: the unique name of its GPU, or an empty text.
        address: the address that its tensors are exchanged on.
        resumed: iterations of the run at the checkpoint that it goes on from; 0: it begins anew.
        resumed_run: the run that wrote this checkpoint; an empty text where there is none.
    """

    protocol: int
    worker: str
    incarnation: int
    node: int
    index: int
    versions: dict[str, str]
    model: str
    model_summary: str
    gpu: str
    address: str
    resumed: int = 0
    resumed_run: str = ""

    @property
    def origin(self) -> Origin:
        """The checkpoint that it goes on from."""
        return Origin(self.resumed, self.resumed_run)


@dataclass(frozen=True, slots=True)
class Data:
    """Digest of the first batch that a worker drew, from which two workers with the same data are found."""

    worker: str
    incarnation: int
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """A worker asks for one iteration.

    Args:
        worker: its name.
        incarnation: its process.
        seq: number of the request, from 1; the same number asks the same thing again.
        done: iterations that this incarnation has made.
        committed: id of the last round that it completed, 0 for none.
        dropped: id of the last round that it was given and could not complete, 0 for none.
        loss: mean of its last batch losses, None before the first.
        ahead: it still has iterations to make. Such a request is granted at once or forgotten, never held: a worker
            that has none left asks again, under the same number.
    """

    worker: str
    incarnation: int
    seq: int
    done: int
    committed: int
    dropped: int
    loss: float | None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's process runs, whatever it is busy with; answered by nothing."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has completed a round, or failed to; ``error`` says why.

    ``broken``: ranks of the round's generation that cannot reach each other, one pair after the other.
    """

    worker: str
    incarnation: int
    round: int
    ok: bool
    error: str
    broken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker steps aside (to evaluate, say) after its request ``seq``, until the next; an unused grant goes back.

    Answered by :class:`Paused`. ``committed`` is as in :class:`Request`, in case that its :class:`Done` comes later
    or never.
    """

    worker: str
    incarnation: int
    seq: int
    done: int
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """The servers know that the worker has stepped aside after its request ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker goes for good; unused grants go back. ``failed``: because of an error, which ``reason`` names.

    ``committed`` is as in :class:`Request`, in case that its :class:`Done` comes later or never.
    """

    worker: str
    incarnation: int
    done: int
    failed: bool
    reason: str
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """The answer to :class:`Leave` and :class:`NodeLeave`: the servers know, and the process may end."""


@dataclass(frozen=True, slots=True)
class Put:
    """Publish a value (a Gloo address, say) to the members of a generation, to build process groups from."""

    worker: str
    incarnation: int
    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Ask for the value that a member of the generation publishes under ``key``; answered when it is there."""

    worker: str
    incarnation: int
    generation: int
    key: str


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A local server introduces itself; answered by :class:`NodeWelcome` or :class:`Refused`."""

    protocol: int
    node: int
    incarnation: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class NodeWelcome:
    """The global server knows this node."""

    run: str


@dataclass(frozen=True, slots=True)
class NodeLeave:
    """A local server is being ended: its workers are to leave at their next request. Answered by :class:`Left`."""

    node: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """The global server tells local servers that the run has ended, for good; they answer :class:`NodeLeave`."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """End the run: granted iterations finish, then the round that makes the consensus model."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChangeSetting:
    """Change a numeric setting from the next global round on; answered by :class:`Status` or :class:`Refused`."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Ask for :class:`Status`; ``incarnation`` is the asking worker's, 0 for an operator's own connection."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A set of members in rank order, with the process groups built for them.

    Args:
        number: counts generations of the run, from 1.
        nodes: indices of the machines that have members, in rank order. Empty, as ``node_sizes`` and ``indices`` are,
            in an answer to a worker that has completed a round of this generation, and so has them.
        node_sizes: members of each; they add up to the number of members.
        indices: of the members on their machines, in rank order.
        backend: ``nccl`` or ``gloo``.
    """

    number: int
    nodes: tuple[int, ...]
    node_sizes: tuple[int, ...]
    indices: tuple[int, ...]
    backend: str

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.node_sizes) or sum(self.node_sizes) != len(self.indices):
            raise ProtocolError(
                f"a generation of {len(self.indices)} members on {len(self.nodes)} nodes of the sizes {self.node_sizes}"
            )

    @classmethod
    def of(cls, number: int, places: Sequence[tuple[int, int]], backend: str) -> Self:
        """Return the generation of the workers at these (node, index): in rank order, those of a node together."""
        sizes = {node: 0 for node, _ in places}
        for node, _ in places:
            sizes[node] += 1
        return cls(number, tuple(sizes), tuple(sizes.values()), tuple(index for _, index in places), backend)

    @property
    def members(self) -> tuple[str, ...]:
        """Their names in rank order."""
        return _member_names(self.nodes, self.node_sizes, self.indices)


def worker_name(node: int, index: int) -> str:
    """Return the name of the worker that has this number on a machine."""
    return f"node{node}/worker{index}"


@functools.lru_cache(maxsize=4)
def _member_names(
    nodes: tuple[int, ...], node_sizes: tuple[int, ...], indices: tuple[int, ...]
) -> tuple[str, ...]:
    homes = itertools.chain.from_iterable(map(itertools.repeat, nodes, node_sizes))
    return tuple(map(worker_name, homes, indices))


@dataclass(frozen=True, slots=True)
class Round:
    """An exchange that the global server orders; the same for all who take part.

    Args:
        id: counts rounds of the run, from 1.
        generation: who takes part in global rounds; in local ones, those of the same node.
        scope: ``local`` (one node) or ``global`` (all; begins with a local round in every node).
        leader: rank with the lowest loss of all who take part.
        leaders: for each node of the generation the rank with its lowest loss; -1 where it takes no part.
        exchanges: global rounds before this one; the same on all, whatever failed on the way.
        new: ranks that take the state of ``source`` before the exchange; empty when nobody is new.
        source: the rank that gives its state.
        final: the round that makes the consensus model.
        algorithm: JSON text of the algorithm's name and settings from this round on; empty: as before.
        count: iterations of the run when the round was ordered; exact in global ones.
        checkpoint: each member saves the state that it enters this round with, or, if it is final, leaves it with.
        probe: the members first see whether all of them can reach each other, if they have no process groups yet.
    """

    id: int
    generation: Generation
    scope: str
    leader: int
    leaders: tuple[int, ...]
    exchanges: int
    new: tuple[int, ...]
    source: int
    final: bool
    algorithm: str = ""
    count: int = 0
    checkpoint: bool = False
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is known.

    Args:
        run: identity of the run.
        plan: the plan as JSON text.
        rank: the rank it can expect in its first generation.
        world_size: how many workers it can expect there.
        warnings: differences of versions that are not fatal.
    """

    run: str
    plan: str
    rank: int
    world_size: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker or node cannot take part; ``reason`` says why and what to do. This form never changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """The answer to a :class:`Join` that comes too late: the run has ended or is about to, for the ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """This process of the worker is in the run ``run`` no more, or never was; another one may join.

    ``reason`` says why. A worker of another run is not meant: its server was started again without its journal.
    """

    reason: str
    run: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing is lost: the request ``seq`` (0: the join) is held, and this is what it waits for.

    ``away``: for the global server, which does not answer the local one.
    """

    seq: int
    reason: str
    away: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """So many iterations, after the round if there is one. ``progress``: share of the run that is made, 0 to 1."""

    seq: int
    round: Round | None
    progress: float
    reason: str
    iterations: int = 1


@dataclass(frozen=True, slots=True)
class Recall:
    """Others wait for what the worker has been granted ahead: it is to ask again before its next iteration."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end: the round that makes the consensus model, if the worker takes part in it, and no iteration.

    ``failed``: the worker has no consensus, since rounds kept failing: it saves what it has, and fails too.
    """

    seq: int
    round: Round | None
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class GenerationOver:
    """A member of the generation died or failed: drop its process groups and ask again."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Value:
    """What a member of the generation published under ``key``."""

    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the run as JSON text (docs/operations.md lists its keys)."""

    report: str


Upward = Join | Data | Request | Heartbeat | Done | Pause | Leave | Put | Get
"""What a worker says."""

Downward = (
    Welcome
    | Left
    | LeftOut
    | Over
    | Paused
    | Refused
    | Waiting
    | Go
    | Stop
    | Recall
    | GenerationOver
    | Value
    | Status
)
"""What the servers answer to a worker."""

Operator = StopRun | ChangeSetting | StatusQuery
"""What an operator asks of the global server."""

Message = Upward | Downward | Where | Here | NodeHello | NodeWelcome | NodeLeave | RunOver | Operator

_CLASSES: tuple[type, ...] = (
    Refused,  # kind 0, for ever
    Where,
    Here,
    Join,
    NodeHello,
    Data,
    Request,
    Heartbeat,
    Done,
    Pause,
    Leave,
    Left,
    Put,
    Get,
    NodeWelcome,
    NodeLeave,
    RunOver,
    StopRun,
    ChangeSetting,
    StatusQuery,
    Welcome,
    Waiting,
    Go,
    Stop,
    GenerationOver,
    Value,
    Status,
    Paused,
    LeftOut,
    Recall,
    Over,
)
_KINDS = {cls: kind for kind, cls in enumerate(_CLASSES)}
_SHORT_ARRAY = 0x90  # and its length, up to 15, is how MessagePack begins an array
_WITH_A_ROUND = (Go, Stop)
_GREETINGS = (Where, Join, NodeHello)


def kind_of(frame: bytes) -> type | None:
    """Return the class of the message in ``frame`` without parsing it; None if it starts like none."""
    return _CLASSES[frame[1]] if len(frame) > 1 and frame[1] < len(_CLASSES) else None


def encode(message: Message) -> bytes:
    """Return ``message`` as one MessagePack frame."""
    cls: type = type(message)
    if isinstance(message, _WITH_A_ROUND) and message.round is not None:
        # All members get the same round, which is packed once: it may have thousands of members.
        values = (_KINDS[cls], *_values(cls)(message))
        parts = [_packed_round(v) if v is message.round else _pack(v) for v in values]
        return bytes([_SHORT_ARRAY + len(parts)]) + b"".join(parts)
    return _pack((_KINDS[cls], *_values(cls)(message)))


class _PackedRound(NamedTuple):
    round: Round
    data: bytes


_last_round: _PackedRound | None = None


def _packed_round(round: Round) -> bytes:
    """Return a round as its part of a frame."""
    global _last_round
    last = _last_round
    if last is None or last.round is not round:
        generation = _values(Generation)(round.generation)
        fields = [generation if v is round.generation else v for v in _values(Round)(round)]
        last = _last_round = _PackedRound(round, _pack(fields))
    return last.data


def _pack(value: Any) -> bytes:
    return msgpack.packb(value)  # type: ignore[no-any-return]


def decode(frame: bytes) -> Message:
    """Return the message in ``frame``.

    Raises:
        VersionError: it is a greeting of another protocol version.
        ProtocolError: it is anything else than one well-formed message.
    """
    if len(frame) > MAX_NBYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than the {MAX_NBYTES} allowed")
    try:
        items = msgpack.unpackb(
            frame,
            use_list=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"not MessagePack as this protocol uses it: {why}") from None
    if (
        type(items) is not tuple
        or not items
        or type(items[0]) is not int
        or not 0 <= items[0] < len(_CLASSES)
    ):
        raise ProtocolError("a frame that starts with no known kind of message")
    cls = _CLASSES[items[0]]
    if cls in _GREETINGS and len(items) > 1 and type(items[1]) is int and items[1] != PROTOCOL:
        raise VersionError(items[1])
    message: Message = _build(cls, items[1:])
    return message


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


@functools.cache
def _values(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of a message's fields."""
    names = _names(cls)
    if len(names) < 2:  # of one name, attrgetter returns no tuple
        return lambda message: tuple(getattr(message, name) for name in names)
    return operator.attrgetter(*names)


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


@functools.cache
def _checks(cls: type) -> tuple[Callable[[Any], Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple(_check(hints[name]) for name in _names(cls))


def _build(cls: type, values: tuple[Any, ...]) -> Any:
    checks = _checks(cls)
    if len(values) != len(checks):
        raise ProtocolError(f"{cls.__name__} with {len(values)} fields instead of {len(checks)}")
    try:
        return cls(*[check(value) for check, value in zip(checks, values, strict=True)])
    except _WrongTypeError:
        name, value = next(
            (n, v) for n, c, v in zip(_names(cls), checks, values, strict=True) if not _accepts(c, v)
        )
        raise ProtocolError(f"{cls.__name__}.{name} cannot be a {type(value).__name__}") from None


class _WrongTypeError(Exception):
    pass


def _accepts(check: Callable[[Any], Any], value: Any) -> bool:
    try:
        check(value)
    except _WrongTypeError:
        return False
    return True


def _check(hint: Any) -> Callable[[Any], Any]:
    """Return a function that passes a value of the type ``hint`` on, or raises."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (_check(arg) for arg in typing.get_args(hint) if arg is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _check(typing.get_args(hint)[0])
        return lambda value: tuple(item(v) for v in _typed(value, tuple))
    if origin is dict:
        key, item = (_check(arg) for arg in typing.get_args(hint))
        return lambda value: {key(k): item(v) for k, v in _typed(value, dict).items()}
    if hint in (Generation, Round):
        return lambda value: _build(hint, _typed(value, tuple))
    return {int: _integer, float: _number}.get(hint) or functools.partial(_typed, kind=hint)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _WrongTypeError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _WrongTypeError
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _WrongTypeError
