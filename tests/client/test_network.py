"""The address that tensors travel on is that of the route to the global server, whatever the host is called."""

import json
import os
import socket
import sys

import pytest

from benchmarks.testbed import Testbed
from lsgd.client.control.identity import interface_towards
from lsgd.errors import ConfigError
from tests import golden

ASK = """
import json, socket, sys
from lsgd.client.control.identity import interface_towards
found = interface_towards(sys.argv[1])
print(json.dumps([found.address, found.name, found.reason, socket.gethostbyname(socket.gethostname())]))
"""


def test_a_server_on_this_machine_is_reached_by_the_loopback() -> None:
    found = interface_towards("127.0.0.1")
    assert (found.address, found.name) == ("127.0.0.1", "lo")
    assert found.reason == golden.text("network.routes")
    assert interface_towards("127.0.1.1").name == "lo"
    assert interface_towards("localhost").name == "lo"


def test_the_host_name_is_not_looked_up(monkeypatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("the host name was looked up")

    monkeypatch.setattr(socket, "gethostname", refuse)
    monkeypatch.setattr(socket, "getfqdn", refuse)
    assert interface_towards("127.0.0.1").name == "lo"


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_ipv6() -> None:
    found = interface_towards("::1")
    assert (found.address, found.name) == ("::1", "lo")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "255.255.255.255"])
def test_a_server_that_cannot_be_reached(host) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("network.no_route", host=host)):
        interface_towards(host)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_host_whose_name_means_the_loopback_uses_the_interface_of_the_route() -> None:
    with Testbed(2, loopback_names=True) as testbed:
        answer = json.loads(testbed.hosts[1].run([sys.executable, "-c", ASK, testbed.hosts[0].address]))
    assert answer == [
        testbed.hosts[1].address,
        "eth0",
        golden.text("network.routes_to_host", address=testbed.hosts[0].address),
        "127.0.1.1",
    ]
