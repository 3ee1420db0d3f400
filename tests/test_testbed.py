"""The testbed keeps its promises: bandwidth, latency, counts, names, and nothing left behind."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Testbed, TestbedError

from .needs import needs_nat
from .speed import scaled

ROOT = Path(__file__).parents[1]
root = pytest.mark.root
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
connection, _ = server.accept()
nbytes, wanted = 0, int(sys.argv[2])
while nbytes < wanted:
    received = len(connection.recv(1 << 20))
    assert received, "the sender went away"
    nbytes += received
print(time.monotonic())
"""

SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=30)
print(time.monotonic())
connection.sendall(bytes(int(sys.argv[2])))
connection.recv(1)
"""

ECHO = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
while data := connection.recv(64):
    connection.sendall(data)
"""

ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000), timeout=30)
for line in sys.stdin:
    connection.sendall(b"x")
    connection.settimeout(float(line))
    try:
        print("answer" if connection.recv(1) else "end", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""

ROUND_TRIPS = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=30)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(20):
    start = time.monotonic()
    connection.sendall(b"x")
    connection.recv(1)
    print(time.monotonic() - start)
"""


def listen(host: Host, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python script on ``host`` and return it when it listens."""
    process = host.popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "listening\n"
    return process


def transfer(sender: Host, receiver: Host, nbytes: int) -> float:
    """Send ``nbytes`` over TCP and return the seconds from before the first left until the last was there."""
    with listen(receiver, RECEIVE, receiver.address, str(nbytes)) as process:
        started_at = float(sender.run([sys.executable, "-c", SEND, receiver.address, str(nbytes)]))
        assert process.stdout
        return float(process.stdout.read()) - started_at


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = scaled(20.0)) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def namespaces_of(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "mnt", "uts", "pid")}


def holders(namespaces: set[str]) -> list[int]:
    """Return the processes that live in any of ``namespaces``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if namespaces & namespaces_of(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has just ended
    return found


@root
@needs_root
@pytest.mark.alone
@pytest.mark.parametrize("delay_ms", [0.0, 5.0])
def test_a_transfer_takes_as_long_as_the_rate_says(delay_ms: float) -> None:
    """No transfer is faster; a busy machine makes some slower, but not all."""
    with Testbed(2, delay_ms=delay_ms) as testbed:

        def fastest(nbytes: int, enough_s: float) -> float:
            taken_s = math.inf
            for _ in range(8):
                taken_s = min(taken_s, transfer(*testbed.hosts, nbytes))
                if taken_s <= enough_s:
                    break
            return taken_s

        for rate_mbit in (100.0, 20.0):
            testbed.set_rate(rate_mbit)
            expected_s = 1.5
            nbytes = int(rate_mbit * 1e6 / 8 * expected_s)
            assert fastest(nbytes, 1.15 * expected_s) == pytest.approx(expected_s, rel=0.15)
        testbed.set_rate(None)
        assert fastest(nbytes, expected_s / 2) < expected_s / 2


@root
@needs_root
@pytest.mark.alone
def test_a_round_trip_takes_twice_the_delay() -> None:
    with Testbed(2, delay_ms=20) as testbed, listen(testbed.hosts[1], ECHO):
        lines = testbed.hosts[0].run([sys.executable, "-c", ROUND_TRIPS, testbed.hosts[1].address])
    round_trips_s = [float(line) for line in lines.split()]
    assert 0.040 <= min(round_trips_s) < 2 * 0.040  # a busy machine makes some slower, but not all


@root
@needs_root
@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_a_host_that_is_cut_hears_nothing_until_it_is_mended(delay_ms: float) -> None:
    with Testbed(2, delay_ms=delay_ms) as testbed, listen(testbed.hosts[1], ECHO):
        asks = [sys.executable, "-c", ASK, testbed.hosts[1].address]
        with testbed.hosts[0].popen(asks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

            def answer(within_s: float) -> str:
                assert process.stdin and process.stdout
                process.stdin.write(f"{within_s}\n")
                process.stdin.flush()
                return process.stdout.readline()

            assert answer(10) == "answer\n"
            testbed.cut(testbed.hosts[1])
            assert answer(0.3) == "silence\n"
            testbed.mend(testbed.hosts[1])
            assert answer(10) == "answer\n"
            process.kill()


@root
@needs_root
@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_bytes_are_counted_where_they_pass(delay_ms: float) -> None:
    with Testbed(3, delay_ms=delay_ms) as testbed:
        sender, other, receiver = testbed.hosts
        before = {host: (host.sent_nbytes, host.received_nbytes) for host in testbed.hosts}

        def passed(host: Host) -> tuple[int, int]:
            return host.sent_nbytes - before[host][0], host.received_nbytes - before[host][1]

        transfer(sender, receiver, 2_000_000)
        # The last packets of a connection that closes may still be between the two interfaces.
        wait_until(lambda: passed(sender)[0] == passed(receiver)[1], "the receiver counts what the sender does")
        assert 2_000_000 < passed(sender)[0] < 1.05 * 2_000_000
        assert sum(passed(other)) < 1000


@root
@needs_root
@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_a_network_carries_nothing_of_its_own(delay_ms: float) -> None:
    with Testbed(3, delay_ms=delay_ms) as testbed:
        time.sleep(2)
        assert [(host.sent_nbytes, host.received_nbytes) for host in testbed.hosts] == [(0, 0)] * 3


@root
@needs_root
def test_hosts_find_each_other_by_name() -> None:
    script = "import socket; print(*(socket.gethostbyname(n) for n in (socket.gethostname(), 'node1')))"
    with Testbed(2) as testbed:
        assert testbed.hosts[0].run([sys.executable, "-c", script]).split() == ["10.77.0.1", "10.77.0.2"]
    with Testbed(2, loopback_names=True) as testbed:
        assert testbed.hosts[0].run([sys.executable, "-c", script]).split() == ["127.0.1.1", "10.77.0.2"]


@root
@needs_root
@needs_nat()
def test_a_host_behind_nat_reaches_others_and_nobody_reaches_it() -> None:
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])).close()"
    who = "import socket; s = socket.create_server(('', 5000)); print('listening', flush=True); print(s.accept()[1][0])"
    with Testbed(3, behind_nat=[1, 2]) as testbed:
        public, *homes = testbed.hosts
        assert [host.address for host in testbed.hosts] == ["10.77.0.1", "192.168.1.2", "192.168.1.2"]
        for home in homes:
            with listen(public, who) as server:
                home.run([sys.executable, "-c", knock, public.address, "10"])
                assert server.stdout and server.stdout.read() == f"10.77.0.{home.index + 1}\n"
        with listen(homes[0], ECHO) as server:
            for host, address in ((public, "10.77.0.2"), (public, "192.168.1.2"), (homes[1], "10.77.0.2")):
                with pytest.raises(TestbedError, match=r"TimeoutError|unreachable"):
                    host.run([sys.executable, "-c", knock, address, "0.5"])
            server.kill()


@root
@needs_root
def test_a_process_on_a_host_is_the_callers_child() -> None:
    script = "trap 'exit 7' TERM; cd ..; pwd; while :; do sleep 0.05; done"
    with Testbed(1) as testbed:
        process = testbed.hosts[0].popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout and process.stdout.readline() == f"{ROOT.parent}\n"
        process.terminate()
        assert process.wait(scaled(10)) == 7
        process.stdout.close()
        with pytest.raises(TestbedError, match=r"node0: ls /nowhere: .*No such file.* \(exit 2\)"):
            testbed.hosts[0].run(["ls", "/nowhere"])


@root
@needs_root
def test_two_testbeds_do_not_meet() -> None:
    with Testbed(2, delay_ms=1) as one, Testbed(2) as two:
        assert one.hosts[1].address == two.hosts[1].address
        with listen(one.hosts[1], ECHO):
            probe = [sys.executable, "-c", ROUND_TRIPS, one.hosts[1].address]
            with pytest.raises(TestbedError, match="ConnectionRefusedError"):
                two.hosts[0].run(probe)
            assert one.hosts[0].run(probe)


@root
@needs_root
@pytest.mark.parametrize("delay_ms", [0.0, 1.0])
def test_an_exception_leaves_nothing_behind(delay_ms: float) -> None:
    interfaces, mounts = socket.if_nameindex(), Path("/proc/mounts").read_text()
    stubborn = "trap '' TERM INT HUP; (while :; do sleep 1; done) & echo started; wait"
    with pytest.raises(ZeroDivisionError), Testbed(2, rate_mbit=50, delay_ms=delay_ms) as testbed:
        namespaces = set.union(*(namespaces_of(host.pid) for host in testbed.hosts))
        for host in testbed.hosts:
            process = host.popen(["sh", "-c", stubborn], stdout=subprocess.PIPE, text=True)
            assert process.stdout and process.stdout.readline() == "started\n"
            process.stdout.close()
        assert len(holders(namespaces)) >= 6  # of each host the first process, the shell and its child
        raise ZeroDivisionError
    assert holders(namespaces) == []
    assert socket.if_nameindex() == interfaces
    assert Path("/proc/mounts").read_text() == mounts


@root
@needs_root
def test_a_killed_testbed_leaves_nothing_behind() -> None:
    interfaces = socket.if_nameindex()
    script = "readlink /proc/self/ns/net; trap '' TERM INT HUP; (while :; do sleep 1; done) & wait"
    command = [sys.executable, "-m", "benchmarks.testbed", "2", "--delay-ms", "1", "--", "sh", "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as testbed:
        try:
            assert testbed.stdout
            lines = [testbed.stdout.readline() for _ in range(2)]
            namespaces = {re.sub(r"^\[node\d\] |\n", "", line) for line in lines}
            assert len(namespaces) == 2
            wait_until(lambda: len(holders(namespaces)) >= 6, "the hosts' processes are there")
            relays = [entry for entry in Path("/proc").glob("[0-9]*") if is_relay_of(entry, testbed.pid)]
            assert len(relays) == 1
        finally:
            testbed.send_signal(signal.SIGKILL)
    wait_until(lambda: not holders(namespaces), "the hosts' processes end")
    wait_until(lambda: not relays[0].exists(), "the relay ends")
    assert socket.if_nameindex() == interfaces


def is_relay_of(process: Path, parent: int) -> bool:
    try:
        status = (process / "status").read_text()
        return f"PPid:\t{parent}\n" in status and b"relay.py" in (process / "cmdline").read_bytes()
    except OSError:
        return False


@root
@needs_root
def test_the_command_shows_lines_and_returns_the_exit_code() -> None:
    script = 'echo "$TESTBED_HOST $TESTBED_ADDRESS $(hostname)"; exit $((TESTBED_HOST * 5))'
    command = [sys.executable, "-m", "benchmarks.testbed", "2", "--rate-mbit", "10", "--", "sh", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert sorted(done.stdout.splitlines()) == ["[node0] 0 10.77.0.1 node0", "[node1] 1 10.77.0.2 node1"]
    assert done.returncode == 5


def test_without_root_one_line_says_so() -> None:
    script = "import os, benchmarks.testbed.__main__ as b; os.geteuid() or os.seteuid(65534); exit(b.main())"
    done = subprocess.run([sys.executable, "-c", script, "2", "--", "true"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("error: the testbed makes network namespaces and needs root: use sudo\n")


@root
@needs_root
def test_root_without_the_capability_is_told_so() -> None:
    script = "import benchmarks.testbed.__main__ as b; raise SystemExit(b.main())"
    dropped = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    done = subprocess.run(
        [*dropped, sys.executable, "-c", script, "2", "--", "true"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: the testbed needs full root, .*\n", done.stderr)


@pytest.mark.parametrize("hosts", [0, 251])
def test_a_wrong_number_of_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(TestbedError, match=f"of {hosts} hosts; it can have 1 to 250"):
        Testbed(hosts)
