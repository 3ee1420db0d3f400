"""A port that is held until its server listens, and the name of the process that has one."""

import os
import socket
import struct
import subprocess
import sys

import pytest
import zmq

from lsgd.errors import ConfigError
from lsgd.protocol.ports import DEFAULT_PORT, everywhere, hold, hold_or_any, port_of, user_of
from lsgd.protocol.sockets import Listener
from lsgd.server.relay import Relay
from tests import golden

IP_LOCAL_PORT_RANGE = 51
LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_the_default_port_is_none_that_a_system_hands_out() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first, _ = map(int, file.read().split())
    assert DEFAULT_PORT + 1 < min(first, 30_000)
    with pytest.raises(OSError, match="not found"):
        socket.getservbyport(DEFAULT_PORT)


@pytest.mark.parametrize("ip", ["127.0.0.1", "0.0.0.0", everywhere()])
def test_a_held_port_is_its_servers_alone(ip) -> None:
    with hold(ip) as held:
        port = port_of(held)
        with hold_or_any("127.0.0.1", port) as other, socket.socket() as another:
            assert port_of(other) != port
            with pytest.raises(OSError, match="Address already in use"):
                another.bind(("127.0.0.1", port))  # like a system that looks for a port for somebody
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        for _ in range(2):  # a server that is started again, too
            with (
                Listener(f"tcp://127.0.0.1:{port}"),
                pytest.raises(ConfigError, match=golden.pattern("ports.taken", port=port)),
            ):
                hold("127.0.0.1", port)
    with hold_or_any("127.0.0.1", port) as held:
        assert port_of(held) == port


def test_a_connection_never_gets_a_held_port() -> None:
    with hold("127.0.0.1") as held, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as caller:
        only = struct.pack("=HH", port_of(held), port_of(held))
        try:
            caller.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("Linux cannot choose the ports of one socket before 6.3")
        with pytest.raises(OSError, match="Cannot assign requested address"):
            caller.connect(server.getsockname())


def test_a_refusal_names_the_process_that_has_the_port() -> None:
    command = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        port = int(process.stdout.readline())
        with pytest.raises(ConfigError, match=golden.pattern("ports.port_taken", port=port, pid=process.pid)):
            hold("127.0.0.1", port)
        with pytest.raises(ConfigError, match=golden.pattern("ports.address_taken", port=port, pid=process.pid)):
            Listener(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=golden.pattern("ports.relay_port", port=port, pid=process.pid)):
            Relay("127.0.0.1", port, b"")
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert user_of("127.0.0.1", connection.getsockname()[1]) == golden.text(
                "ports.own_connection", pid=os.getpid()
            )
    with hold("127.0.0.1", port):
        assert user_of("127.0.0.1", port).startswith(golden.text("ports.not_listening"))


def test_a_socket_in_use_is_named_after_its_server(tmp_path) -> None:
    context = zmq.Context()
    with context, context.socket(zmq.ROUTER) as other:
        other.bind(f"ipc://{tmp_path}/s")
        with pytest.raises(ConfigError, match=golden.pattern("ports.own_listener", pid=os.getpid(), path=tmp_path)):
            Listener(f"ipc://{tmp_path}/s")
