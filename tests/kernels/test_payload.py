"""The payload as bytes: what it looks like, and what is done with bytes that are none."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lsgd.errors import ConfigError, ProtocolError
from lsgd.kernels import Layout, NonFiniteError, Quantized, dequantize, payload_nbytes, quantize

from ..search import examples

X = torch.linspace(-3, 5, 5000)
WHOLE = bytes(quantize(X, block=1000).payload.tolist())


def tensor(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def with_field(offset, form, value):
    content = bytearray(WHOLE)
    struct.pack_into(form, content, offset, value)
    return tensor(content)


def test_bytes_of_a_small_payload():
    payload = quantize(torch.tensor([0.0, 255.0, 128.0, 7.0]), block=2).payload
    header = b"LSGD" + bytes([2, 0, 0, 0]) + struct.pack("<QII8s", 4, 2, 0, b"minmax8")
    scales = struct.pack("<4f", 0, 1, 7, 121 / 255)
    assert bytes(payload.tolist()) == header + scales + bytes([0, 255, 255, 0]) + bytes(12)


@pytest.mark.parametrize(
    ("numel", "block", "nbytes"),
    [
        (0, 2048, 32),
        (0, None, 32),
        (1, None, 32 + 16 + 16),
        (2048, 2048, 32 + 16 + 2048),
        (2049, 2048, 32 + 16 + 2064),
        (10**12, 2048, 32 + 8 * 488281250 + 10**12),
    ],
)
def test_payload_nbytes(numel, block, nbytes):
    assert payload_nbytes(numel, block=block) == nbytes
    assert payload_nbytes(numel, block=block, dtype=torch.float16) == nbytes


def test_a_payload_says_what_it_is():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q = quantize(X.to(dtype), block=None)
        assert Quantized.from_payload(q.payload.clone()).layout == Layout(5000, None, dtype) == q.layout
        assert dequantize(q).dtype == dtype


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 64, len(WHOLE) - 16, len(WHOLE) - 1])
def test_truncated(kept):
    with pytest.raises(ProtocolError, match="bytes"):
        Quantized.from_payload(tensor(WHOLE[:kept]))


def test_too_long():
    with pytest.raises(ProtocolError, match="bytes came"):
        Quantized.from_payload(tensor(WHOLE + bytes(16)))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (with_field(0, "<4s", b"PK\x03\x04"), "begins with"),
        (with_field(4, "<B", 1), "version 1"),
        (with_field(5, "<B", 3), "does not define"),
        (with_field(6, "<H", 1), "does not define"),
        (with_field(8, "<Q", 5001 + 2**20), "bytes came"),
        (with_field(8, "<Q", 2**64 - 1), "bytes came"),
        (with_field(16, "<I", 1), "bytes came"),
        (with_field(16, "<I", 2**32 - 1), "does not define"),
        (with_field(20, "<I", 2), "does not define"),
        (with_field(24, "<Q", 1), "does not define"),
        (with_field(24, "<8s", b"float16"), "codec float16, but minmax8 is expected"),
    ],
)
def test_headers_that_lie(payload, message):
    with pytest.raises(ProtocolError, match=message):
        Quantized.from_payload(payload)


def test_layout_that_was_agreed_on():
    layout = Layout(5000, 1000)
    assert Quantized.from_payload(tensor(WHOLE), layout=layout).layout == layout
    with pytest.raises(ProtocolError, match="expected"):
        Quantized.from_payload(tensor(WHOLE), layout=Layout(5000, 1001))


@given(st.binary(max_size=200) | st.integers(0, 255).map(lambda n: WHOLE[:32] + bytes(n)))
@examples(300)
def test_any_bytes_decode_or_are_refused(content):
    try:
        q = Quantized.from_payload(tensor(content))
    except ProtocolError:
        return
    assert dequantize(q).numel() == q.numel


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
@examples(300)
def test_flipped_bytes_decode_or_are_refused(changes):
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    try:
        q = Quantized.from_payload(tensor(content))
    except ProtocolError:
        return
    assert dequantize(q).numel() == q.numel


def test_tensors_that_cannot_hold_a_payload():
    room = torch.zeros(len(WHOLE) + 16, dtype=torch.uint8)
    for payload in (room.to(torch.int8), room.view(2, -1), room[::2], room[1:]):
        with pytest.raises(ConfigError, match="payload must"):
            Quantized.from_payload(payload)


def test_check_names_the_tensor():
    q = quantize(torch.tensor([1.0, float("inf")]))
    assert int(q.flags) == 1
    with pytest.raises(NonFiniteError, match=r"layer1\.weight has NaN or Inf"):
        q.check("layer1.weight")
    fine = quantize(X)
    fine.check("layer1.weight")
    fine.payload[4] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        fine.check("layer1.weight")


def test_flag_is_cleared_when_a_payload_is_written_again():
    q = quantize(torch.full((10,), float("nan")))
    again = quantize(torch.zeros(10), out=q)
    assert again.payload is q.payload
    assert int(again.flags) == 0


@pytest.mark.parametrize("wrong", [{"numel": -1}, {"block": 0}, {"block": 2**31}, {"dtype": torch.float64}])
def test_layouts_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Layout(**{"numel": 1, **wrong})
