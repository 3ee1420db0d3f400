"""The lossless code of chunks: what comes out is what went in, weights get smaller, and no junk is believed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lsgd.client.iteration.packing import pack, unpack
from lsgd.errors import ProtocolError
from tests import golden


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


@given(chunks=st.lists(st.tuples(st.binary(min_size=1, max_size=60), st.sampled_from([1, 2, 4, 8])), max_size=4))
def test_chunks_come_back_as_they_were(chunks) -> None:
    tensors = [(torch.frombuffer(bytearray(data * size), dtype=torch.uint8), size) for data, size in chunks]
    code = b"".join(pack(data, size) for data, size in tensors)
    found = list(unpack(code, [(len(data), size) for data, size in tensors]))
    assert all(torch.equal(x, data) for x, (data, _) in zip(found, tensors, strict=True))


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 0.85), (torch.bfloat16, 0.7), (torch.float64, 0.95), (torch.bool, 0.15)]
)
def test_weights_get_smaller(dtype, share) -> None:
    torch.manual_seed(0)
    x = torch.randn(1 << 16).mul_(0.02).to(dtype)
    code = pack(raw(x), dtype.itemsize)
    assert len(code) < share * x.nbytes
    assert torch.equal(next(unpack(code, [(x.nbytes, dtype.itemsize)])), raw(x))


def test_noise_gets_only_a_header() -> None:
    torch.manual_seed(0)
    data = torch.randint(256, (1 << 14,), dtype=torch.uint8)
    assert len(pack(data, 4)) == len(data) + 4 * 4


@given(junk=st.binary(max_size=40))
def test_junk_is_refused_or_gives_the_right_size(junk) -> None:
    try:
        found = list(unpack(junk, [(8, 4)]))
    except ProtocolError:
        return
    assert [len(x) for x in found] == [8]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (b"\0", "ends too early"),
        (b"\0\0\0\0ab", golden.pattern("codecs.plane_of_4")),
        (b"\x03\0\0\0\xff\xff\xff", "cannot be decoded"),
        (b"\0\0\0\0abcdef", "2 bytes follow"),
    ],
)
def test_what_is_wrong_with_a_code_is_said(code, error) -> None:
    with pytest.raises(ProtocolError, match=error):
        list(unpack(code, [(4, 1)]))
