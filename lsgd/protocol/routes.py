"""Which address of this machine others reach it at."""

import socket


def address_towards(host: str) -> str:
    """Return the address of the interface that this machine's routes use to reach ``host``.

    This machine's host name plays no part, so it may resolve to 127.0.1.1.

    Raises:
        OSError: there is no route, or the host is unknown.
    """
    places = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
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
