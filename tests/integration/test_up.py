"""``lsgd up`` between machines: network namespaces, real multicast, and a person who types."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.testbed import Host, Testbed
from tests import golden

from ..needs import needs_nat
from .running import LIGHT, SCRIPTS, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    needs_nat(),
]

TRAIN = str(SCRIPTS / "steady.py")
GUESS = """
import sys, time
from lsgd.pairing.about import of_this_machine
from lsgd.pairing.code import OwnCode
from lsgd.pairing.peers import Peers
from lsgd.pairing.visit import Visit
visit = Visit([(sys.argv[1], 27402)], of_this_machine(["x"], []), Peers(), OwnCode(""), print, time.monotonic())
for _ in range(3):
    asked = visit._wire.session
    while asked.state.value != "choosing" and not visit.failed:
        visit.turn(time.monotonic())
    visit.type("acid acid", time.monotonic())
    while asked.state.value not in ("choosing", "ended"):
        visit.turn(time.monotonic())
print(visit.failed, flush=True)
"""


class Machine:
    """A host on which a person works, with files of their own."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.folder = folder / host.name
        self.folder.mkdir(parents=True)

    def start(self, *command: str, **variables: str) -> "Typed":
        """Start a program of Python."""
        environ = {**os.environ, **LIGHT, "XDG_CONFIG_HOME": str(self.folder / "config"), "OMP_NUM_THREADS": "1"}
        for name in ("LSGD_KEYS", "LSGD_VERBOSE"):
            environ.pop(name, None)
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = (sys.executable, "-P", *command)
        return Typed(self.host.popen(command, cwd=self.folder, env={**environ, **variables}, **options))

    def up(self, *options: str, **variables: str) -> "Typed":
        """Type ``lsgd up``."""
        command = ("-m", "lsgd.client", "up", "--workers", "1", "--device", "cpu", *options)
        return self.start(*command, "--", sys.executable, TRAIN, **variables)


class Typed:
    """A program that a person sees and types into."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line

    def says(self, pattern: str) -> str:
        """Return what it says, once it does."""
        found = until(lambda: re.search(pattern, self.output) or self.process.poll() is not None, pattern)
        assert isinstance(found, re.Match), self.output
        return found[1] if found.groups() else found[0]

    def type(self, line: str) -> None:
        """Type a line."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ends(self) -> int:
        """Return its exit code."""
        until(lambda: self.process.poll() is not None, f"an end of\n{self.output}")
        self._reading.join()
        return self.process.returncode

    def kill(self) -> None:
        """Kill it, as the system does when memory is short."""
        self.process.send_signal(signal.SIGKILL)
        self.ends()


@contextmanager
def machines(number: int, folder: Path, *, multicast: bool) -> Iterator[list[Machine]]:
    """Give machines on one network."""
    with Testbed(number) as testbed:
        for host in testbed.hosts:
            if not multicast:
                host.run(["nft", "add table inet up; add chain inet up in { type filter hook input priority 0; }"])
                host.run(["nft", "add rule inet up in udp dport 5353 drop"])
        yield [Machine(host, folder) for host in testbed.hosts]


def test_two_lines_and_a_code_and_the_second_time_two_lines(tmp_path: Path) -> None:
    with machines(2, tmp_path, multicast=True) as (alpha, beta):
        first = alpha.up(LSGD_ITERATIONS="2500", LSGD_ALGORITHM="local")
        code = first.says(golden.pattern("pairing.code_of_this_machine"))
        second = beta.up()
        second.says(golden.pattern("pairing.type_here_or_there"))
        second.type("acid acid")
        second.says(golden.pattern("pairing.wrong_code"))
        second.type(code)
        first.says("node1 joins as node 1: 1 worker on CPU")
        first.says("generation 1: 2 workers on 2 nodes")
        second.says(r"\[run\]|connected to the global server")
        assert first.output.count("\n") <= 12 and second.output.count("\n") <= 12, first.output + second.output
        assert not re.search("refused|no global server|does not answer", first.output), first.output
        second.kill()
        again = beta.up()  # nobody types
        again.says(golden.pattern("runs.connected"))
        seen = beta.start("-m", "lsgd.client", "peers")
        assert seen.ends() == 0 and re.search(r"node0 .* paired .* runs ", seen.output)
        assert (first.ends(), again.ends()) == (0, 0), first.output + again.output
        (result,) = alpha.folder.glob("runs/*/result.json")
        shares = [member["done"] for member in json.loads(result.read_text())["members"]]
        assert sum(shares) == 2500 and len(shares) == 2
        kept = [path for machine in (alpha, beta) for path in machine.folder.glob("config/lsgd/*/*")]
        assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}


def test_without_multicast_with_an_address_and_against_those_who_guess_or_kill(tmp_path: Path) -> None:
    with machines(3, tmp_path, multicast=False) as (alpha, beta, guesser):
        attacked = alpha.up()
        attacked.says(golden.pattern("pairing.code_is"))
        seen = beta.start("-m", "lsgd.client", "peers")
        guess = guesser.start("-c", GUESS, alpha.host.address)
        assert guess.ends() == 0 and "three wrong codes" in guess.output
        assert attacked.ends() == 1 and "three wrong codes" in attacked.output
        assert seen.ends() == 0 and golden.text("up.no_machine") in seen.output

        second = beta.up("--at", alpha.host.address)
        second.says(golden.pattern("pairing.waits_for_answer"))
        first = alpha.up()
        second.says(golden.pattern("pairing.type_here"))
        first.kill()
        first = alpha.up()
        code = first.says(golden.pattern("pairing.code_of_this_machine"))
        first.says("node1 .* wants to join")
        second.type(code)
        first.says("node1 joins as node 1")
        assert "node 1 of 2" in second.says("node . of .*")
        (kept,) = beta.folder.glob("config/lsgd/peers/*.peer")
        assert kept.stat().st_mode & 0o777 == 0o600
