"""A link with latency: passes packets between the TUN devices of several network namespaces, each after a while.

Started by :mod:`benchmarks.testbed` as ``python relay.py DELAY_MS PID...`` with the process ids of the hosts in the
order of their addresses; makes the device ``eth0`` in each and runs until its standard input closes. A packet goes to
the host whose number is the last part of its IPv4 destination, less one. A line ``cut 1`` on standard input loses every
packet to and from host 1 from then on, and ``mend 1`` ends that.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_LARGEST_PACKET_NBYTES = 65_535
_READS_PER_TURN = 16  # packets of one host before the others have their turn


def open_tun(pid: int) -> int:
    """Make the device ``eth0`` in the network namespace of ``pid`` and return its file, not blocking."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, target = (os.open(f"/proc/{owner}/ns/net", os.O_RDONLY) for owner in ("self", pid))
    if libc.setns(target, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the host's network namespace")
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)  # belongs to the namespace it is opened in
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(target)
    return tun


def pass_packets(tuns: Sequence[int], delay_s: float, orders: int) -> None:
    """Pass packets between ``tuns`` after ``delay_s`` seconds, but for hosts that are cut, until ``orders`` closes."""
    under_way: deque[tuple[float, int, bytes]] = deque()  # (when it arrives, where, the packet), in this order
    cut: set[int] = set()
    while True:
        timeout_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([orders, *tuns], [], [], timeout_s)
        if orders in ready:
            if not (lines := os.read(orders, 4096)):
                return
            for order, number in map(bytes.split, lines.splitlines()):
                (cut.add if order == b"cut" else cut.discard)(int(number))
        for index, tun in enumerate(tuns):
            if tun in ready:
                _read(tun, delay_s, deque() if index in cut else under_way)
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, host, packet = under_way.popleft()
            if host < len(tuns) and host not in cut:
                _write(tuns[host], packet)


def _read(tun: int, delay_s: float, under_way: deque[tuple[float, int, bytes]]) -> None:
    for _ in range(_READS_PER_TURN):
        try:
            packet = os.read(tun, _LARGEST_PACKET_NBYTES)
        except BlockingIOError:
            return
        if packet[0] >> 4 == 4 and packet[19]:
            under_way.append((time.monotonic() + delay_s, packet[19] - 1, packet))


def _write(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:
        return  # lost, as on any network: the receiver's device is down or its queue is full


def main() -> None:
    """Open a device for each host and pass packets until standard input closes."""
    delay_s = float(sys.argv[1]) / 1e3
    os.nice(-10)  # a late relay is a slower link than the one asked for
    tuns = [open_tun(int(pid)) for pid in sys.argv[2:]]
    print("ready", flush=True)
    pass_packets(tuns, delay_s, sys.stdin.fileno())


if __name__ == "__main__":
    main()
