"""A stranger without a key: connects to ports, and sends garbage or nothing. Started by benchmarks/soak."""

import argparse
import contextlib
import random
import resource
import socket
import time

CONNECT_WITHIN_S = 0.5
GARBAGE_PERIOD_S = 0.002
MOST_IDLE = 2400
"""Connections that are open at the same time: half of them are more than a process with the usual limit may have."""

BEGINNINGS = (
    b"",
    b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15),
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(64),
)


def connect(address: str) -> socket.socket | None:
    """Return a connection; None where nobody listens any more."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        return socket.create_connection((host, int(port)), timeout=CONNECT_WITHIN_S)
    return None


def send_garbage(addresses: list[str], until: float, chance: random.Random) -> int:
    """Connect to each in turn, send something that nobody understands, and close; return how often."""
    made = 0
    while time.monotonic() < until:
        for address in addresses:
            if connection := connect(address):
                made += 1
                with connection, contextlib.suppress(OSError):
                    connection.sendall(chance.choice(BEGINNINGS) + chance.randbytes(chance.randrange(2000)))
            time.sleep(GARBAGE_PERIOD_S)
    return made


def stay_idle(addresses: list[str], until: float) -> int:
    """Open connections that say nothing, as many as there may be; return how many were made."""
    made = 0
    held: list[socket.socket] = []
    while time.monotonic() < until:
        for address in addresses:
            if len(held) < MOST_IDLE and (connection := connect(address)):
                made += 1
                held.append(connection)
        if len(held) >= MOST_IDLE:
            held.pop(0).close()  # the server may have closed it long ago
        if len(held) >= MOST_IDLE - 1 or not held:
            time.sleep(0.1)
    for connection in held:
        connection.close()
    return made


def main() -> None:
    """Do it for some seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("garbage", "idle"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("addresses", nargs="*", help="HOST:PORT")
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    until = time.monotonic() + given.seconds
    if given.how == "idle":
        made = stay_idle(given.addresses, until)
    else:
        made = send_garbage(given.addresses, until, random.Random(given.seed))
    print(f"{made} connections to {len(set(given.addresses))} ports")


if __name__ == "__main__":
    main()
