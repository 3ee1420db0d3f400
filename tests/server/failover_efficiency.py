"""How many steps a run makes while hosts are lost, in virtual time: ``python -m tests.server.failover_efficiency``.

Hosts of two workers each, the real servers, launchers and local servers. Every so many seconds one of them is struck:
``node``: host 1's launcher is killed with all that it has started, and its workers are in the run again after 3 s at
the earliest; ``node 0``: the same of host 0, where the global server is; ``machine``: host 1 dies without a word, and
is back as late; ``freeze`` and ``cut``: host 1 stands still, or hears nobody, for 8 s. A step takes 0.1 s.

Efficiency: iterations that are counted, over those of a run in which nothing happens.
"""

import argparse
import sys
from collections.abc import Callable

from .failover_host import Host
from .failover_run import World
from .failover_search import quiet
from .helpers import make_plan

AGAIN_S = 3.0
"""How long a host is gone: a second until it is started again, and two in which its workers start."""

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
    "freeze": _freeze,
    "cut": _cut,
}


def iterations(fault: str, every_s: float, seconds: float, hosts: int = 2, seed: int = 0) -> int:
    """Return how many iterations a run has counted after a time in which hosts are struck."""
    plan = make_plan(period=16, local_period=16, workers=2 * hosts, nodes=hosts, lookahead=1)
    world = World(plan, [2] * hosts, seed, delay_s=0.002, start_s=(0.8, 1.0), step_s=0.1, tick_s=0.01)
    try:
        world.until(lambda: all(worker.committed for worker in world.workers), 60.0)
        before, ends_at, strikes_at = _count(world), world.now + seconds, world.now + every_s / 2
        while strikes_at < ends_at:
            world.passes(strikes_at - world.now)
            FAULTS[fault](world)
            strikes_at += every_s
        world.passes(ends_at - world.now)
        world.heal()
        world.until(lambda: any(host.server for host in world.hosts))
        return _count(world) - before
    finally:
        world.close()


def _count(world: World) -> int:
    return max(server._state.ledger.count for server in world.serving())


def host_steps(world: World, host: Host) -> int:
    """Return how many iterations the workers of a host have made."""
    return sum(worker.done for worker in world.workers if worker.host is host)


def main() -> int:
    """Print the efficiency under each fault."""
    parser = argparse.ArgumentParser(prog="tests.server.failover_efficiency", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--every-s", type=float, nargs="+", default=[30.0, 20.0, 10.0])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS)[1:], default=list(FAULTS)[1:])
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args()
    calm = iterations("nothing", options.seconds, options.seconds, options.hosts)
    print(f"nothing: {calm}")
    for fault in options.faults:
        shares = [iterations(fault, every_s, options.seconds, options.hosts) / calm for every_s in options.every_s]
        print(f"{fault}: {', '.join(f'{share:.3f}' for share in shares)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(quiet(main))
