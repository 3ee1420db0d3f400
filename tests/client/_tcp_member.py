"""A member of a group over TCP on a host: ``python -m tests.client._tcp_member RANK STORE ADDRESS tls|plain PATTERN``.

It sends 1 MB in which the pattern comes again and again, and gets the same from the other one.
"""

import datetime
import sys

import torch
from torch._C._distributed_c10d import TCPStore

from lsgd.client.groups.base import Members
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.protocol.credentials import run_certificate

rank, master, address, kind, pattern = int(sys.argv[1]), *sys.argv[2:5], bytes.fromhex(sys.argv[5])
within = datetime.timedelta(seconds=30)
store = TCPStore(master, 29500, is_master=rank == 0, wait_for_workers=False, timeout=within)
certificate = run_certificate(b"s" * 32, "run") if kind == "tls" else b""
names = ["node0/worker0", "node1/worker0"]
group = TcpGroup(Mesh("run", 1, rank, names, address, store, certificate, 30.0), Members.apart(names, rank), 30.0)
data = torch.frombuffer(bytearray(pattern * (1_000_000 // len(pattern))), dtype=torch.uint8)
received = torch.empty_like(data)
group.exchange({1 - rank: data}, {1 - rank: received})
assert received.equal(data)
if rank:
    store.wait(["done0"], within)
store.set(f"done{rank}", "")
if not rank:
    store.wait(["done1"], within)  # the store ends with this process: the other one asks it nothing more
group.close()
