"""``lsgd doctor``: checks whether these machines can train together, and suggests how often to exchange.

Start it on each node with the same address and number of nodes, like ``lsgd launch``. The nodes meet in a key-value
store of torch on node 0, at the port of the global server. Then all nodes call one another, as new workers of a run do.
They form a group like a run's, with a relay for nodes that cannot dial each other. In it, neighbors (node k and k + 1,
in both directions) time their messages, one pair at a time, and all nodes take part in one all-reduce.
"""

import json
import math
import os
import platform
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import torch

from lsgd import processors
from lsgd.algorithms.common import Exchange, best_schedule
from lsgd.cli.relay import RelayAccess, running_relay
from lsgd.client.control.identity import Interface, interface_towards, versions
from lsgd.client.groups.base import Members
from lsgd.client.groups.mesh import Mesh
from lsgd.client.groups.reach import Calls
from lsgd.client.groups.routes import Endpoint, Routes, listening
from lsgd.client.groups.store import TCPStore
from lsgd.client.groups.tcp_group import TcpGroup
from lsgd.codecs import codec_of
from lsgd.errors import ConfigError, ExchangeError
from lsgd.node.place import Place, resolve
from lsgd.plan import estimate
from lsgd.protocol.keys import TOKEN_VARIABLE, connector_keys, is_local, is_there, node_name, token_path
from lsgd.protocol.ports import hold
from lsgd.server.greetings import different_versions

MEET_WITHIN_S, CONNECT_WITHIN_S = 60.0, 5.0
SMALLEST_NBYTES, LARGEST_NBYTES = 256 << 10, 64 << 20
LINK_FOR_S, LINK_TRIES = 0.25, 3
"""A link is timed with messages of 256 KiB to 64 MiB: the best of three of the first size that takes this long."""

REDUCE_NUMEL = 1 << 18
"""Numbers in the all-reduce: 1 MiB of float32."""

WHOLE_STEPS = 10_000
"""How many steps of one machine the estimate is for."""

PING_COUNT, PING_NBYTES = 20, 4
CLOCK_WARNING_S = 1.0
MIN_DESCRIPTORS = 1024


@dataclass(frozen=True)
class Link:
    """A node's measurements of the link to another node."""

    to: int
    round_trip_ms: float
    clock_ahead_s: float
    mbit_per_s: float


class Doctor:
    """Examines one node and, together with the other nodes, the network between them.

    Args:
        place: index of this node, number of nodes, and address of node 0.
        port: port of the global server.
        say: callback for each line of the report.
    """

    def __init__(self, place: Place, port: int, say: Callable[[str], None]) -> None:
        self._place = place
        self._port = port
        self._say = say
        self._failed = False
        self._listener: int | None = None  # node 0's, for the store

    def examine(self, parameters: int, step_ms: float) -> int:
        """Run all checks and print the results; return 0, or 1 if something would keep a run from working.

        Args:
            parameters: number of the model's parameters, for the suggestion.
            step_ms: time of one iteration, in milliseconds.
        """
        interface = self._look_here()
        if self._place.nodes == 1:
            self._note("ok", "one node: no link to test; for several, start this on each with --nodes and --address")
        elif interface is not None and (store := self._meet(interface)) is not None:
            try:
                with self._relay(store) as relay:
                    missed = self._reach(store, interface, relay)
                    self._hear_of_failures(store)
                    if not self._failed:
                        self._suggest(self._time(store, interface, relay, missed), parameters, step_ms)
                    self._part(store)
            except (RuntimeError, ExchangeError) as error:
                self._note("FAIL", f"a node no longer answers: {_first_line(error)}")
        self._say("fix the failed checks above first" if self._failed else "ready for a run")
        return int(self._failed)

    def _note(self, kind: str, text: str) -> None:
        self._failed |= kind == "FAIL"
        self._say(f"{kind:4}  {text}")

    # -- this machine ------------------------------------------------------------------------------------------

    def _look_here(self) -> Interface | None:
        """Check this machine; return the interface toward node 0 if there is one."""
        found = {"python": platform.python_version()} | {k: v for k, v in versions().items() if v}
        self._note("ok", "versions: " + ", ".join(f"{name} {version}" for name, version in found.items()))
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = [torch.cuda.get_device_name(i) for i in range(usable)]
        cores = processors.usable()
        self._note("ok", f"{cores} cores, {', '.join(gpus) or 'no GPU that torch can use'}")
        if gpus:
            self._note("ok", "to test lsgd on this GPU, run scripts/gpu.sh of a checkout (docs/guides/gpu.md)")
        free_gib = shutil.disk_usage(Path.cwd()).free / (1 << 30)
        kind = "ok" if free_gib > 1 else "warn"
        self._note(kind, f"{free_gib:.1f} GiB are free in {Path.cwd()}, for logs and checkpoints")
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        remedy = "" if limit >= MIN_DESCRIPTORS else ": ulimit -n 4096"
        self._note("warn" if remedy else "ok", f"{limit} open files are allowed{remedy}")
        try:
            ip = resolve(self._place.address, self._place.nodes)
            interface = interface_towards(ip)
        except ConfigError as error:
            self._note("FAIL", str(error))
            return None
        self._note("ok", f"tensors travel on {interface.address} ({interface.name}), because {interface.reason}")
        self._check_keys(ip)
        return interface if self._check_port(ip) else None

    def _check_port(self, ip: str) -> bool:
        if self._place.node:
            return True
        try:
            held = hold(ip, self._port)
        except ConfigError as error:
            self._note("FAIL", str(error))
            return False
        if self._place.nodes > 1:
            held.listen()
            self._listener = held.detach()
        else:
            held.close()
        self._note("ok", f"port {self._port} of {ip} is free for the global server")
        return True

    def _check_keys(self, ip: str) -> None:
        address, name = f"tcp://{ip}:{self._port}", node_name(self._place.node)
        path = token_path(name)
        if is_local(address):
            return
        if not (os.environ.get(TOKEN_VARIABLE) or is_there(path)):
            self._note("warn", f"there is no token of {name} yet: the launcher of node 0 makes it, or `lsgd keygen`")
            return
        try:
            connector_keys(address, None, name, insecure=False)
        except ConfigError as error:
            self._note("FAIL", str(error))
        else:
            self._note("ok", f"the token of {name} is there")

    # -- the nodes together ------------------------------------------------------------------------------------

    def _meet(self, interface: Interface) -> TCPStore | None:
        """Return a store that all nodes share, once all have joined and described themselves."""
        place, wait = self._place, timedelta(seconds=MEET_WITHIN_S)
        self._say(f"...   waiting up to {MEET_WITHIN_S:g} s for the other nodes")
        try:
            ip = resolve(place.address, place.nodes)
            nodes, is_first, listener = place.nodes, place.node == 0, self._listener
            store = TCPStore(ip, self._port, nodes, is_first, wait, wait_for_workers=False, master_listen_fd=listener)
            about = {"address": interface.address, "host": socket.gethostname(), "versions": versions()}
            store.set(f"about{place.node}", json.dumps(about))
            others = [json.loads(store.get(f"about{node}")) for node in range(place.nodes)]
        except RuntimeError as error:
            self._note(
                "FAIL",
                f"not all {place.nodes} nodes met at port {self._port} of {place.address} within {MEET_WITHIN_S:g} s: "
                f"start this on each of them, and see that the port is open ({_first_line(error)})",
            )
            return None
        there = ", ".join(f"node{n} ({other['host']}, {other['address']})" for n, other in enumerate(others))
        self._note("ok", f"all are there: {there}")
        for node, other in enumerate(others[1:], 1):
            refused, warned = different_versions(others[0]["versions"], "node0", other["versions"], node)
            if refused:
                self._note("FAIL", f"{refused}; install the same release on all")
            if warned:
                self._note("warn", f"{warned}; a run takes that, but better install the same release on all")
        return store

    def _hear_of_failures(self, store: TCPStore) -> None:
        """Let all nodes know whose check has failed, so that nobody waits for it in the measurement."""
        store.set(f"failed{self._place.node}", json.dumps(self._failed))
        failed = [n for n in range(self._place.nodes) if json.loads(store.get(f"failed{n}"))]
        if failed and not self._failed:
            self._note("FAIL", f"a check on {', '.join(f'node{n}' for n in failed)} failed: its report says which")

    @contextmanager
    def _relay(self, store: TCPStore) -> Iterator[RelayAccess]:
        """Run a relay on node 0, like a run's, inside the context."""
        if self._place.node:
            yield RelayAccess.of(store.get("relay"))
            return
        ip, port = resolve(self._place.address, self._place.nodes), self._port + 1
        with running_relay(f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}") as relay:
            if not relay.address:
                self._note("warn", f"no relay can listen on port {port} of {ip}, which nodes behind NAT need")
            store.set("relay", relay.published())
            yield relay

    def _reach(self, store: TCPStore, interface: Interface, relay: RelayAccess) -> set[tuple[int, int]]:
        """Let all nodes call one another, and print how each pair reaches each other.

        Returns:
            pairs of nodes of which the first cannot dial the second.
        """
        me, nodes = self._place.node, range(self._place.nodes)
        others = [node for node in nodes if node != me]
        with listening(interface.address) as (listener, endpoint):
            store.set(f"endpoint{me}", endpoint.published())
            endpoints = [Endpoint.of(store.get(f"endpoint{node}")) for node in nodes]
            calls = Calls(listener, me, endpoints, relay.address)
            calls.make(others, others, CONNECT_WITHIN_S, lambda: False)
            store.set(f"missed{me}", json.dumps([list(calls.missed.items()), calls.reaches_relay]))
            rows = [json.loads(store.get(f"missed{node}")) for node in nodes]
        missed = {(node, other): why for node, (row, _) in enumerate(rows) for other, why in row}
        for one, other in combinations(nodes, 2):
            away = [pair for pair in ((one, other), (other, one)) if pair in missed]
            related = all(rows[node][1] for node in (one, other))
            for source, target in away:
                where = f"{endpoints[target].address}:{endpoints[target].port}"
                why = f"node{source} to node{target}: {where} cannot be used ({missed[source, target]})"
                if len(away) == 1:
                    self._note("ok", f"{why}; node{target} dials node{source}, and both directions use that")
                elif related:
                    self._note("ok", f"{why}; they exchange through the relay, port {self._port + 1} of node0")
                else:
                    ports = f"the ports above 1023 between the nodes, or port {self._port + 1} of node0 for the relay"
                    self._note("FAIL", f"{why}; open {ports}")
        return set(missed)

    def _time(
        self, store: TCPStore, interface: Interface, relay: RelayAccess, missed: set[tuple[int, int]]
    ) -> list[Link]:
        """Time a run's operations: messages between neighbors, one pair at a time, and an all-reduce."""
        me, nodes = self._place.node, self._place.nodes
        names = [node_name(node) for node in range(nodes)]
        routes = partial(Routes, missed=lambda one, other: (one, other) in missed, relayed=partial(relay.route, me))
        mesh = Mesh("doctor", 1, me, names, interface.address, store, b"", MEET_WITHIN_S, routes)
        links = []
        with closing(TcpGroup(mesh, Members.apart(names, me), MEET_WITHIN_S)) as group:
            group.all_reduce(torch.zeros(1)).wait()  # this forms the group
            for source, target in [*pairwise(range(nodes)), *((k + 1, k) for k in range(nodes - 1))]:
                key = f"link{source}-{target}"
                if source == me:
                    store.set(key, json.dumps(vars(_measure(group, target))))
                elif target == me:
                    _answer(group, source)
                links.append(Link(**json.loads(store.get(key))))
                self._tell(source, links[-1])
            self._reduce(group)
            store.set(f"timed{me}", "")
            for node in range(nodes):  # the first to close would cut off others that still wait
                store.get(f"timed{node}")
        return links

    def _tell(self, source: int, link: Link) -> None:
        rate = f"{link.mbit_per_s:.0f} Mbit/s, round trip {link.round_trip_ms:.2f} ms"
        self._note("ok", f"node{source} to node{link.to}: {rate}")
        if abs(link.clock_ahead_s) > CLOCK_WARNING_S:
            clock = f"the clock of node{link.to} is {link.clock_ahead_s:+.1f} s from node{source}'s"
            self._note("warn", f"{clock}: logs are hard to compare")

    def _reduce(self, group: TcpGroup) -> None:
        tensor = torch.full((REDUCE_NUMEL,), float(group.rank + 1))
        started_at = time.monotonic()
        group.all_reduce(tensor).wait()
        took_ms = 1e3 * (time.monotonic() - started_at)
        correct = bool((tensor == group.size * (group.size + 1) / 2).all())
        self._note(
            "ok" if correct else "FAIL",
            f"all-reduce of {tensor.nbytes >> 20} MiB over TCP: {took_ms:.0f} ms, "
            f"result {'correct' if correct else 'WRONG'}",
        )

    def _suggest(self, links: list[Link], parameters: int, step_ms: float) -> None:
        slowest = min(link.mbit_per_s for link in links)
        self._say(
            f"the slowest link has {slowest:.0f} Mbit/s; with {parameters:,} parameters and {step_ms:g} ms an iteration"
        )
        for how, codec in (("levels2", "levels2"), ("minmax8", "minmax8"), ("float32", "none")):
            transfer_s = codec_of(codec).element_nbytes * parameters * 8 / (slowest * 1e6)
            iterations = transfer_s / (step_ms / 1e3)
            period, _ = best_schedule(Exchange(0.0, iterations), self._place.nodes)
            self._say(
                f"      a model in {how} takes {transfer_s:.2f} s, as long as {iterations:.2g} iterations: "
                f"a period of about {period} in a long run"
            )
        latency_s = max(link.round_trip_ms for link in links) / 2e3
        for line in estimate.lines(parameters, step_ms / 1e3, estimate.Link(slowest * 1e6, latency_s), WHOLE_STEPS):
            self._say(f"      {line}")

    def _part(self, store: TCPStore) -> None:
        """Keep node 0's store until all nodes are done with it."""
        store.set(f"done{self._place.node}", "")
        if self._place.node == 0:
            store.wait([f"done{node}" for node in range(self._place.nodes)], timedelta(seconds=MEET_WITHIN_S))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


def _measure(group: TcpGroup, target: int) -> Link:
    """Time messages to ``target``, which calls :func:`_answer`."""
    clock = torch.empty(1, dtype=torch.float64)
    trips_s, ahead_s = [], []
    for _ in range(PING_COUNT):
        started_at, clock_s = time.monotonic(), time.time()
        group.exchange({target: torch.ones(PING_NBYTES, dtype=torch.uint8)}, {target: clock})
        trips_s.append(time.monotonic() - started_at)
        ahead_s.append(float(clock) - (clock_s + trips_s[-1] / 2))
    trip_s = statistics.median(trips_s)
    nbytes, tries, best_s = SMALLEST_NBYTES, LINK_TRIES, math.inf
    while tries:
        data = torch.zeros(nbytes, dtype=torch.uint8)
        started_at = time.monotonic()
        group.exchange({target: data}, {target: clock})
        took_s = max(time.monotonic() - started_at - trip_s, 1e-9)
        if took_s < LINK_FOR_S and nbytes < LARGEST_NBYTES and tries == LINK_TRIES:
            nbytes *= 4
        else:
            tries, best_s = tries - 1, min(best_s, took_s)
        group.exchange({target: torch.tensor([nbytes if tries else 0])}, {})
    return Link(target, 1e3 * trip_s, statistics.median(ahead_s), nbytes * 8 / best_s / 1e6)


def _answer(group: TcpGroup, source: int) -> None:
    """Answer each message of :func:`_measure` with the current time."""
    following = torch.tensor([SMALLEST_NBYTES])
    sizes = [PING_NBYTES] * PING_COUNT
    while nbytes := sizes.pop() if sizes else int(following):
        group.exchange({}, {source: torch.empty(nbytes, dtype=torch.uint8)})
        group.exchange({source: torch.tensor([time.time()], dtype=torch.float64)}, {})
        if nbytes > PING_NBYTES:
            group.exchange({}, {source: following})
