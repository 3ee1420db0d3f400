"""What travels between the processes: every message survives the trip, and nothing else gets in."""

import dataclasses
import math
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.errors import ProtocolError
from lsgd.protocol import messages, wants
from lsgd.protocol.fields import MAX_ITEMS, build, values_of
from lsgd.protocol.messages import (
    MAX_NBYTES,
    PROTOCOL,
    Endpoint,
    EventsQuery,
    Generation,
    Go,
    Heartbeat,
    Join,
    Message,
    NodeHello,
    Refused,
    Request,
    Round,
    Term,
    VersionError,
    Welcome,
    WorkerHello,
    decode,
    encode,
    kind_of,
)
from tests import golden

from ..search import examples

CLASSES = typing.get_args(Message)
GREETINGS = (WorkerHello, Join, NodeHello, EventsQuery)

integers = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.text(max_size=20)
by_type: dict[Any, st.SearchStrategy[Any]] = {
    int: integers,
    float: st.floats(allow_nan=False),
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    float | None: st.none() | st.floats(allow_nan=False),
    dict[str, str]: st.dictionaries(texts, texts, max_size=4),
    dict[str, bytes]: st.dictionaries(texts, st.binary(max_size=20), max_size=4),
    dict[str, float]: st.dictionaries(texts, st.floats(allow_nan=False), max_size=4),
    tuple[str, ...]: st.lists(texts, max_size=4).map(tuple),
    tuple[bytes, ...]: st.lists(st.binary(max_size=20), max_size=4).map(tuple),
    tuple[int, ...]: st.lists(integers, max_size=4).map(tuple),
    tuple[int, ...] | None: st.none() | st.lists(integers, max_size=4).map(tuple),
}


def any_of(cls: type) -> st.SearchStrategy[Any]:
    """Return the instances of a message class, greetings of this protocol version only."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: by_type[hints[field.name]] for field in dataclasses.fields(cls)}
    if cls in GREETINGS:
        fields["protocol"] = st.just(PROTOCOL)
    return st.builds(cls, **fields)


by_type[tuple[Term, ...]] = st.lists(st.builds(Term, integers, integers), max_size=3).map(tuple)
by_type[Endpoint] = any_of(Endpoint)
by_type[tuple[Endpoint, ...]] = st.lists(any_of(Endpoint), max_size=3).map(tuple)
places = st.lists(st.tuples(integers, integers), max_size=4).map(sorted)
by_type[Generation] = st.builds(Generation.of, integers, places, texts)
by_type[Round] = any_of(Round)
by_type[Round | None] = st.none() | by_type[Round]
by_type[wants.Want] = st.one_of([any_of(cls) for cls in typing.get_args(wants.Want)])
any_message = st.one_of([any_of(cls) for cls in CLASSES])

JOIN = Join(PROTOCOL, "node0/worker1", 7, 0, 1, {"torch": "2.13.0"}, "digest", "two tensors", "", "10.0.0.1")
ROUND = Round(1, Generation.of(1, [(3, 0), (3, 2)], "tcp"), "global", 0, (0,), 0, (1,), 0, False, "{}")


def frame_of(message: Message, **changes: Any) -> bytes:
    """Return a message's frame with some of its fields replaced by anything at all."""
    kind, *values = msgpack.unpackb(encode(message))
    names = [field.name for field in dataclasses.fields(message)]
    for name, value in changes.items():
        values[names.index(name)] = value
    return msgpack.packb([kind, *values])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@examples(25)
def test_every_message_survives_the_trip(cls: type, data: st.DataObject) -> None:
    message = data.draw(any_of(cls))
    frame = encode(message)
    arrived = decode(frame)
    assert type(arrived) is cls and arrived == message
    assert kind_of(frame) is cls
    assert encode(arrived) == frame


def test_every_class_has_a_kind_and_refused_is_kind_0() -> None:
    assert {kind_of(bytes([0x91, kind])) for kind in range(len(CLASSES))} == set(CLASSES)
    assert encode(Refused("no")) == b"\x92\x00\xa2no"


@given(any_message, st.data())
@examples(400)
def test_a_mutated_frame_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame)))
        change = data.draw(st.sampled_from(["set", "cut", "insert", "copy"]))
        if change == "set" and place < len(frame):
            frame[place] = data.draw(st.integers(0, 255))
        elif change == "cut":
            del frame[place:]
        elif change == "insert":
            frame[place:place] = data.draw(st.binary(max_size=12))
        else:
            frame[place:place] = frame[: data.draw(st.integers(0, len(frame)))]
    _decodes_or_is_refused(bytes(frame))


@given(st.binary(max_size=200))
def test_noise_is_a_protocol_error_if_anything(frame: bytes) -> None:
    kind_of(frame)
    _decodes_or_is_refused(frame)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.integers(-1, len(CLASSES) + 1) | values, st.lists(values, max_size=12))
@examples(150)
def test_well_formed_nonsense_is_a_protocol_error_if_anything(kind: object, fields: list[object]) -> None:
    _decodes_or_is_refused(msgpack.packb([kind, *fields]))


def _decodes_or_is_refused(frame: bytes) -> None:
    try:
        message = decode(frame)
    except ProtocolError as error:
        assert str(error) and len(str(error)) < 400
    else:
        assert type(message) in CLASSES
        hints = typing.get_type_hints(type(message))
        for field in dataclasses.fields(message):
            value = getattr(message, field.name)
            if hints[field.name] in (int, float, str, bool, bytes):
                assert type(value) is hints[field.name]


WRONG: dict[Any, list[Any]] = {
    int: [1.0, True, "1", None, b"1", [1], 1 << 63],
    float: ["1", True, None, [1.0]],
    str: [1, b"text", None, ["a"]],
    bool: [0, 1, None, "true"],
    bytes: ["text", None, [1]],
    float | None: ["1", True, [None]],
    dict[str, str]: [[], None, "a", {"a": 1}, {b"a": "b"}],
    dict[str, float]: [[], None, "a", {"a": "1"}, {b"a": 1.0}, {"a": None}],
    tuple[str, ...]: ["a", {}, [1], None],
    tuple[int, ...]: [1, ["1"], [True], None],
    tuple[int, ...] | None: [1, ["1"], [True]],
    tuple[bytes, ...]: ["no", [1]],
    dict[str, bytes]: [[], None, {"a": "1"}, {b"a": b"1"}],
    tuple[Term, ...]: [1, [1], None],
    tuple[Endpoint, ...]: [1, [1], None],
    Endpoint: [None, 1, "a"],
    Generation: [None, 1, "a"],
    Round | None: [1, "a", {}],
    wants.Want: [None, 1, "a", [], [5], [-1], ["0"], [True]],
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@examples(5)
def test_no_field_takes_another_type(cls: type, data: st.DataObject) -> None:
    message = data.draw(any_of(cls))
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        for wrong in WRONG[hints[field.name]]:
            if field.name == "protocol" and type(wrong) is int:
                continue  # another version, with an error of its own
            with pytest.raises(ProtocolError, match=rf"^{cls.__name__}\.{field.name} cannot be a "):
                decode(frame_of(message, **{field.name: wrong}))


def test_a_wrong_field_deep_inside_is_named() -> None:
    go = Go(1, ROUND, 0.5)
    kind, seq, round, *rest = msgpack.unpackb(encode(go))
    round[1][1] = ["a", 2]
    with pytest.raises(ProtocolError, match=golden.pattern("messages.no_tuple")):
        decode(msgpack.packb([kind, seq, round, *rest]))
    with pytest.raises(ProtocolError, match=golden.pattern("messages.fields_2_of_14")):
        decode(msgpack.packb([kind, seq, round[:2], *rest]))


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_number_of_fields_is_exact(cls: type, change: int) -> None:
    kind = next(k for k in range(len(CLASSES)) if kind_of(bytes([0x91, k])) is cls)
    count = len(dataclasses.fields(cls)) + change
    if count < 0:
        return
    with pytest.raises(
        ProtocolError, match=golden.pattern("messages.fields", kind=cls.__name__, count=count, wanted=count - change)
    ):
        decode(msgpack.packb([kind, *[PROTOCOL] * count]))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "incomplete input"),
        (b"\xc1", "FormatError"),
        (b"\x92\x00", "incomplete input"),
        (b"\x92\x00\xa2no\x00", "extra data"),
        (b"\x92\x00\xa2\xff\xff", "invalid start byte"),
        (b"\xdd\xff\xff\xff\xff", "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "max_map_len"),
        (msgpack.packb([0, [[]] * (MAX_ITEMS + 1)]), "max_array_len"),
        (msgpack.packb([0, dict.fromkeys(map(str, range(MAX_ITEMS + 1)))]), "max_map_len"),
        (msgpack.packb([0, msgpack.ExtType(5, b"")]), "extension type 5"),
        (msgpack.packb([0, msgpack.ExtType(5, b"x")]), "max_ext_len"),
        (msgpack.packb([0, msgpack.Timestamp(1, 1)]), "max_ext_len"),
        (b"\x92\x00\xc7\x00\xff", "invalid timestamp data"),
        (msgpack.packb([0, {1: 2}]), "not allowed for map key"),
        (b"\x91" * 2000 + b"\x00", "StackError"),
        (b"\x93" + b"\x81" * 1100, ""),
    ],
)
def test_what_is_no_messagepack_of_ours_says_so(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=f"(?i)not MessagePack as this protocol uses it: .*{reason}"):
        decode(frame)


@pytest.mark.parametrize("items", [[], 0, None, "Refused", {}, [True], ["0"], [-1], [len(CLASSES)], [0.0], [[]]])
def test_a_frame_that_starts_with_no_kind(items: object) -> None:
    with pytest.raises(ProtocolError, match=golden.pattern("messages.unknown_kind")):
        decode(msgpack.packb(items))


@pytest.mark.parametrize("frame", [b"", b"\x91", b"\x91\xff"])
def test_kind_of_nothing(frame: bytes) -> None:
    assert kind_of(frame) is None


def test_size_is_capped_before_parsing() -> None:
    largest = encode(Refused("x" * (MAX_NBYTES - 7)))
    assert len(largest) == MAX_NBYTES and decode(largest)
    with pytest.raises(
        ProtocolError, match=golden.pattern("messages.too_long", nbytes=MAX_NBYTES + 1, limit=MAX_NBYTES)
    ):
        decode(largest + b"x")


def test_the_largest_generation_fits() -> None:
    generation = Generation.of(1, [(i // 8, i % 8) for i in range(MAX_ITEMS)], "nccl")
    go = Go(1, dataclasses.replace(ROUND, generation=generation), 0.0)
    assert decode(encode(go)) == go
    assert generation.members[-1] == "node8191/worker7" and generation.node_sizes == (8,) * 8192


@pytest.mark.parametrize(
    "change", [{"nodes": (1, 2)}, {"node_sizes": (3,)}, {"indices": (0,)}, {"nodes": (1, 2), "node_sizes": (-1, 3)}]
)
def test_a_generation_whose_numbers_do_not_agree_is_refused(change: dict[str, tuple[int, ...]]) -> None:
    kind, *fields = msgpack.unpackb(encode(Go(1, ROUND, 0.0)))
    wrong = {**dataclasses.asdict(ROUND.generation), **change}
    fields[1][1] = list(wrong.values())
    with pytest.raises(ProtocolError, match=r"^a generation of \d members"):
        decode(msgpack.packb([kind, *fields]))


@pytest.mark.parametrize("greeting", [JOIN, WorkerHello(PROTOCOL, 1), NodeHello(PROTOCOL, 0, 1, "host", "1.0")])
@pytest.mark.parametrize("version", [0, PROTOCOL + 1, -1, 1 << 40])
def test_another_version_is_told_apart_whatever_else_has_changed(greeting: Message, version: int) -> None:
    kind = msgpack.unpackb(encode(greeting))[0]
    with pytest.raises(VersionError, match=golden.pattern("messages.version", version=version, ours=PROTOCOL)) as e:
        decode(msgpack.packb([kind, version, "fields", ["of", "the", "future"]]))
    assert e.value.version == version


@pytest.mark.parametrize("depth", [1, 500, 990, 1000, 1020])
def test_a_version_that_is_no_number_is_just_wrong(depth: int) -> None:
    kind = encode(JOIN)[1]
    with pytest.raises(ProtocolError):
        decode(bytes([0x92, kind]) + b"\x91" * depth + b"\x01")


def test_only_greetings_speak_of_versions() -> None:
    assert decode(encode(Heartbeat("w", PROTOCOL + 5))) == Heartbeat("w", PROTOCOL + 5)
    assert kind_of(encode(Welcome("run", "{}", 0, 1, ()))) is Welcome


@pytest.mark.parametrize("loss", [math.inf, -math.inf, 5e-324, -0.0, 1.7e308])
def test_every_float_travels(loss: float) -> None:
    request = Request("w", 1, 1, 0, 0, 0, loss)
    arrived = decode(encode(request))
    assert isinstance(arrived, Request) and arrived.loss == loss
    assert math.copysign(1.0, arrived.loss) == math.copysign(1.0, loss)


def test_nan_travels_and_is_left_to_the_election() -> None:
    arrived = decode(encode(Request("w", 1, 1, 0, 0, 0, math.nan)))
    assert isinstance(arrived, Request) and arrived.loss is not None and math.isnan(arrived.loss)


def test_a_whole_number_is_a_float_too() -> None:
    request = decode(frame_of(Request("w", 1, 1, 0, 0, 0, 0.5), loss=3))
    assert isinstance(request, Request) and type(request.loss) is float and request.loss == 3.0


def test_nothing_of_the_module_is_left_out_of_this_test() -> None:
    declared = {
        value for value in vars(messages).values() if dataclasses.is_dataclass(value) and isinstance(value, type)
    }
    assert declared == {*CLASSES, Generation, Round, Term, Endpoint, messages.FromWorker}


def test_the_parts_of_the_data_count_those_who_take_no_part() -> None:
    generation = Generation.of(1, [(0, 1), (2, 0)], "tcp", others=[(1, 0), (0, 0)])
    assert [generation.part_of(rank) for rank in range(2)] == [(1, 4), (3, 4)]
    assert Generation.of(1, [(0, 0)], "tcp").part_of(0) == (0, 1)


def test_a_field_that_is_one_of_several_classes_is_a_number_and_the_fields_of_that_one() -> None:
    @dataclasses.dataclass(frozen=True)
    class Says:
        wants: wants.Want

    assert values_of(Says)(Says(wants.STEP)) == ((0,),)
    assert values_of(Says)(Says(wants.Call(3, {"val": 0.5}))) == ((4, 3, {"val": 0.5}, False),)
    assert build(Says, ((3,),)) == Says(wants.End())
