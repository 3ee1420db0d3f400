"""``lsgd doctor``: whether these machines can train together, and how often they had better talk.

Started on each node with the same address and number of nodes, as ``lsgd launch`` is. The nodes meet in a key-value
store of torch's on node 0, at the port that the global server will have. Then each two neighbors (node k and k + 1, in
both directions) test the connection on a port of their own, one after the other, and all take part in one all-reduce.
"""

import json
import math
import os
import platform
import resource
import shutil
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from lsgd.client.control.identity import versions
from lsgd.client.control.network import Interface, interface_towards
from lsgd.client.groups.connections import Wires
from lsgd.client.groups.gloo import Meeting, gloo_group
from lsgd.client.launcher.place import Place, claim_port, resolve
from lsgd.errors import ConfigError
from lsgd.protocol.keys import TOKEN_VARIABLE, is_local, link_keys, node_name, token_path

MEET_WITHIN_S = 60.0
"""How long a node waits for the others."""

CONNECT_WITHIN_S = 5.0
LINK_FOR_S = 2.0
LINK_NBYTES = 64 << 20
"""A link is tested for so long, or with so many bytes, whichever is less."""

STEP_WITHIN_S = LINK_FOR_S + 4 * CONNECT_WITHIN_S
REDUCE_NUMEL = 1 << 18
"""Numbers in the all-reduce: 1 MiB of float32."""

PING_COUNT = 20
CLOCK_WARNING_S = 1.0
MIN_DESCRIPTORS = 1024
EXCHANGE_SHARE = 0.05
"""Share of the time that exchanges may take at the suggested period."""

_PING, _DATA = b"p", b"d"


@dataclass(frozen=True)
class Link:
    """What a node measured of the way to another: round trip, clock, and rate, or why it could not."""

    to: int
    round_trip_ms: float = math.nan
    clock_ahead_s: float = math.nan
    mbit_per_s: float = math.nan
    error: str = ""


class Doctor:
    """Examines one node, and with the others the network between them.

    Args:
        place: which node of how many, and the address of node 0.
        port: the global server's.
        say: takes the lines for people.
    """

    def __init__(self, place: Place, port: int, say: Callable[[str], None]) -> None:
        self._place = place
        self._port = port
        self._say = say
        self._failed = False

    def examine(self, parameters: int, step_ms: float) -> int:
        """Make all checks and say what they found; return 0, or 1 if something would keep a run from working.

        Args:
            parameters: of the model that the suggestion is for.
            step_ms: how long one of its iterations takes a worker, in milliseconds.
        """
        interface = self._look_here()
        if self._place.nodes == 1:
            self._note(
                "ok", "one node: no wire to test; on several, start this on each with --nodes and --address"
            )
        elif interface is not None and (store := self._meet(interface)) is not None:
            try:
                links = self._test_links(store, interface)
                self._reduce(store, interface)
                self._suggest(links, parameters, step_ms)
                self._part(store)
            except RuntimeError as error:
                self._note("FAIL", f"a node answers no more: {_first_line(error)}")
        self._say(
            "something above has to be mended first" if self._failed else "nothing is in the way of a run"
        )
        return int(self._failed)

    def _note(self, kind: str, text: str) -> None:
        self._failed |= kind == "FAIL"
        self._say(f"{kind:4}  {text}")

    # -- this machine ------------------------------------------------------------------------------------------

    def _look_here(self) -> Interface | None:
        """Check this machine; return the interface towards node 0 if there is one."""
        found = {"python": platform.python_version()} | {k: v for k, v in versions().items() if v}
        self._note("ok", "versions: " + ", ".join(f"{name} {version}" for name, version in found.items()))
        gpus = (
            [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if torch.cuda.is_available()
            else []
        )
        cores = len(os.sched_getaffinity(0))
        self._note("ok", f"{cores} cores, {', '.join(gpus) or 'no GPU that torch can use'}")
        free_gib = shutil.disk_usage(Path.cwd()).free / (1 << 30)
        self._note(
            "ok" if free_gib > 1 else "warn",
            f"{free_gib:.1f} GiB are free in {Path.cwd()}, for logs and checkpoints",
        )
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = limit >= MIN_DESCRIPTORS
        self._note(
            "ok" if enough else "warn",
            f"{limit} open files are allowed{'' if enough else ': ulimit -n 4096'}",
        )
        try:
            ip = resolve(self._place.address, self._place.nodes)
            interface = interface_towards(ip)
        except ConfigError as error:
            self._note("FAIL", str(error))
            return None
        self._note(
            "ok", f"tensors travel on {interface.address} ({interface.name}), because {interface.reason}"
        )
        self._check_keys(ip)
        return interface if self._check_port(ip) else None

    def _check_port(self, ip: str) -> bool:
        if self._place.node:
            return True
        try:
            claim_port(ip, self._port)
        except ConfigError as error:
            self._note("FAIL", str(error))
            return False
        self._note("ok", f"port {self._port} of {ip} is free for the global server")
        return True

    def _check_keys(self, ip: str) -> None:
        address, name = f"tcp://{ip}:{self._port}", node_name(self._place.node)
        path = token_path(name)
        if is_local(address):
            return
        if not (os.environ.get(TOKEN_VARIABLE) or path.exists()):
            self._note(
                "warn", f"there is no token of {name} yet: the launcher of node 0 makes it, or `lsgd keygen`"
            )
            return
        try:
            link_keys(address, None, name, insecure=False)
        except ConfigError as error:
            self._note("FAIL", str(error))
        else:
            self._note("ok", f"the token of {name} is there")

    # -- the nodes together ------------------------------------------------------------------------------------

    def _meet(self, interface: Interface) -> Meeting | None:
        """Return a store that all nodes see, when all are there and have said what they are."""
        place, wait = self._place, timedelta(seconds=MEET_WITHIN_S)
        self._say(f"...   waits up to {MEET_WITHIN_S:g} s for the other nodes")
        try:
            ip = resolve(place.address, place.nodes)
            store = Meeting(ip, self._port, place.nodes, place.node == 0, wait, wait_for_workers=False)
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
        self._note(
            "ok",
            "all are there: "
            + ", ".join(f"node{n} ({o['host']}, {o['address']})" for n, o in enumerate(others)),
        )
        for name, version in others[0]["versions"].items():
            different = {
                f"node{n}": o["versions"][name]
                for n, o in enumerate(others)
                if o["versions"][name] != version
            }
            if different:
                self._note(
                    "FAIL",
                    f"{name} {version or 'none'} on node0, {different}; install the same release on all",
                )
        return store

    def _test_links(self, store: Meeting, interface: Interface) -> list[Link]:
        """Test the ways between neighbors, one after the other; return what all nodes have found."""
        me, nodes = self._place.node, self._place.nodes
        ways = [(k, k + 1) for k in range(nodes - 1)] + [(k + 1, k) for k in range(nodes - 1)]
        found = []
        with _answering(interface.address) as port:
            store.set(f"port{me}", f"{interface.address} {port}")
            for step, (source, target) in enumerate(ways):
                key = f"link{step}"
                if source == me:
                    address, number = store.get(f"port{target}").decode().split()
                    store.set(key, json.dumps(vars(_test(target, address, int(number)))))
                store.wait([key], timedelta(seconds=STEP_WITHIN_S))
                link = Link(**json.loads(store.get(key)))
                self._tell(source, link)
                found.append(link)
        return found

    def _tell(self, source: int, link: Link) -> None:
        way = f"node{source} to node{link.to}"
        if link.error:
            self._note("FAIL", f"{way}: {link.error}")
            return
        ahead = link.clock_ahead_s
        self._note("ok", f"{way}: {link.mbit_per_s:.0f} Mbit/s, round trip {link.round_trip_ms:.2f} ms")
        if abs(ahead) > CLOCK_WARNING_S:
            self._note(
                "warn",
                f"the clock of node{link.to} is {ahead:+.1f} s from node{source}'s: logs are hard to compare",
            )

    def _reduce(self, store: Meeting, interface: Interface) -> None:
        me, nodes = self._place.node, self._place.nodes
        tensor = torch.full((REDUCE_NUMEL,), float(me + 1))
        try:
            names = [node_name(node) for node in range(nodes)]
            group = gloo_group(store, "doctor", me, names, interface.address, MEET_WITHIN_S, Wires())
            group.barrier().wait()
            started_at = time.monotonic()
            group.allreduce([tensor]).wait()
            took_ms = 1e3 * (time.monotonic() - started_at)
        except RuntimeError as error:
            self._note("FAIL", f"an all-reduce over Gloo failed: {_first_line(error)}")
            return
        right = bool((tensor == nodes * (nodes + 1) / 2).all())
        self._note(
            "ok" if right else "FAIL",
            f"all-reduce of {tensor.nbytes >> 20} MiB over Gloo: {took_ms:.0f} ms, {'right' if right else 'WRONG'}",
        )

    def _suggest(self, links: list[Link], parameters: int, step_ms: float) -> None:
        """Say how rarely to exchange, by the slowest link."""
        rates = [link.mbit_per_s for link in links if not link.error]
        if not rates:
            return
        self._say(
            f"the slowest link has {min(rates):.0f} Mbit/s; with {parameters:,} parameters and {step_ms:g} ms an "
            f"iteration"
        )
        for how, nbytes in (("float32", 4 * parameters), ("minmax8", parameters)):
            transfer_s = nbytes * 8 / (min(rates) * 1e6)
            period = suggested_period(transfer_s, step_ms / 1e3)
            self._say(
                f"      a model in {how} takes {transfer_s:.2f} s: --period {period} keeps exchanges below "
                f"{EXCHANGE_SHARE:.0%} of the time"
            )

    def _part(self, store: Meeting) -> None:
        """Keep node 0's store until all have read what they want."""
        store.set(f"done{self._place.node}", "")
        if self._place.node == 0:
            store.wait([f"done{node}" for node in range(self._place.nodes)], timedelta(seconds=STEP_WITHIN_S))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:120]


def suggested_period(transfer_s: float, step_s: float) -> int:
    """Return the least power of two of iterations between exchanges that keeps these below :data:`EXCHANGE_SHARE`."""
    return int(2 ** max(0, math.ceil(math.log2(transfer_s / step_s / EXCHANGE_SHARE))))


@contextmanager
def _answering(address: str) -> Iterator[int]:
    """Answer tests on a port of this address, which is the value."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(0.2)
        over = threading.Event()
        thread = threading.Thread(target=_answer_all, args=(server, over), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            over.set()
            thread.join()


def _answer_all(server: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(CONNECT_WITHIN_S)
            try:
                _answer(connection)
            except OSError:
                continue  # the other side says what went wrong


def _answer(connection: socket.socket) -> None:
    """Answer each ping with the time of day, and data with how many bytes there were and how long they took."""
    while kind := connection.recv(1):
        if kind == _PING:
            connection.sendall(struct.pack("!d", time.time()))
            continue
        got, started_at = 0, time.monotonic()
        while data := connection.recv(1 << 20):
            got += len(data)
        connection.sendall(struct.pack("!Qd", got, time.monotonic() - started_at))
        return


def _test(to: int, address: str, port: int) -> Link:
    """Measure the way to a node that answers at this address."""
    try:
        with socket.create_connection((address, port), CONNECT_WITHIN_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips_s, ahead_s = zip(*[_ping(connection) for _ in range(PING_COUNT)], strict=True)
            connection.sendall(_DATA)
            block, sent, until = bytes(1 << 16), 0, time.monotonic() + LINK_FOR_S
            while sent < LINK_NBYTES and time.monotonic() < until:
                connection.sendall(block)
                sent += len(block)
            connection.shutdown(socket.SHUT_WR)
            got, took_s = struct.unpack("!Qd", _read(connection, 16))
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        return Link(
            to, error=f"{address}:{port} cannot be used ({why}); open the ports above 1023 between the nodes"
        )
    return Link(
        to, 1e3 * statistics.median(trips_s), statistics.median(ahead_s), got * 8 / max(took_s, 1e-9) / 1e6
    )


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Return the time of a round trip, and how far the other's clock is ahead, in seconds."""
    started_at, clock_s = time.monotonic(), time.time()
    connection.sendall(_PING)
    (theirs_s,) = struct.unpack("!d", _read(connection, 8))
    trip_s = time.monotonic() - started_at
    return trip_s, theirs_s - (clock_s + trip_s / 2)


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        if not (more := connection.recv(nbytes - len(data))):
            raise ConnectionResetError("the other side hung up")
        data += more
    return data
