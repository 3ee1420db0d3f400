"""The payload of minmax8 as bytes: what it looks like, and what is done with bytes that are none."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lsgd.codecs.base import flags_of
from lsgd.codecs.minmax import MinMax8
from lsgd.errors import ConfigError, ProtocolError

from ..search import examples


def encoded(x, block=2048):
    payload = MinMax8(block).empty(x.numel(), x.device)
    MinMax8(block).encode(x, payload)
    return payload


def decoded(payload, numel=5000, block=1000):
    out = torch.empty(numel)
    MinMax8(block).decode(payload, out)
    return out


X = torch.linspace(-3, 5, 5000)
WHOLE = bytes(encoded(X, 1000).tolist())


def tensor(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def with_field(offset, form, value):
    content = bytearray(WHOLE)
    struct.pack_into(form, content, offset, value)
    return tensor(content)


def test_bytes_of_a_small_payload():
    payload = encoded(torch.tensor([0.0, 255.0, 128.0, 7.0]), 2)
    header = b"LSGD" + bytes([2, 0, 0, 0]) + struct.pack("<QII8s", 4, 2, 0, b"minmax8")
    scales = struct.pack("<4f", 0, 1, 7, 121 / 255)
    assert bytes(payload.tolist()) == header + scales + bytes([0, 255, 255, 0]) + bytes(12)


@pytest.mark.parametrize(
    ("numel", "block", "nbytes"),
    [
        (0, 2048, 32),
        (0, 0, 32),
        (1, 0, 32 + 16 + 16),
        (2048, 2048, 32 + 16 + 2048),
        (2049, 2048, 32 + 16 + 2064),
        (10**12, 2048, 32 + 8 * 488281250 + 10**12),
    ],
)
def test_payload_nbytes(numel, block, nbytes):
    assert MinMax8(block).nbytes(numel) == nbytes


def test_a_payload_says_what_it_is():
    for code, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        header = encoded(X.to(dtype), 0)[:32]
        assert bytes(header.tolist()) == struct.pack("<4sBBHQII8s", b"LSGD", 2, code, 0, 5000, 0, 0, b"minmax8")


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 64, len(WHOLE) - 16, len(WHOLE) - 1])
def test_truncated(kept):
    with pytest.raises(ProtocolError, match="bytes"):
        decoded(tensor(WHOLE[:kept]))


def test_too_long():
    with pytest.raises(ProtocolError, match="bytes came"):
        decoded(tensor(WHOLE + bytes(16)))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (with_field(0, "<4s", b"PK\x03\x04"), "begins with"),
        (with_field(4, "<B", 1), "version 1"),
        (with_field(6, "<H", 1), "parameters 1000, 1, but .* were expected"),
        (with_field(8, "<Q", 5001 + 2**20), "has 1053577 elements"),
        (with_field(8, "<Q", 2**64 - 1), "has 18446744073709551615 elements"),
        (with_field(16, "<I", 1), "parameters 1, 0, but .* were expected"),
        (with_field(16, "<I", 2**32 - 1), "parameters 4294967295, 0, but .* were expected"),
        (with_field(24, "<Q", 1), "does not define"),
        (with_field(24, "<8s", b"float16"), "in float16 .* but 5000 elements in minmax8 .* were expected"),
    ],
)
def test_headers_that_lie(payload, message):
    with pytest.raises(ProtocolError, match=message):
        decoded(payload)


def test_layout_that_was_agreed_on():
    assert (decoded(tensor(WHOLE)) - X).abs().max() < 0.01
    with pytest.raises(ProtocolError, match="expected"):
        decoded(tensor(WHOLE), block=1001)


@given(st.binary(max_size=200) | st.integers(0, 255).map(lambda n: WHOLE[:32] + bytes(n)), st.integers(0, 200))
@examples(300)
def test_any_bytes_decode_or_are_refused(content, numel):
    try:
        decoded(tensor(content), numel)
    except ProtocolError:
        return
    assert len(content) == MinMax8(1000).nbytes(numel)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
@examples(300)
def test_flipped_bytes_decode_or_are_refused(changes):
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    try:
        decoded(tensor(content))
    except ProtocolError:
        return
    same = (slice(0, 5), slice(6, 20), slice(24, 32))  # dtype and flags do not matter
    assert all(content[part] == WHOLE[part] for part in same)


def test_tensors_that_cannot_hold_a_payload():
    room = torch.zeros(len(WHOLE) + 16, dtype=torch.uint8)
    for payload in (room.to(torch.int8), room.view(2, -1), room[::2], room[1:]):
        with pytest.raises(ConfigError, match="payload must"):
            decoded(payload)


def test_flag_is_cleared_when_a_payload_is_written_again():
    payload = encoded(torch.full((10,), float("nan")))
    assert int(flags_of(payload)) == 1
    MinMax8().encode(torch.zeros(10), payload)
    assert int(flags_of(payload)) == 0
