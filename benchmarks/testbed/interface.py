"""What ``eth0``, the interface of a host of the testbed (benchmarks/testbed), has counted."""

import json
import subprocess
from typing import NamedTuple


class Counters(NamedTuple):
    """Since the host began. A segment of up to 64 KiB that passes whole is one packet, with one header."""

    received_nbytes: int
    received_packets: int
    sent_nbytes: int
    sent_packets: int


def counters(process: int | str = "self") -> Counters:
    """Return what the kernel has counted on the host of ``process``, an id; without one on this process's own."""
    with open(f"/proc/{process}/net/dev") as table:
        line = next(line for line in table if line.lstrip().startswith("eth0:"))
    numbers = [int(number) for number in line.partition(":")[2].split()]
    return Counters(numbers[0], numbers[1], numbers[8], numbers[9])


def sent_with_headers_nbytes() -> int:
    """Return the bytes behind the limit of the rate on this host, which has one, with the headers of every packet."""
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"], capture_output=True, check=True)
    return int(json.loads(shown.stdout)[0]["bytes"])
