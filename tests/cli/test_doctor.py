"""``lsgd doctor``: two nodes on this machine, two on a link of a known rate, and what it says of what is wrong."""

import asyncio
import itertools
import os
import re
import socket
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.testbed import Testbed
from lsgd.cli import doctor
from lsgd.cli.doctor import Doctor
from lsgd.node.place import Place
from tests import golden

from ..integration.running import FORKS, free_port
from ..needs import needs_nat
from ..speed import scaled


@pytest.fixture
def port() -> int:
    return free_port()


def examine(node: int, nodes: int, port: int) -> tuple[int, str]:
    lines: list[str] = []
    code = Doctor(Place(node, nodes, "127.0.0.1"), port, lines.append).examine(1_000_000, 10.0)
    return code, "\n".join(lines)


def test_two_nodes_that_can_train_together(port) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda node: examine(node, 2, port), range(2)))
    for node, (code, said) in enumerate(results):
        assert code == 0, said
        assert (golden.text("doctor.is_free") in said) is (node == 0)
        assert re.search(golden.pattern("doctor.link_forth"), said)
        assert re.search(golden.pattern("doctor.link_of", one="node1", other="node0"), said)
        assert re.search(golden.pattern("doctor.all_reduce"), said)
        assert re.search(golden.pattern("doctor.period_hint"), said)
        assert said.endswith(golden.text("doctor.ready"))


def test_one_node_alone(port) -> None:
    code, said = examine(0, 1, port)
    assert code == 0 and golden.text("doctor.no_link") in said and golden.text("doctor.tensors_on") in said


def test_a_node_that_is_missing(port, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "MEET_WITHIN_S", 0.5)
    code, said = examine(0, 2, port)
    assert code == 1 and golden.text("doctor.not_met", port=port) in said


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        code, said = examine(0, 2, taken)
    assert code == 1 and golden.text("doctor.port_taken", taken=taken) in said


def test_a_link_that_is_closed_and_other_software(port, monkeypatch) -> None:
    minor = defaultdict(itertools.count(12).__next__)  # a node is a thread here, and each has a release of its own
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": f"2.{minor[threading.get_ident()]}.0"})
    monkeypatch.setattr(doctor, "CONNECT_WITHIN_S", 0.5)

    async def closed(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(asyncio, "open_connection", closed)
    with socket.create_server(("127.0.0.1", port + 1)), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda node: examine(node, 2, port), range(2)))
    for code, said in results:
        assert code == 1
        assert re.search(golden.pattern("doctor.refused"), said)
    assert golden.text("doctor.no_relay", port=port + 1) in results[0][1]
    assert any(golden.text("doctor.same_release") in said for _, said in results)
    assert all(said.endswith(golden.text("doctor.fix_first")) for _, said in results)


def test_software_that_a_run_takes_is_no_failure(port, monkeypatch) -> None:
    """Another patch release, and what only one node has: CUDA, or a package with an algorithm."""
    patch = defaultdict(itertools.count().__next__)

    def versions() -> dict[str, str]:
        number = patch[threading.get_ident()]
        return {"torch": f"2.13.{number}", "cuda": "12.8" if number else "", f"lsgd-soft{number}": "0.1.0"}

    monkeypatch.setattr(doctor, "versions", versions)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda node: examine(node, 2, port), range(2)))
    for code, said in results:
        assert code == 0, said
        assert re.search(golden.pattern("doctor.other_torch"), said)


def test_a_check_that_fails_on_one_node_is_said_by_all(port, monkeypatch) -> None:
    def check(self: Doctor, ip: str) -> None:
        if self._place.node:
            self._note("FAIL", "the token is readable by others")

    monkeypatch.setattr(Doctor, "_check_keys", check)
    with ThreadPoolExecutor(2) as pool:
        (code, said), (other, _) = pool.map(lambda node: examine(node, 2, port), range(2))
    assert code == other == 1
    assert golden.text("doctor.node_failed") in said and "no longer answers" not in said


@pytest.mark.alone
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_the_rate_and_the_round_trip_are_those_of_the_wire() -> None:
    with Testbed(2, rate_mbit=100, delay_ms=5) as testbed:
        arguments = ["doctor", "--nodes", "2", "--address", testbed.hosts[0].address]
        command = [sys.executable, "-m", "lsgd.client", *arguments, "--node"]
        processes = [FORKS.popen([*command, host.index], env=os.environ, host=host.pid) for host in testbed.hosts]
        outputs = [process.communicate(timeout=scaled(60))[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = re.search(golden.pattern("doctor.link"), outputs[1])
    assert found
    assert 80 < int(found[1]) < 105
    assert 10 <= float(found[2]) < 40


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@needs_nat()
@pytest.mark.slow
def test_nodes_behind_nat_are_timed_through_the_relay() -> None:
    with Testbed(3, rate_mbit=100, behind_nat=[1, 2]) as testbed:
        arguments = ["doctor", "--nodes", "3", "--address", testbed.hosts[0].address]
        command = [sys.executable, "-m", "lsgd.client", *arguments, "--node"]
        processes = [FORKS.popen([*command, host.index], env=os.environ, host=host.pid) for host in testbed.hosts]
        outputs = [process.communicate(timeout=scaled(100))[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    for said in outputs:
        assert re.search(golden.pattern("doctor.dialled"), said)
        assert re.search(golden.pattern("doctor.relayed"), said)
        assert re.search(golden.pattern("doctor.link_of", one="node1", other="node2"), said)
