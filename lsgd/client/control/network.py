"""Which of this machine's addresses tensors travel on."""

import socket
from dataclasses import dataclass

import psutil

from lsgd.errors import ConfigError


@dataclass(frozen=True)
class Interface:
    """An address of this machine, the interface that has it, and why it was chosen."""

    address: str
    name: str
    reason: str


def interface_towards(host: str) -> Interface:
    """Return the interface that this machine's routes use to reach ``host``.

    This machine's host name plays no part, so it may resolve to 127.0.1.1.

    Raises:
        ConfigError: there is no route.
    """
    try:
        places = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, *_, place = min(places, key=lambda found: found[0] != socket.AF_INET)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # a datagram socket sends nothing here; it only asks for the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no route to the global server at {host}: {error.strerror}") from None
    return Interface(address, _name_of(address), f"it routes to the global server at {host}")


def _name_of(address: str) -> str:
    """Return the name of the interface with ``address``; all of 127.0.0.0/8 is the loopback's."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in found):
            return str(name)
    return "lo" if address.startswith("127.") else "unknown"
