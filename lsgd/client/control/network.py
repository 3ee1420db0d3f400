"""Which of this machine's addresses the tensors travel on."""

import fcntl
import socket
import struct
from dataclasses import dataclass

from lsgd.errors import ConfigError

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    """An address of this machine, the interface that has it, and why it was chosen."""

    address: str
    name: str
    reason: str


def interface_towards(host: str) -> Interface:
    """Return the interface that this machine's routes use to reach ``host``.

    The host name of this machine plays no part, so one that resolves to 127.0.1.1 does no harm.

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
    name = _name_of_ipv6(address) if family == socket.AF_INET6 else _name_of(address)
    return Interface(address, name, f"it routes to the global server at {host}")


def _name_of(address: str) -> str:
    """Return the name of the interface with ``address``; all of 127.0.0.0/8 is the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo" if address.startswith("127.") else "unknown"


def _name_of_ipv6(address: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with open("/proc/net/if_inet6") as table:
        rows = [line.split() for line in table]
    return next((row[-1] for row in rows if row[0] == wanted), "unknown")
