"""Addresses of hosts, and which address of this machine others reach it at."""

import socket
from typing import Any


def addresses_of(host: str, port: int | None = None, kind: int = socket.SOCK_STREAM) -> list[Any]:
    """Return what ``socket.getaddrinfo`` returns for a host.

    Raises:
        OSError: the host is unknown; also a text that can be no host's name, such as 10.0.0..1.
    """
    try:
        return socket.getaddrinfo(host, port, type=kind)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def address_towards(host: str) -> str:
    """Return the address of the interface that this machine's routes use to reach ``host``.

    This machine's host name plays no part, so it may resolve to 127.0.1.1.

    Raises:
        OSError: there is no route, or the host is unknown.
    """
    places = addresses_of(host, 9, socket.SOCK_DGRAM)
    family, *_, place = min(places, key=lambda found: found[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # a datagram socket sends nothing here; it only asks for the route
        return str(probe.getsockname()[0])


def has_address(address: str) -> bool:
    """Return whether a numeric address is one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
