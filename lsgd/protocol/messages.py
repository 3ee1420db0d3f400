"""The messages between workers, local servers and the global server, and their MessagePack form.

A message is one frame: the array ``[kind, field, field, ...]`` in the order of its dataclass. Everything that
arrives is checked here, once, for size, counts and the type of every field; all other code relies on that. The first
field of the greetings (:class:`WorkerHello`, :class:`Join`, :class:`NodeHello`, :class:`EventsQuery`) is the protocol's
version, and the form of :class:`Refused` never changes, so two different versions can recognize each other.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, get_args

from lsgd.errors import ProtocolError
from lsgd.protocol.fields import build, packed, unpacked, values_of
from lsgd.protocol.wants import STEP, Want

PROTOCOL = 13
"""Version of the messages; a greeting with another one is refused."""

MAX_NBYTES = 1 << 20
"""Size of the largest frame that is parsed, in bytes."""

MAX_LOGGED, MAX_LOGGED_NAME, MAX_OWN = 32, 64, 32
"""Most numbers that a worker reports from its script, and most characters in the name of one."""


LOOP_ENDED = "its training loop ended"
"""Reason of the :class:`Leave` of a worker that stopped training before the end of the run."""


class VersionError(ProtocolError):
    """A greeting in another protocol version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the peer speaks version {version} of the protocol, this side speaks {PROTOCOL}")
        self.version = version


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker's first message to its local server; answered by :class:`WorkerHelloReply` or :class:`Refused`.

    Args:
        pid: of the process, so that the local server sees at once when it ends; 0: unknown.
        pid_namespace: inode of ``/proc/self/ns/pid``, where the process id is valid.
        stage: which one of the run it comes to, from 1: it has been in those before.
    """

    protocol: int
    incarnation: int
    pid: int = 0
    pid_namespace: int = 0
    stage: int = 1


@dataclass(frozen=True, slots=True)
class WorkerHelloReply:
    """The local server answers: the index of its node, the address of the global server, and its relay, if it has one.

    ``relay`` and ``relay_secret`` are as in :class:`Welcome`; they change when the run moves.
    """

    node: int
    address: str
    relay: str = ""
    relay_secret: bytes = field(default=b"", repr=False)


class Origin(NamedTuple):
    """The checkpoint that a worker or a run resumes from.

    Args:
        iterations: those of the run at the checkpoint; 0: there is no checkpoint.
        run: the run that wrote it.
    """

    iterations: int = 0
    run: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """A worker asks to join; answered by :class:`Welcome` once the run can start, :class:`Refused` or :class:`Over`.

    Args:
        worker: name, unique in the run: ``node0/worker1``.
        incarnation: random number that tells this process from an earlier one of the same name.
        index: number on the machine ``node``.
        versions: releases of lsgd, torch, cuda and nccl (empty if there is none).
        model: digest of names, shapes and dtypes in the model; must be equal on all workers.
        gpu: unique name of its GPU, or empty.
        address: where it exchanges tensors.
        resumed: iterations of the run at the checkpoint that it resumes from; 0: it has none.
        resumed_run: run that wrote this checkpoint; empty if it has none.
        step: place in its script's own loop, where that has resumed by itself.
        bears_delay: whether it trains with Muon, and has memory for a delay.
        stage: as in :class:`WorkerHello`. A worker that comes to an earlier stage than the run's is welcomed, but no
            member; the run's identity says so.
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
    step: int = 0
    bears_delay: bool = False
    stage: int = 1

    @property
    def origin(self) -> Origin:
        """The checkpoint that it resumes from."""
        return Origin(self.resumed, self.resumed_run)


@dataclass(frozen=True, slots=True)
class FromWorker:
    """What a worker sends once it has asked to join: its name, and the number that identifies its process."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Data(FromWorker):
    """Digests of what a worker learned first; they reveal two workers that learn the same thing twice.

    Args:
        digest: of the gradients of its first step; or ``data`` again, of several steps whose data differs.
        data: of the first data that it drew, or that its model got; empty: unknown.
        noise: of its random numbers at that step; empty: unknown.
    """

    digest: str
    data: str = ""
    noise: str = ""


@dataclass(frozen=True, slots=True)
class Dealt(FromWorker):
    """How a worker deals data that lsgd divides; all must deal alike, because each takes its part of it.

    Args:
        where: place in the script where it is divided, such as ``train.py:31``.
        facts: what is dealt and how, by name: its length, a digest of its rows, the sampler, its first order, the seed.
        epoch: number of the pass.
        order: digest of the order of that pass; empty: it follows from the facts.
    """

    where: str
    facts: dict[str, str]
    epoch: int = 0
    order: str = ""


@dataclass(frozen=True, slots=True)
class Request(FromWorker):
    """A worker asks for what it ``wants``.

    Args:
        seq: number from 1; the same number repeats the request.
        done: iterations that this incarnation has made.
        committed: id of the last round that it completed; 0: none.
        dropped: id of the last round that it was given and could not complete; 0: none.
        loss: mean of its last batch losses, or that of its probe where this elects; None before the first.
        steps: length of its script's own loop in iterations; 0: it has none, and the plan ends the run.
        lacking: whether it lacked parts of the run's model when it completed the round ``committed``.
    """

    seq: int
    done: int
    committed: int
    dropped: int
    loss: float | None
    wants: Want = STEP
    steps: int = 0
    lacking: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat(FromWorker):
    """A worker's process is alive, whatever it is doing; not answered.

    The other fields are the totals of its ``timings``, the last numbers that its script logged, by name, and how far
    a transfer of tensors is that takes long; an empty text: none does.
    """

    compute_s: float = 0.0
    waiting_s: float = 0.0
    exchange_s: float = 0.0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class Probed(FromWorker):
    """A worker has found in a probed round which nodes cannot dial each other; ``missed`` is as in Generation."""

    round: int
    missed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completed(FromWorker):
    """A worker has completed a round.

    Args:
        sent_nbytes: what it has sent in all rounds since it joined.
        lacking: as in :class:`Request`.
        transfer_s: seconds of the last transfer beside training, if it was of an earlier round.
    """

    round: int
    sent_nbytes: int = 0
    lacking: bool = False
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed(FromWorker):
    """A worker could not complete a round; ``error`` says why.

    ``broken``: ranks of the round's generation that cannot reach each other, one pair after the other.
    """

    round: int
    error: str
    broken: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pause(FromWorker):
    """A worker pauses (to evaluate, for example) after its request ``seq``, until the next; an unused grant goes back.

    Answered by :class:`Paused`. ``committed`` is as in :class:`Request`, in case its :class:`Completed` comes
    later or never.
    """

    seq: int
    done: int
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """The servers know that the worker pauses after its request ``seq``."""

    seq: int


@dataclass(frozen=True, slots=True)
class Met:
    """The answer to a :class:`~lsgd.protocol.wants.Call`, with its ``number``: means over ``workers`` workers.

    ``error`` says why there are none.
    """

    number: int
    values: dict[str, float]
    workers: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Leave(FromWorker):
    """A worker leaves the run; unused grants go back. ``failed``: because of an error, which ``reason`` names.

    ``committed`` is as in :class:`Request`, in case its :class:`Completed` comes later or never.
    """

    done: int
    failed: bool
    reason: str
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """The answer to :class:`Leave` and :class:`NodeLeave`: the servers know, and the process may end."""


@dataclass(frozen=True, slots=True)
class Put(FromWorker):
    """Publish a value (an address, for example) to the members of a generation, for building process groups."""

    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Get(FromWorker):
    """Ask for the value that a member of the generation publishes under ``key``; answered once it exists."""

    generation: int
    key: str


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """The reign of one global server: its number, and the node that serves. Later terms are greater."""

    number: int = 0
    node: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node serves, or could: its address, and its public key; empty where no keys are needed."""

    node: int
    address: str
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A local server introduces itself; answered by :class:`NodeWelcome` or :class:`Refused`.

    Args:
        workers: how many this node has, for a run that begins with those of all its nodes.
        place: address where it could start a global server; empty: it cannot.
        copied: number of the last :class:`Copy` that it has; 0: none; negative: rounds before it were lost.
        looks: whether it follows another server, and only wants to know what this one serves.
        stage: the one of the run that its workers come to; 0: that which the server has.
    """

    protocol: int
    node: int
    incarnation: int
    host: str
    version: str
    workers: int = 1
    place: str = ""
    copied: int = 0
    looks: bool = False
    stage: int = 0


@dataclass(frozen=True, slots=True)
class NodeWelcome:
    """The global server accepts this node, or tells one that only looks what it serves.

    Args:
        terms: those of the run, up to the server's own.
        count: iterations of the run; 0 if no worker that is here has its model, -1 if that is not known
            yet.
        places: the server's own, and those of its standbys, the first one first.
        beaten: terms of other parts of the run that this one has met, and that have to give up.
        relay: address of the relay, and ``relay_secret`` the proof that one is a member; empty: there is none.
        nodes: those that have greeted this server; they never go back to an earlier term.
    """

    run: str
    terms: tuple[Term, ...] = ()
    count: int = 0
    places: tuple[Endpoint, ...] = ()
    beaten: tuple[Term, ...] = ()
    relay: str = ""
    relay_secret: bytes = field(default=b"", repr=False)
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Meet:
    """Two parts of a run meet: what the server of the other one serves. Carried by the nodes of the two servers.

    The fields are those of its :class:`NodeWelcome`, and its place.
    """

    run: str
    terms: tuple[Term, ...]
    count: int
    place: Endpoint
    beaten: tuple[Term, ...] = ()
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """This server has given up, because another one at ``place`` has more of the run: follow that one.

    ``run`` is this server's, ``other`` that of the other one: another run if this one has not begun.
    """

    run: str
    place: Endpoint
    reason: str
    other: str


@dataclass(frozen=True, slots=True)
class Copy:
    """What the journal of the global server holds, for a standby; never answered.

    A node that has a copy sends it to the server that takes over, which continues from the newest one.

    Args:
        run: its identity.
        number: from 1; a standby says in its greetings which one it has.
        state: the journal's document, compressed.
        after: id of the last round in the copy before this one; 0: this one begins with the first that is kept.
        rounds: later ones, each as the journal has it, on lines of their own, compressed; empty: none.
        certificate: the run's, as in :class:`Welcome`.
        allowed: names and public keys that may connect, like ``certificate`` only where ``after`` is 0.
    """

    run: str
    number: int
    state: bytes
    after: int
    rounds: bytes
    certificate: bytes = field(default=b"", repr=False)
    allowed: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeLeave:
    """A local server is ending: its workers must leave at their next request. Answered by :class:`Left`."""

    node: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunOver:
    """The global server tells local servers that the run, or its stage, is over; they answer :class:`NodeLeave`.

    ``nodes``: how many took part to the end, and may begin a next stage; 0: there is none, because this one was
    stopped, or has failed.
    """

    reason: str
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class StopRun:
    """End the run: workers finish granted iterations, then the final round makes the consensus model."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChangeSettings:
    """Change settings by name, all or none; answered by :class:`Status` or :class:`Refused`."""

    changes: dict[str, str]


@dataclass(frozen=True, slots=True)
class StatusQuery:
    """Ask for :class:`Status`; ``incarnation`` is the asking worker's, 0 for an operator's own connection."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class EventsQuery:
    """An operator asks for the events after number ``after``; answered by :class:`Events`."""

    protocol: int
    after: int


@dataclass(frozen=True, slots=True)
class Events:
    """Events of a run, as many as fit into a message.

    Args:
        epoch: name of the stream; a restarted server has a new one, whose numbers begin at 1 again.
        first: number of the first event in ``items``.
        lost: number of requested events before ``first`` that are no longer kept.
        items: events in order, each as :func:`lsgd.protocol.events.encode_event` returns it.
    """

    epoch: str
    first: int
    last: int
    lost: int
    items: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A fixed set of members in rank order, with process groups of its own.

    Args:
        nodes: indices of the machines that have members, in rank order. Empty, like ``node_sizes`` and ``indices``, in
            an answer to a worker that has completed a round of this generation, and so knows them.
        indices: each member's index on its machine, in rank order.
        transport: ``tcp`` or ``nccl``.
        missed: pairs of nodes, one after the other: the first cannot dial the second. Empty when ``nodes`` is.
        nccl_nodes: nodes whose members exchange over NCCL among themselves, while ``transport`` carries tensors
            between nodes. Empty when ``nodes`` is.
        others: node and index of each worker, one after the other, that takes no part now and keeps its part of the
            data: it has paused, is late, or has finished its own loop. Empty when ``nodes`` is.
    """

    number: int
    nodes: tuple[int, ...]
    node_sizes: tuple[int, ...]
    indices: tuple[int, ...]
    transport: str
    missed: tuple[int, ...] = ()
    nccl_nodes: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        fits = len(self.nodes) == len(self.node_sizes) and sum(self.node_sizes) == len(self.indices)
        if not fits or min(self.node_sizes, default=1) < 1:
            raise ProtocolError(
                f"a generation of {len(self.indices)} members on {len(self.nodes)} nodes of the sizes {self.node_sizes}"
            )

    @classmethod
    def of(
        cls,
        number: int,
        places: Sequence[tuple[int, int]],
        transport: str,
        missed: tuple[int, ...] = (),
        nccl_nodes: tuple[int, ...] = (),
        others: Iterable[tuple[int, int]] = (),
    ) -> Self:
        """Return the generation of workers at ``places``: (node, index) in rank order, those of a node together.

        ``others`` are the places of workers that take no part.
        """
        sizes = {node: 0 for node, _ in places}
        for node, _ in places:
            sizes[node] += 1
        indices = tuple(index for _, index in places)
        away = tuple(itertools.chain.from_iterable(others))
        return cls(number, tuple(sizes), tuple(sizes.values()), indices, transport, missed, nccl_nodes, away)

    @property
    def carriers(self) -> str:
        """What carries its tensors, in words."""
        return f"{self.transport}, and nccl inside nodes" if self.nccl_nodes else self.transport

    @property
    def homes(self) -> tuple[int, ...]:
        """The index of each member's machine, in rank order."""
        return tuple(itertools.chain.from_iterable(map(itertools.repeat, self.nodes, self.node_sizes)))

    @property
    def members(self) -> tuple[str, ...]:
        """Their names in rank order."""
        return _member_names(self)

    def part_of(self, rank: int) -> tuple[int, int]:
        """Return which part of the data is a member's, and how many parts there are: those of the others count, too."""
        places = [*zip(self.homes, self.indices, strict=True)]
        own, others = places[rank], [*zip(self.others[::2], self.others[1::2], strict=True)]
        return sorted(places + others).index(own), len(places) + len(others)


def worker_name(node: int, index: int) -> str:
    """Return the name of the worker with this index on a machine."""
    return f"node{node}/worker{index}"


@functools.lru_cache(maxsize=4)
def _member_names(generation: Generation) -> tuple[str, ...]:
    return tuple(map(worker_name, generation.homes, generation.indices))


@dataclass(frozen=True, slots=True)
class Round:
    """An exchange that the global server orders; the same for all members that take part.

    Args:
        generation: its members take part in global rounds; those of one node in a local round.
        scope: ``local`` (one node) or ``global`` (all; begins with a local round in every node).
        leader: rank elected among all that take part.
        leaders: rank elected on each node of the generation; -1 if the node takes no part.
        exchanges: number of global rounds before this one; the same on all members, also after failures.
        new: ranks of newcomers, which receive the state of ``source`` before the exchange.
        algorithm: the algorithm's name and settings from this round on, as JSON; empty: unchanged.
        count: iterations of the run when the round was ordered; exact in global rounds.
        checkpoint: each member saves the state in which it enters this round or, if it is final, leaves it.
        probe: members without process groups first check whether all of them can reach each other.
        averaged: ranks whose models are averaged before the round, because a phase begins anew: all take the mean.
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
    averaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker may take part.

    Args:
        rank: expected rank in its first generation.
        world_size: expected number of workers there.
        warnings: differences between versions that are not fatal.
        certificate: key and certificate (PEM) for connections that carry tensors; empty: these are not encrypted.
        relay: address of the relay; empty: there is none.
        relay_secret: proof for the relay that the worker is a member.
        first: name of the worker that saves for all.
        step: place of this worker in its script's own loop, where it has one.
        newcomer: whether it joins a run that has begun.
    """

    run: str
    plan: str
    rank: int
    world_size: int
    warnings: tuple[str, ...]
    certificate: bytes = b""
    relay: str = ""
    relay_secret: bytes = field(default=b"", repr=False)
    first: str = ""
    step: int = 0
    newcomer: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker or node cannot take part; ``reason`` says why and what to do. This form never changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """Answers a :class:`Join` that comes too late: the run has ended or is about to, for ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The local server says that no answer will come any more: save what there is, and leave."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """This process is no longer in the run ``run``, or never was: it was evicted, for ``reason``. A new one may join.

    A worker of another run must ignore it: its server was started again without its journal.
    """

    reason: str
    run: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request ``seq`` (0: the join) is held, not lost; ``reason`` says what it waits for.

    ``away``: it waits for the global server, which does not answer the local one.
    """

    seq: int
    reason: str
    away: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """Make ``iterations`` iterations, after the round if there is one. ``progress``: share of the run made, 0 to 1."""

    seq: int
    round: Round | None
    progress: float
    iterations: int = 1


@dataclass(frozen=True, slots=True)
class Recall:
    """Others need what the worker was granted in advance: it must ask again before its next iteration."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the run: the final round, if the worker takes part in it, and no iteration.

    ``failed``: the worker gets no consensus, because rounds kept failing: it saves its state, and fails too.
    ``late``: the others have made the last round without it, so its model is not the consensus.
    """

    seq: int
    round: Round | None
    reason: str
    failed: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class GenerationOver:
    """A member of the generation died or failed: drop its process groups and ask again."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Published:
    """What a member of the generation published under ``key``."""

    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the run as JSON text (docs/guides/monitoring.md lists its keys)."""

    report: str


Upward = Join | Data | Dealt | Request | Heartbeat | Probed | Completed | Failed | Pause | Leave | Put | Get
"""What a worker sends."""

Downward = (
    Welcome
    | Left
    | Evicted
    | Over
    | Paused
    | Met
    | Refused
    | Waiting
    | Go
    | Stop
    | Recall
    | GenerationOver
    | Published
    | Status
)
"""What the servers answer to a worker."""

Operator = StopRun | ChangeSettings | StatusQuery | EventsQuery
"""What an operator sends to the global server."""

Message = (
    Refused  # kind 0 in every version
    | WorkerHello
    | WorkerHelloReply
    | Join
    | NodeHello
    | Data
    | Request
    | Heartbeat
    | Probed
    | Completed
    | Failed
    | Pause
    | Leave
    | Left
    | Put
    | Get
    | NodeWelcome
    | NodeLeave
    | RunOver
    | StopRun
    | ChangeSettings
    | StatusQuery
    | Welcome
    | Waiting
    | Go
    | Stop
    | GenerationOver
    | Published
    | Status
    | Paused
    | Evicted
    | Recall
    | Over
    | EventsQuery
    | Events
    | GivenUp
    | Met
    | Copy
    | Meet
    | Moved
    | Dealt
)
"""Every message; its position is its kind on the wire."""

_CLASSES: tuple[type, ...] = get_args(Message)
_KINDS = {cls: kind for kind, cls in enumerate(_CLASSES)}
_SHORT_ARRAY = 0x90  # plus its length, up to 15: the first byte of an array in MessagePack
_LONG_ARRAY, _LONG_HEADER_NBYTES = b"\xdc", 3  # that of a longer one, and how many there are before its first element
_WITH_A_ROUND = (Go, Stop)
_GREETINGS = (WorkerHello, Join, NodeHello, EventsQuery)


def kind_of(frame: bytes) -> type | None:
    """Return the class of the message in ``frame`` without parsing it; None if it is unknown."""
    place = _LONG_HEADER_NBYTES if frame[:1] == _LONG_ARRAY else 1
    return _CLASSES[frame[place]] if len(frame) > place and frame[place] < len(_CLASSES) else None


def encode(message: Message) -> bytes:
    """Return ``message`` as one MessagePack frame."""
    cls: type = type(message)
    values = (_KINDS[cls], *values_of(cls)(message))
    if isinstance(message, _WITH_A_ROUND) and message.round is not None:
        # All members get the same round, so it is packed once: it may have thousands of members.
        parts = [_packed_round(v) if v is message.round else packed(v) for v in values]
        return bytes([_SHORT_ARRAY + len(parts)]) + b"".join(parts)
    return packed(values)


_last_round: tuple[Round | None, bytes] = (None, b"")


def _packed_round(round: Round) -> bytes:
    """Return the part of a frame that holds a round."""
    global _last_round
    if _last_round[0] is not round:
        _last_round = (round, packed(round))
    return _last_round[1]


def decode(frame: bytes) -> Message:
    """Return the message in ``frame``.

    Raises:
        VersionError: it is a greeting of another protocol version.
        ProtocolError: it is not one well-formed message.
    """
    if len(frame) > MAX_NBYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes, more than the {MAX_NBYTES} allowed")
    items = unpacked(frame)
    if type(items) is not tuple or not items or type(items[0]) is not int or not 0 <= items[0] < len(_CLASSES):
        raise ProtocolError("a frame that does not start with a known kind of message")
    cls = _CLASSES[items[0]]
    if cls in _GREETINGS and len(items) > 1 and type(items[1]) is int and items[1] != PROTOCOL:
        raise VersionError(items[1])
    message: Message = build(cls, items[1:])
    return message
