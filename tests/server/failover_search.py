"""Searches for a schedule of faults that breaks a promise: ``python -m tests.server.failover_search [--runs N]``.

Each run has two to five hosts, up to six faults in its first minute, and then heals: hosts die for good (who serves,
above all), while a standby takes over too; they freeze, lose each other, or a part of the others, for a while, often
for hardly longer than a standby waits; servers are killed; host 0 comes back from its disk. Messages are late, and in
half of the runs a server takes up to 20 s to start, in a third a connection more than a second. Half of the runs heal.
Then one server must serve all hosts that live, and no other one runs; one model must be at the end of the run, and what
is in it must be counted, once. The others end in the middle, by the plan or by a signal at a launcher. A part that is
cut off from that launcher's, and trains on after its end, gets a signal of its own then. In all, no launcher outlives
the run's workers. One run in eight has links that are down for less than 5 s, and nothing else: that moves no server
and no worker.
"""

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

from lsgd.server import daemon
from lsgd.server.succession import SILENT_S

from .failover_host import BrokenError, Host
from .failover_run import START_S, World
from .helpers import make_plan

FAULTS = ("death", "death in the take-over", "partition", "cut", "short cut", "freeze", "server killed", "return")
SLOW_S = (0.0, 20.0)
"""How long a server takes to start on a busy machine."""


CONNECTS_S = 1.5
"""How long a connection takes there."""

TAKES_OVER_WITHIN_S = 60.0
"""After this time a part that is cut off has a server of its own."""


def world_of(seed: int) -> World:
    """Return a run that begins, by the seed."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 1, 2)) for _ in range(rng.choice((2, 2, 3, 3, 4, 5)))]
    period, local = rng.choice(((4, 4), (8, 2), (16, 16)))
    plan = make_plan(
        period=period,
        local_period=local,
        workers=sum(sizes),
        nodes=len(sizes),
        lookahead=rng.choice((0, 1, 5)),
        patience_s=30.0,
        lease_s=15.0 if seed % 8 == 7 else rng.choice((5.0, 15.0)),
        server_timeout_s=120.0,
    )
    delay_s, start_s = rng.choice((0.02, 0.3)), rng.choice((START_S, SLOW_S))
    return World(plan, sizes, seed, delay_s, start_s, rng.choice((0.0, 0.0, CONNECTS_S)))


def server_host(world: World) -> Host:
    """Return a host that serves, or the first one that lives."""
    alive = [host for host in world.hosts if host.alive]
    return next((host for host in alive if host.serves), alive[0])


def may_die(world: World, host: Host) -> bool:
    """Whether another host would be left that has the run's model and its journal, or a copy.

    A worker that every server has evicted has no longer the run's, though it does not know that yet.
    """
    others = [each for each in world.hosts if each is not host and each.alive and not each.frozen]
    others = [each for each in others if each.server is not None or each.local.following.copy.number]
    serving = [server._state.roster for server in world.serving()]
    inside = {member.join.incarnation for roster in serving for member in roster.members.values()}
    workers = [worker for each in others for worker in each.by_incarnation.values() if worker.state != "gone"]
    return any(worker.committed for worker in workers if not serving or worker.incarnation in inside)


def strike(world: World, fault: str, rng: random.Random) -> bool:
    """Let one fault happen; return whether it could."""
    alive = [host for host in world.hosts if host.alive]
    host = server_host(world) if rng.random() < 0.6 else rng.choice(alive)
    lasts_s = rng.choice((3.0, 8.0, 20.0, 45.0))
    if fault == "death" or fault == "death in the take-over":
        if fault != "death":
            host = next((each for each in alive if each.claims), host)
        if not may_die(world, host):
            return False
        host.die(closes=host.index % 2 == 1)
    elif fault == "partition":
        part = {each.index for each in world.hosts if rng.random() < 0.5}
        _cut(world, [(a, b) for a in part for b in range(len(world.hosts)) if b not in part], lasts_s)
    elif fault == "short cut":  # of one host, most often
        part = {host.index} if rng.random() < 0.7 else {each.index for each in world.hosts if rng.random() < 0.5}
        pairs = [(a, b) for a in part for b in range(len(world.hosts)) if b not in part]
        _cut(world, pairs, rng.uniform(2.0, 8.0))
    elif fault == "cut":
        _cut(world, [(host.index, rng.randrange(len(world.hosts)))], lasts_s)
    elif fault == "freeze":
        if host.frozen:
            return False
        host.frozen = True
        life = host.life
        world.after(lasts_s, lambda: host.life == life and host.alive and host.thaw())
    elif fault == "server killed":
        host.kill_server()
    elif world.hosts[0].alive:
        return False
    else:
        world.hosts[0].reboot()
    return True


def _cut(world: World, pairs: list[tuple[int, int]], lasts_s: float) -> None:
    cut = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}
    world.cuts |= cut
    world.after(lasts_s, lambda: world.cuts.difference_update(cut))


def search(seed: int) -> tuple[World, Counter[str]]:
    """Make a run with random faults, by the seed, to its end; raise what it breaks."""
    world = world_of(seed)
    try:
        return world, _search(world, seed)
    finally:
        world.close()


def _search(world: World, seed: int) -> Counter[str]:
    rng, struck = random.Random(seed ^ 0x5EED), Counter[str]()
    world.until(lambda: all(worker.committed for worker in world.workers), 120.0)
    if seed % 8 == 7:
        _waver(world, rng, struck)
        return struck
    faults, ends = rng.randint(1, 6), rng.choice(("healed", "healed", "by plan", "by signal"))
    for number in range(faults):
        world.passes(rng.choice((0.3, 1.5, 4.0, 7.0, 12.0, 25.0)))
        if number == faults - 1 and ends != "healed":
            _will_end(world, rng, 40 if ends == "by plan" else 400)
        fault = rng.choice(FAULTS)
        if strike(world, fault, rng):
            struck[fault] += 1
            world.say(f"{fault}: alive {[h.index for h in world.hosts if h.alive]}, cuts {len(world.cuts)}")
    struck[ends] += 1
    if ends == "healed":
        world.finish()
        return struck
    world.passes(rng.uniform(0.0, 20.0))
    stopped = None
    if ends == "by signal" and not world.is_over:
        stopped = server_host(world)
        _signal(stopped)
        world.passes(rng.uniform(0.0, 8.0))
    world.heal()
    if stopped is not None:
        _stop_other_parts(world, stopped)
    world.ends()
    return struck


def _signal(host: Host) -> None:
    """Tell a launcher to stop the run, as a user does by Ctrl-C."""
    host.says("SIGTERM")
    host.signals.received.append("SIGTERM")


def _stop_other_parts(world: World, stopped: Host) -> None:
    """Stop a part that trains on after the one of this host has ended: cut off, it cannot have heard of the stop.

    A user stops it on its own nodes. A part that this host has followed in the end hears it without that.
    """
    world.until(lambda: world.is_over or world.now > stopped.ended_at + TAKES_OVER_WITHIN_S, 900.0)
    for server in world.serving():
        term = server._state.tenure.terms[-1]
        if term != stopped.local.following.candidates.term and not server._state.stopping:
            _signal(world.hosts[term.node])


def _waver(world: World, rng: random.Random, struck: Counter[str]) -> None:
    """Cut links for less time than a standby waits, and see that nothing comes of it."""
    for _ in range(3):
        world.passes(rng.uniform(10.0, 20.0))
        struck["wavering link"] += 1
        host = rng.choice(world.hosts)
        others = [each.index for each in world.hosts if each is not host and (host.index or rng.random() < 0.8)]
        _cut(world, [(host.index, other) for other in others], rng.uniform(2.0, SILENT_S))
        world.say(f"host {host.index} loses {others}")
    world.finish()
    if any(host.terms != world.hosts[0].terms[:1] for host in world.hosts) or len(world.workers) > sum(
        host.size for host in world.hosts
    ):
        raise BrokenError(f"a link that was down for less than {SILENT_S:g} s has moved the run\n{world.story()}")


def _will_end(world: World, rng: random.Random, iterations: int) -> None:
    """Let the plan end the run in a moment."""
    for server in world.serving():
        world.shorten(server, rng.randint(iterations // 2, 3 * iterations))


def quiet(run: Callable[[], int]) -> int:
    """Run without lines of the servers, which print in this thread."""
    daemon.silence()
    logging.getLogger("lsgd").setLevel(logging.CRITICAL)
    return run()


def main() -> int:
    """Try many seeds, and print what was tried and what broke."""
    parser = argparse.ArgumentParser(prog="tests.server.failover_search", description=__doc__)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    options = parser.parse_args()
    began, struck, broken, takeovers, virtual_s = time.monotonic(), Counter[str](), 0, 0, 0.0
    for seed in range(options.first, options.first + options.runs):
        try:
            world, faults = search(seed)
        except Exception as error:
            broken += 1
            where = "" if isinstance(error, BrokenError) else traceback.format_exc()
            print(f"seed {seed}: {type(error).__name__}: {error}\n{where}", flush=True)
            continue
        struck += faults
        takeovers += world.takeovers
        virtual_s += world.now
    print(
        f"{options.runs} runs, {virtual_s / 3600:.1f} hours of theirs in {time.monotonic() - began:.0f} s; "
        f"{takeovers} take-overs; {broken} runs broke a promise"
    )
    print(", ".join(f"{fault}: {count}" for fault, count in sorted(struck.items())))
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(quiet(main))
