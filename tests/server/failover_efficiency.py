"""How many steps a run makes while hosts are lost, in virtual time: ``python -m tests.server.failover_efficiency``.

Hosts of two workers each, the real servers, launchers and local servers. Every so many seconds one of them is struck:
``node``: host 1's launcher is killed with all that it has started, and is started again after a second, its workers two
seconds later; ``node 0``: the same of host 0, where the global server is; ``machine``: host 1 dies without a word, and
is back as late; ``server``: only the global server is killed; ``freeze`` and ``cut``: host 1 stands still, or hears
nobody, for 8 s. A step takes 0.1 s.

Efficiency: iterations that are counted, over those of a run in which nothing happens. With it, where the rest is: how
many seconds of a worker each fault has cost, by what those of the struck host and of the others were about instead.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .failover_run import World
from .failover_search import quiet
from .helpers import make_plan

AGAIN_S, IMPORTS_S = 1.0, 2.0
"""After how long a host's launcher is started again, and how long its workers then take until they join."""

AWAY_S = 8.0
"""How long a host stands still, or hears nobody."""


def _killed(index: int, *, closes: bool) -> Callable[[World], None]:
    def strike(world: World) -> None:
        host = world.hosts[index]
        if host.alive:
            host.die(closes=closes)
            world.after(AGAIN_S, host.reboot)

    return strike


def _freeze(world: World) -> None:
    host = world.hosts[1]
    host.frozen = True
    world.after(AWAY_S, host.thaw)


def _cut(world: World) -> None:
    world.cuts = {frozenset((other.index, 1)) for other in world.hosts if other.index != 1}
    world.after(AWAY_S, world.cuts.clear)


FAULTS: dict[str, Callable[[World], None]] = {
    "nothing": lambda world: None,
    "node": _killed(1, closes=True),
    "node 0": _killed(0, closes=True),
    "machine": _killed(1, closes=False),
    "server": lambda world: world.hosts[0].kill_server(),
    "freeze": _freeze,
    "cut": _cut,
}


SAMPLE_S = 0.05
"""How often it is noted what each worker is about."""

STRUCK = {"node 0": 0}
"""The host that a fault strikes; 1 for all others."""


@dataclass
class Made:
    """What a run has made in its time.

    Args:
        iterations: that count.
        worker_s: seconds of workers, by what they were about, and whether on the struck host.
        strikes: how many faults there were.
    """

    iterations: int = 0
    worker_s: Counter[str] = field(default_factory=Counter)
    strikes: int = 0

    def lost(self, calm: "Made") -> str:
        """Say what each fault has cost, in seconds of a worker, beside a run in which nothing happens."""
        more = {what: (s - calm.worker_s[what]) / self.strikes for what, s in self.worker_s.items()}
        return ", ".join(f"{what} {s:.1f}" for what, s in sorted(more.items()) if abs(s) >= 0.1)


def _note(world: World, struck: int, worker_s: Counter[str]) -> None:
    """Note what each worker is about."""
    for host in world.hosts:
        here = {worker.index: worker.state for worker in host.by_incarnation.values() if worker.state != "gone"}
        for index in range(host.size):
            about = here.get(index, "starting")
            about = "gone" if not host.alive else "frozen" if host.frozen else about
            worker_s[f"{'struck' if host.index == struck else 'other'} {about}"] += SAMPLE_S


def run(fault: str, every_s: float, seconds: float, hosts: int = 2, seed: int = 0) -> Made:
    """Return what a run has made in a time in which hosts are struck."""
    plan = make_plan(period=16, local_period=16, workers=2 * hosts, nodes=hosts, lookahead=1)
    times = {"start_s": (0.8, 1.0), "step_s": 0.1, "tick_s": 0.01, "imports_s": IMPORTS_S}
    world = World(plan, [2] * hosts, seed, delay_s=0.002, **times)
    try:
        world.until(lambda: bool(world.workers) and all(worker.committed for worker in world.workers), 60.0)
        made, struck, before = Made(), STRUCK.get(fault, 1), _count(world)
        ends_at, strikes_at = world.now + seconds, world.now + every_s / 2
        while world.now < ends_at:
            if world.now >= strikes_at:
                FAULTS[fault](world)
                made.strikes, strikes_at = made.strikes + 1, strikes_at + every_s
            world.passes(SAMPLE_S)
            _note(world, struck, made.worker_s)
        world.heal()
        world.until(lambda: any(host.server for host in world.hosts))
        made.iterations = _count(world) - before
        return made
    finally:
        world.close()


def _count(world: World) -> int:
    return max(server._state.ledger.count for server in world.serving())


def main() -> int:
    """Print the efficiency under each fault."""
    parser = argparse.ArgumentParser(prog="tests.server.failover_efficiency", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--every-s", type=float, nargs="+", default=[30.0, 20.0, 10.0])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS)[1:], default=list(FAULTS)[1:])
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args()
    calm = run("nothing", options.seconds, options.seconds, options.hosts)
    print(f"nothing: {calm.iterations}")
    for fault in options.faults:
        for every_s in options.every_s:
            made = run(fault, every_s, options.seconds, options.hosts)
            share = made.iterations / calm.iterations
            print(f"{fault}, every {every_s:g} s: {share:.3f}; lost {made.lost(calm)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(quiet(main))
