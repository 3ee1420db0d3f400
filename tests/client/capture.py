"""A packet capture on every interface of a host: ``python -m tests.client.capture PATTERN``, as root.

Says ``ready``, and at the end of its standard input how many bytes of TCP it has seen, and how many packets have the
pattern (hexadecimal), as JSON.
"""

import json
import os
import socket
import sys
import threading

ALL_PROTOCOLS = 3

pattern = bytes.fromhex(sys.argv[1])
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap:
    tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 27)  # SO_RCVBUFFORCE
    tap.settimeout(0.2)
    print("ready", flush=True)
    nbytes = found = 0
    while True:
        try:
            packet = tap.recv(1 << 17)
        except TimeoutError:
            if over.is_set():
                break
            continue
        nbytes += len(packet)
        found += pattern in packet
print(json.dumps([nbytes, found]), flush=True)
os._exit(0)
