"""Strangers at the port for tensors: they are refused, the log says so, and the members go on."""

import logging
import socket
import ssl
from contextlib import suppress
from typing import Any

import pytest
import torch

from lsgd.client.groups import connections
from lsgd.client.groups.handshake import HELLO_NBYTES, Hello, context_of
from lsgd.client.groups.reach import Endpoint
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.protocol.credentials import run_certificate
from tests import golden

from ..integration.running import until
from ..speed import scaled
from .bench import CERTIFICATE
from .meshes import Network, all_at_once, members

REFUSED = golden.text("tcp.refused")


def ones(group: TcpGroup) -> float:
    x = torch.ones(1)
    group.all_reduce(x).wait()
    return x.item()


def is_closed(connection: socket.socket) -> bool:
    """Read whatever comes; whether the other end has closed the connection by then."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_strangers_are_refused_and_the_members_go_on(caplog, monkeypatch) -> None:
    monkeypatch.setattr(connections, "HELLO_WITHIN_S", 120.0)  # the idle ones make room before
    (first, second), store = members(2, [CERTIFICATE] * 2)
    first._mesh.from_(1)  # it listens
    endpoint = Endpoint.of(store.get("tcp/node0/worker0"))
    other = context_of(run_certificate(b"x" * 32, "run"), answers=False)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    idle = [socket.create_connection((endpoint.address, endpoint.port)) for _ in range(1000)]
    with caplog.at_level(logging.WARNING, logger="lsgd"):
        for context in (nobody, other):
            with socket.create_connection((endpoint.address, endpoint.port)) as raw, pytest.raises(ssl.SSLError):
                with context.wrap_socket(raw) as stranger:
                    stranger.sendall(b"x" * HELLO_NBYTES)
                    stranger.recv(1)
        with socket.create_connection((endpoint.address, endpoint.port), 20) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 200)
            with suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(1000)
        member = context_of(CERTIFICATE, answers=False)  # that does not know the nonce
        with member.wrap_socket(socket.create_connection((endpoint.address, endpoint.port), 20)) as knows:
            knows.sendall(Hello("run", 1, 1, 0).packed(b"x" * 16, 0))
            assert knows.recv(1) == b""
        work = lambda g: g.all_reduce(torch.ones(1)).wait() or True  # noqa: E731
        assert all_at_once([first, second], work) == [True, True]
    said = [record.getMessage() for record in caplog.records]
    assert all(golden.text("tcp.refused") in line for line in said)
    assert any("CERTIFICATE" in line for line in said) and any(golden.text("tcp.no_hello") in line for line in said)
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("certificate", [b"", CERTIFICATE], ids=["plain", "tls"])
def test_one_that_speaks_slowly_has_no_more_time_than_others(certificate, caplog, monkeypatch) -> None:
    monkeypatch.setattr(connections, "HELLO_WITHIN_S", 0.3)
    groups, store = members(2, [certificate] * 2)
    groups[0]._mesh.from_(1)
    endpoint = Endpoint.of(store.get("tcp/node0/worker0"))
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context_of(CERTIFICATE, answers=False).wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    said = outgoing.read() if certificate else Hello("run", 1, 1, 0).packed(endpoint.nonce, 0)
    with (
        caplog.at_level(logging.WARNING, logger="lsgd"),
        socket.create_connection((endpoint.address, endpoint.port)) as slow,
    ):
        until(lambda: groups[0]._mesh._service._greeting or caplog.records, "it is heard, or refused already")
        slow.settimeout(3 * connections.HELLO_WITHIN_S / len(said))  # at the end of its words it is too late
        for byte in said:
            with suppress(BrokenPipeError, ConnectionResetError):
                slow.send(bytes([byte]))
            if is_closed(slow):
                break
        slow.settimeout(scaled(20))
        assert is_closed(slow)
        until(lambda: caplog.records, "it is said")
        monkeypatch.setattr(connections, "HELLO_WITHIN_S", 20.0)
        assert all_at_once(groups, ones) == [2.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == [REFUSED + golden.text("tcp.nameless")]


class Recorder(Network):
    """A network that keeps what went to each end."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[tuple[str, int], bytearray]] = []

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        heard = bytearray()
        with suppress(OSError):  # it may be closed already
            self.heard.append((target.getpeername(), heard))

        class Tapped:
            def recv(self, nbytes: int) -> bytes:
                data = source.recv(nbytes)
                heard.extend(data)
                return data

            def shutdown(self, how: int) -> None:
                source.shutdown(how)

        tapped: Any = Tapped()
        super()._carry(tapped, target)


def test_what_somebody_has_recorded_is_of_no_use_to_him(caplog) -> None:
    network = Recorder()
    groups, _ = members(2, [CERTIFICATE] * 2, routes=network.routes)

    def work(group: TcpGroup) -> float:
        ones(group)
        if group.rank == 0:
            recorded = [
                (endpoint, bytes(data)) for endpoint, data in network.heard if data[5:6] == b"\x01"
            ]  # a client's hello
            assert len(recorded) == 2
            for endpoint, data in recorded:
                with socket.create_connection(endpoint, 20) as again:
                    with suppress(ConnectionResetError, BrokenPipeError):
                        again.sendall(data)
                    assert is_closed(again)
        return ones(group)

    with caplog.at_level(logging.WARNING, logger="lsgd"):
        assert all_at_once(groups, work) == [2.0, 2.0]
    network.close()
    said = [record.getMessage() for record in caplog.records]
    assert said and all(line.startswith(REFUSED + "[SSL") for line in said), said
