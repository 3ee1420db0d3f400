"""How several frames travel in one part of a ZeroMQ message, and how a machine calls itself."""

import os
import sys

import msgpack
import pytest

from benchmarks.testbed import Testbed
from lsgd.errors import ProtocolError
from lsgd.protocol.fields import MAX_ITEMS
from lsgd.protocol.frames import PACKED, pack, unpack
from lsgd.protocol.messages import MAX_NBYTES, Heartbeat, decode, encode
from lsgd.protocol.sockets import MAX_PARTS, Connector, Listener, wait_for

FRAME = encode(Heartbeat("node0/worker0", 7))


def test_a_frame_alone_travels_as_it_is():
    assert pack([FRAME]) == [FRAME]
    assert pack([]) == []


@pytest.mark.parametrize("frames", [[b"", FRAME], [FRAME] * 40, [b"7", FRAME, b"", b"\x00\xc1", FRAME[:3]]])
def test_several_travel_in_one_part_and_come_out_as_they_were(frames):
    (part,) = pack(frames)
    assert unpack([part]) == frames


def test_no_part_is_longer_than_a_frame_may_be():
    frames = [
        bytes([i]) * nbytes for i, nbytes in enumerate((MAX_NBYTES // 2 - 9, MAX_NBYTES // 2 - 9, 1, MAX_NBYTES, 5, 6))
    ]
    parts = pack(frames)
    assert [len(unpack([part])) for part in parts] == [2, 1, 1, 2]
    assert max(map(len, parts)) == MAX_NBYTES
    assert unpack(parts) == frames


def test_no_part_has_more_frames_than_are_taken_out():
    frames = [b""] * (MAX_ITEMS + 1)
    assert len(pack(frames)) == 2
    assert unpack(pack(frames)) == frames


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        msgpack.packb(7),
        msgpack.packb([b"7", "text"]),
        msgpack.packb([b"7", [b"8"]]),
        msgpack.packb([b"7", PACKED + msgpack.packb([b"8", FRAME])]),
        msgpack.packb({b"7": b"8"}),
        msgpack.packb([b"7", FRAME])[:-1],
        msgpack.packb([b"7", FRAME]) + b"\x00",
        b"\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\xc4\x00" * (MAX_ITEMS + 1),
        b"\x91" * 100_000,
        b"\xc1",
    ],
)
def test_what_is_packed_wrongly_is_a_frame_that_no_message_is_made_of(packed):
    assert unpack([FRAME, PACKED + packed]) == [FRAME, PACKED + packed]
    with pytest.raises(ProtocolError):
        decode(PACKED + packed)


@pytest.mark.parametrize(
    ("address", "typed"), [("ipc://{}/socket", ""), ("tcp://[::1]:0", "[::1]"), ("tcp://[::1]:0", "::1")]
)
def test_frames_go_both_ways_between_sockets(tmp_path, address, typed):
    there, back = [FRAME, b"", FRAME[:5]], [b"7", FRAME] * 300
    listener = Listener(address.format(tmp_path))
    with listener, Connector(listener.address.replace("[::1]", typed), b"node0#1") as link:
        while not link.send(there):
            wait_for(0.01, link)
        wait_for(5, listener)
        assert list(listener.receive()) == [(b"node0#1", there)]
        assert listener.send(b"node0#1", back)
        wait_for(5, link)
        assert list(link.receive()) == [back]


def test_a_message_of_more_parts_than_a_turn_takes_is_read_on_in_the_next(tmp_path):
    parts = [b"%d" % number for number in range(MAX_PARTS + 500)]
    with Listener(f"ipc://{tmp_path}/socket") as listener, Connector(listener.address, b"node0#1") as link:
        while not link.send([FRAME]):
            wait_for(0.01, link)
        link._socket.send_multipart(parts)
        got, turns = [], 0
        while len(got) < len(parts) + 1:
            wait_for(5, listener)
            frames = [frame for _, frames in listener.receive() for frame in frames]
            turns += any(frame in parts for frame in frames)
            got += frames
        assert got == [FRAME, *parts]
        assert turns > 1 and not listener.waiting


CALLS_ITS_OWN_MACHINE = """
import socket, sys
from lsgd.protocol.sockets import Connector

from ..speed import scaled
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("47400 47401")  # whoever calls gets the server's port
with Connector(f"tcp://{sys.argv[1]}:47400", b"node0#1"):
    for _ in range(40):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((sys.argv[1], 47400))
            server.listen()
            server.settimeout(scaled(30.0))
            server.accept()[0].close()
print("it listened each time")
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_who_calls_its_own_machine_before_somebody_listens_never_takes_the_port() -> None:
    with Testbed(1) as testbed:
        (host,) = testbed.hosts
        for address in (host.address, "127.0.0.1"):
            assert host.run([sys.executable, "-c", CALLS_ITS_OWN_MACHINE, address]) == "it listened each time\n"
