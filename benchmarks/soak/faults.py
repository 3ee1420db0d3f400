"""Makes the faults of benchmarks/soak happen, and ends each in time."""

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.soak.nodes import Node, call, send, started_at
from benchmarks.soak.schedule import Burst, Fault, blocked
from benchmarks.testbed import Host
from benchmarks.testbed.launch import PORT, ROOT

NOBODY = "02:00:00:00:00:ff"
"""A hardware address that no interface has: packets to it are lost in silence."""

KEEP_FULL_EVERY_S = 0.5
ENDS_WITHIN_S = 10.0


@dataclass
class _Active:
    fault: Fault
    ends_at: float
    end: Callable[[], None]


class Injector:
    """What is wrong at present, on these nodes.

    Args:
        nodes: on one network.
        stranger: a host on it that has no key.
        environ: for what is started on the stranger.
        say: takes a line for the story.
    """

    def __init__(
        self, nodes: Sequence[Node], stranger: Host, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._stranger, self._environ, self._say = stranger, environ, say
        self._active: list[_Active] = []
        self._blocked = Counter[tuple[str, str]]()
        self._filled_at: dict[str, float] = {}

    def burst(self, burst: Burst, meanwhile: Callable[[], bool]) -> list[Fault]:
        """Make the faults of a burst happen and end them; return those that could happen.

        ``meanwhile`` is called several times a second; the burst ends at once when it returns False.
        """
        begun_at = time.monotonic()
        waiting, happened = list(burst.faults), list[Fault]()
        while (waiting or self._active) and meanwhile():
            now = time.monotonic()
            while waiting and waiting[0].delay_s <= now - begun_at:
                if self._begin(fault := waiting.pop(0), now):
                    happened.append(fault)
            for name, filled_at in self._filled_at.items():
                if now - filled_at > KEEP_FULL_EVERY_S:  # the run may have deleted something
                    self._nodes[name].fill()
                    self._filled_at[name] = now
            for active in [active for active in self._active if active.ends_at <= now]:
                self._end(active)
        return happened

    def end_all(self) -> None:
        """End every fault now."""
        for active in list(self._active):
            self._end(active)

    def _begin(self, fault: Fault, now: float) -> bool:
        verb = fault.what.split()[0]
        end = getattr(self, f"_{verb}")(fault)
        if end is None:
            self._say(f"{fault.what}: {fault.target} is not there")
            return False
        self._say(str(fault))
        if fault.seconds:
            self._active.append(_Active(fault, now + fault.seconds, end))
        return True

    def _end(self, active: _Active) -> None:
        self._active.remove(active)
        active.end()
        self._say(f"over: {active.fault.what}: {active.fault.target}")

    def _process(self, name: str) -> int | None:
        """Return the id of a process of a node, or of the global server, which is on any."""
        if name != "global":
            return self._nodes[name.partition("/")[0]].processes().get(name)
        found = (node.processes().get(f"{node.name}/global") for node in self._nodes.values())
        return next((pid for pid in found if pid), None)

    def _kill(self, fault: Fault) -> Callable[[], None] | None:
        pid = self._process(fault.target)
        return _nothing if pid and send(pid, signal.SIGKILL) else None

    def _freeze(self, fault: Fault) -> Callable[[], None] | None:
        pid = self._process(fault.target)
        if not pid or not send(pid, signal.SIGSTOP):
            return None
        start = started_at(pid)

        def go_on() -> None:
            with contextlib.suppress(OSError):  # it may have been killed meanwhile
                if started_at(pid) == start:
                    send(pid, signal.SIGCONT)

        return go_on

    def _lose(self, fault: Fault) -> Callable[[], None] | None:
        """Kill all of a node and take it off the network; it comes back with its disk, as a machine after an outage."""
        node = self._nodes[fault.target]
        if node.launcher is None:
            return None
        mend = self._cut(Fault("cut node", fault.target, fault.delay_s, fault.seconds))
        node.lose()

        def come_back() -> None:
            if mend:
                mend()
            node.launch_again()

        return come_back

    def _cut(self, fault: Fault) -> Callable[[], None] | None:
        pairs = blocked(fault, list(self._nodes))
        for pair in pairs:
            self._blocked[pair] += 1
            if self._blocked[pair] == 1:
                source, to = (self._nodes[name].host for name in pair)
                way = [to.address, "lladdr", NOBODY, "nud", "permanent"]
                call(source, ["ip", "neigh", "replace", *way, "dev", "eth0"])

        def mend() -> None:
            for pair in pairs:
                self._blocked[pair] -= 1
                if not self._blocked[pair]:
                    source, to = (self._nodes[name].host for name in pair)
                    call(source, ["ip", "neigh", "del", to.address, "dev", "eth0"])

        return mend

    def _fill(self, fault: Fault) -> Callable[[], None] | None:
        self._nodes[fault.target].fill()
        self._filled_at[fault.target] = time.monotonic()

        def clear() -> None:
            self._filled_at.pop(fault.target, None)
            self._nodes[fault.target].clear()

        return clear

    def _junk(self, fault: Fault) -> Callable[[], None] | None:
        found = [address for node in self._nodes.values() for address in node.ports()]
        control = [address for address in found if address.endswith(f":{PORT}")]
        others = [address for address in found if address not in control]
        # Half of it to the servers; all of it while no worker listens.
        addresses = [address for other in others for address in (*control, other)] or control
        if not addresses:
            return None
        how = ["--how", fault.what.split()[1], "--seconds", f"{fault.seconds:.1f}", *addresses]
        process = self._stranger.popen(
            [sys.executable, "-m", "benchmarks.soak.junk", *how],
            cwd=ROOT,
            env=dict(self._environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        def end() -> None:
            try:
                said = process.communicate(timeout=ENDS_WITHIN_S)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                said = process.communicate()[0]
            self._say(f"the stranger made {said.strip().splitlines()[-1] if said.strip() else 'nothing'}")

        return end


def _nothing() -> None:
    """End what is over at once."""
