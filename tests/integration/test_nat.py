"""Nodes behind NAT: two homes, each behind a router that forwards nothing inwards, and a machine that all can reach."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Testbed
from lsgd.algorithms import ALGORITHMS
from lsgd.server.reasons import Why
from tests import golden

from ..needs import needs_nat
from .running import SCRIPTS, Fork, until
from .test_partition import Operator
from .test_two_nodes import finish, start

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    needs_nat(),
    pytest.mark.timeout(300),
]

NODES = 3
LOCKSTEP = (("bytegrad", 12), ("decentralized", 12), ("allreduce", 24))
"""Their numbers do not depend on who is faster: what each worker has after each iteration is known."""

OTHERS = tuple(name for name in ALGORITHMS if name not in dict(LOCKSTEP))
PERIODS = {"leader": ["period = 4", "local_period = 4"], "low_precision_decentralized": [], "qsgd": []}

FLIPS = """
import contextlib, socket, sys, threading
listener = socket.create_server(("", 47999))
print("listening", flush=True)
flipped = threading.Event()
def carry(source, target):
    passed = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(1 << 16)):
            if passed <= 20_000 < passed + len(data) and not flipped.is_set():
                flipped.set()
                data[20_000 - passed] ^= 1
                print("flipped", flush=True)
            passed += len(data)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
while True:
    one, _ = listener.accept()
    other = socket.create_connection((sys.argv[1], 27401))
    for ends in ((one, other), (other, one)):
        threading.Thread(target=carry, args=ends, daemon=True).start()
"""
"""In the place of the relay: passes everything on to it, but for one bit of one connection."""


def begin(
    testbed: Testbed, folder: Path, phases: tuple[tuple[str, int], ...], *run: str, workers: int = 1, script: str = ""
) -> list[Fork]:
    """Start ``steady.py`` on all hosts, with these algorithms one after the other, each for so many iterations.

    ``workers``: on each host; ``script``: an argument of its.
    """
    folder.mkdir(exist_ok=True)
    plan = folder / "plan.toml"
    nodes = len(testbed.hosts)
    in_all = nodes * workers
    lines = [f"iterations = {in_all * sum(iterations for _, iterations in phases)}", "exchange_timeout_s = 20", *run]
    for name, iterations in phases:
        lines += ["[[phase]]", f'name = "{name}"', *PERIODS.get(name, ["period = 4"] if name in OTHERS else [])]
        lines += [f"iterations = {in_all * iterations}"] * (name != phases[-1][0])
    plan.write_text("\n".join(lines))
    settings = {"NUM_GROUPS": str(nodes), "NUM_WORKERS": str(workers), "PLAN": str(plan)}
    command = [str(SCRIPTS / "steady.py"), *script.split()]
    return [start(host, folder, *command, **settings) for host in testbed.hosts]


def consensus(folder: Path) -> str:
    """Return the digest of the model that all have in the end."""
    (found,) = {(folder / f"node{node}" / f"node{node}-worker0.model").read_text() for node in range(NODES)}
    return found


def digests(folder: Path, node: int, index: int = 0) -> list[str]:
    return (folder / f"node{node}" / f"node{node}-worker{index}.digests").read_text().split()


@pytest.fixture(scope="module")
def unobstructed(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What each worker has after each iteration where every node reaches every other."""
    folder = tmp_path_factory.mktemp("tcp")
    with Testbed(NODES) as testbed:
        finish(begin(testbed, folder, LOCKSTEP, 'transport = "tcp"'))
    assert "relay" not in (folder / "node0" / "global.log").read_text()
    return [digests(folder, node) for node in range(NODES)]


def relay_on(host: Host) -> int:
    """Return the id of the relay's process as this machine has it."""
    (pid,) = until(
        lambda: [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if is_relay(entry, host)],
        "there is a relay",
    )
    return pid


def is_relay(process: Path, host: Host) -> bool:
    try:
        on_host = os.readlink(process / "ns/net") == os.readlink(f"/proc/{host.pid}/ns/net")
        return on_host and b"\0--relay\0" in (process / "cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return False


def test_two_homes_and_a_server_train_and_a_relay_that_dies_is_started_again(tmp_path: Path, unobstructed) -> None:
    """With all algorithms; and with a global server that reaches them though they reach each other not."""
    with Testbed(NODES, behind_nat=[1, 2]) as testbed:
        operator = Operator(testbed.hosts[0], tmp_path / "keys")
        processes = begin(testbed, tmp_path, (*LOCKSTEP, *((name, 16) for name in OTHERS)))
        operator.finds_the_server()
        until(lambda: operator.status()["ways"], "the nodes have tried each other")
        shown = operator.lsgd("status")
        lockstep = sum(iterations for _, iterations in LOCKSTEP)
        until(lambda: len(digests(tmp_path, 0)) > lockstep + 8, "it is in the phases without lockstep")
        os.kill(relay_on(testbed.hosts[0]), signal.SIGKILL)
        outputs = finish(processes)
    assert json.loads((tmp_path / "node0" / "result.json").read_text())["ways"] == [
        {"nodes": [0, 1], "way": golden.text("links.dialled_by", node="node1")},
        {"nodes": [0, 2], "way": golden.text("links.dialled_by", node="node2")},
        {"nodes": [1, 2], "way": "through the relay"},
    ]
    assert golden.text("links.through_relay") in shown
    said = outputs[0]
    assert Why.RELAYED(pairs="node1 and node2", more="") in said
    assert golden.text("links.relay_killed") in said and "restarting it in 1 s" in said
    assert "evicted" not in said
    for node, expected in enumerate(unobstructed):
        assert digests(tmp_path, node)[: len(expected)] == expected
    assert consensus(tmp_path)
    assert not [line for line in said.splitlines() if "[relay]" in line and "refused" in line]


def test_what_a_relay_changes_is_noticed_and_sent_again(tmp_path: Path, unobstructed) -> None:
    with Testbed(NODES, behind_nat=[1, 2]) as testbed:
        public = testbed.hosts[0]
        flips = public.popen([sys.executable, "-c", FLIPS, public.address], stdout=subprocess.PIPE, text=True)
        assert flips.stdout and flips.stdout.readline() == "listening\n"
        rule = "type nat hook prerouting priority -100; tcp dport 27401 redirect to :47999;"
        public.run(["nft", f"table ip nat {{\nchain prerouting {{ {rule} }}\n}}"])
        outputs = finish(begin(testbed, tmp_path, LOCKSTEP))
        assert flips.stdout.readline() == "flipped\n"
    assert any(
        golden.text("links.changed_on_the_way") in output and "bad record mac" in output.lower() for output in outputs
    )
    assert not re.findall(r"round \d+ failed: .*", outputs[0])
    for node, expected in enumerate(unobstructed):
        assert digests(tmp_path, node) == expected


def test_groups_inside_nodes_and_connections_through_nat_between_them_change_no_bit(tmp_path: Path) -> None:
    """With Gloo in the place of NCCL, which would cross no NAT; workers inside a node have the same bits either way."""
    phases, found = LOCKSTEP[:2], []
    for name, hidden, *run in (("tcp", (), 'transport = "tcp"'), ("auto", (1,))):
        with Testbed(2, behind_nat=hidden) as testbed:
            outputs = finish(begin(testbed, tmp_path / name, phases, *run, workers=2, script="--like-nccl"))
        found.append([digests(tmp_path / name, node, index) for node in range(2) for index in range(2)])
    assert golden.text("links.nccl_inside") in outputs[0]
    assert golden.text("links.gloo_inside") in outputs[1]
    assert found[0] == found[1]
