"""``lsgd launch``: starts, shows and ends everything that one node runs.

This process is the node's local server. It starts the workers and, on node 0, the global server. The workers learn
who they are from variables: ``LSGD_LOCAL`` (the local server's address), ``LSGD_NODE``, ``LSGD_LOCAL_RANK``,
``LSGD_RANK`` and ``LSGD_WORKERS`` (as if all nodes had as many workers), ``LSGD_DEVICE``, ``LSGD_RUN_DIR``, and
``LSGD_RESUME`` for a resumed run. A worker of several processes has a parent
process (:mod:`lsgd.node.island`), so each worker is one process here.
"""

import os
import re
import secrets
import shlex
import shutil
import signal
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lsgd import processors, run_folder
from lsgd.errors import ConfigError, ProtocolError
from lsgd.node import gpus, storing
from lsgd.node.elsewhere import Elsewhere, Knock, dial
from lsgd.node.local_server import LocalServer
from lsgd.node.node import Node
from lsgd.node.panel import Panel
from lsgd.node.place import NAME_WITHIN_S, place_to_serve, resolve
from lsgd.node.place import Place as NodePlace
from lsgd.node.process import LSGD, Command, Process, Role
from lsgd.node.screen import LAUNCHER, Screen, show
from lsgd.node.transcript import Reading, Transcript, own_lines
from lsgd.plan import plan
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import (
    OPERATOR,
    TOKEN_VARIABLE,
    KeyRing,
    adopted_folder,
    connector_keys,
    default_folder,
    is_local,
    is_there,
    node_name,
    parse_token,
    token_path,
)
from lsgd.protocol.messages import Place, worker_name
from lsgd.protocol.ports import hold, hold_or_any, port_of
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.protocol.socket_folder import SOCKET_NAME, socket_folder
from lsgd.protocol.sockets import ConnectorKeys, Listener
from lsgd.run_folder import CHECKPOINTS, JOURNAL, claimed, is_unfinished, runs
from lsgd.server.daemon import Signals
from lsgd.server.journal import Journal, taken_over
from lsgd.watch import results
from lsgd.watch.curves import check

TOKEN_WITHIN_S = 60.0
"""How long a node waits for node 0 to write its token to a shared folder."""

LAST_PORT = 65535
"""The highest port there is."""

_INDEX = re.compile(r"(?<!\S)NODE(?!\S)")  # where the index of a node stands in the line that starts it
_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+")
"""Variables of torchrun, which may have started this launcher: the workers are not in that group."""

_SERVER = (sys.executable, "-P", "-m", "lsgd.server")
_ISLAND = (sys.executable, "-P", "-m", "lsgd.node.island")
RESTARTS = 5
"""How often a process killed by a signal is restarted within ten minutes."""


@dataclass(frozen=True)
class LaunchSettings:
    """What one node runs.

    Args:
        port: TCP port of the global server; 0: any free port (one node only).
        devices: device of each process, grouped by worker.
        plan_path: the plan; only node 0's counts.
        command: program of each worker, and its arguments.
        join_line: command that starts another node, to print; NODE stands for its index.
        resume: whether to continue from the checkpoints in ``run_dir``, with the plan there if no other is given; on
            node 0 without any, from the journal there.
        resume_if_any: whether the command line asks for that if there is anything to continue from.
        log_to: loggers that write the run's curves, on node 0.
        dashboard: port of the run's page, on node 0; 0: any; None: no page.
        plain: whether to print lines only, even on a terminal.
        processes: number of processes per worker; several share a model, or hold replicas of one.
        torchrun: whether a single process, too, gets torchrun's variables.
        store: URL to which this node's files are uploaded; empty: none.
        door: arguments of the process through which other machines join (``lsgd up``); empty: none, and node 0 prints
            the lines that start the other nodes.
    """

    place: NodePlace
    port: int
    devices: tuple[str, ...]
    plan_path: Path | None
    run_dir: Path
    command: tuple[str, ...]
    insecure: bool = False
    join_line: str = ""
    resume: bool = False
    resume_if_any: bool = False
    log_to: tuple[str, ...] = ()
    dashboard: int | None = None
    plain: bool = False
    processes: int = 1
    torchrun: bool = False
    store: str = ""
    door: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers on this node."""
        return len(self.devices) // self.processes

    @property
    def continues(self) -> bool:
        """Whether it resumes from the journal: other nodes may still have the model, and there is no checkpoint."""
        saved = runs(self.run_dir / CHECKPOINTS)
        return self.resume and self.place.nodes > 1 and not saved and is_unfinished(self.run_dir)


def launch(settings: LaunchSettings) -> int:
    """Run the servers and workers of this node until they end; return the exit status.

    Raises:
        ConfigError: an address, the port, the plan, the run folder or the command is unusable.
    """
    raise_descriptor_limit()
    place = settings.place
    environ = {
        **{name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
    }
    if not shutil.which(settings.command[0], path=environ["PATH"]):
        name = settings.command[0]
        script = Path(name).suffix == ".py" and Path(name).is_file()
        hint = f"; type: lsgd launch -- python {shlex.join(settings.command)}" if script else ""
        raise ConfigError(f"the command {name!r} was not found or is not executable{hint}")
    with ExitStack() as held:
        return _launch(settings, _network_address(place, settings.port, held), environ, held)


def _launch(settings: LaunchSettings, network: str, environ: dict[str, str], held: ExitStack) -> int:
    """Do so at node 0's address. ``held``: holds the ports of this node's servers."""
    place = settings.place
    if place.node == 0:
        if not settings.resume and runs(settings.run_dir / CHECKPOINTS):
            raise ConfigError(
                f"{settings.run_dir} has the checkpoints of an earlier run: resume it with --resume (RESUME=1), "
                f"or name another folder with --run-dir (RUN_NAME)"
            )
        check(settings.log_to)
    if settings.store:
        node = 0 if settings.resume_if_any else None  # what others have there may be used, with a new run's node 0
        storing.check(settings.store, new=place.node == 0 and not settings.resume, node=node)
    arguments, keys, lines = _access(settings, network)
    servers = _shared_servers(settings, network, arguments) if place.node == 0 else {}
    known = run_folder.known(settings.run_dir, place.node) if place.node else []
    with claimed(settings.run_dir, place.node, network):
        if place.node == 0 and not settings.continues:
            for old in settings.run_dir.glob(f"{JOURNAL}*"):  # of an earlier run with this folder
                old.unlink()
            results.clear(settings.run_dir, resume=settings.resume)
        _show_tokens(lines, settings.run_dir)
        store = storing.Storing(settings.store, settings.run_dir, place.node, environ) if settings.store else None
        with ExitStack() as after:
            (status, *end), serves = _run(settings, network, known, keys, servers, environ, store, after, held)
            if serves:
                lines = results.finish(settings.run_dir, status, *end)
                show("".join(f"{LAUNCHER}{line}\n" for line in lines), sys.stdout)
            if store is not None:
                store.finish()
        return status


def _run(
    settings: LaunchSettings,
    network: str,
    known: Sequence[Place],
    keys: ConnectorKeys | None,
    servers: Mapping[str, Sequence[str]],
    environ: dict[str, str],
    store: storing.Storing | None,
    after: ExitStack,
    held: ExitStack,
) -> tuple[tuple[int, str, str], bool]:
    """Return the node's exit status, how the run ended (as :meth:`Node.conclude`), and whether it served it last.

    ``known``: where an earlier launcher of this node has known the global server, or where it could have moved.
    ``after``: takes what handles signals from the run's end on. ``held``: holds the ports of this node's servers.
    """
    name, folder = node_name(settings.place.node), socket_folder()
    local, incarnation = f"ipc://{folder / SOCKET_NAME}", secrets.randbits(63)
    environ.pop(TOKEN_VARIABLE, None)  # the training script must not see it
    commands = [*_servers(settings, servers, environ), *_workers(settings, local, environ)]
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = opened.enter_context(Listener(local))
        connect = partial(dial, f"{name}#{incarnation}".encode(), keys)
        first = Place(0, network, keys.server if keys else b"")
        link = connect(first)
        screen = opened.enter_context(closing(Screen(plain=settings.plain)))
        if store is not None:
            store.begin(partial(screen.line, ""))
            opened.callback(store.detach)
        reading = opened.enter_context(closing(Reading()))
        say = own_lines(Transcript(screen, name, _log(settings, name), -1, False, again=settings.resume), reading)
        panel = None
        commands += _observers(settings, network, environ)
        if settings.place.node == 0:
            panel = Panel(screen, network, insecure=settings.insecure) if screen.is_terminal else None
        tell = (lambda words: None) if settings.place.node == 0 else say  # the global server's lines are here
        offer = place_to_serve(settings.place, network, held)
        place = settings.place.node, incarnation, listener, link, settings.workers
        knock = Knock()
        opened.callback(knock.close)
        own = Place(settings.place.node, offer, keys.public if keys else b"") if offer else None
        elsewhere = Elsewhere(settings.place.node, connect, knock, own, [first, *(p for p in known if p.node >= 0)])
        moved = partial(run_folder.moved, settings.run_dir, settings.place.node)
        server = LocalServer(
            *place, say=tell, complain=say, place=offer, serves=bool(servers), elsewhere=elsewhere, when_moved=moved
        )
        opened.callback(server.disconnect)
        start = partial(Process, screen=screen, reading=reading)
        serve = partial(_take_over, settings, server, offer, keys, environ, held)
        node = Node(
            name, commands, server, start, screen.say, panel=panel, shared=settings.place.nodes > 1, serve=serve
        )
        signals = Signals(signal.SIGHUP)
        after.callback(signals.restore)
        node.run(signals)
        if store is not None:
            after.enter_context(store.noticing())
            signals.restore(signal.SIGINT)
        else:
            signals.restore()
    return node.conclude(), node.serves


def _take_over(
    settings: LaunchSettings,
    local: LocalServer,
    offer: str,
    keys: ConnectorKeys | None,
    environ: Mapping[str, str],
    held: ExitStack,
) -> Sequence[Command]:
    """Return the servers with which this node serves the run, from its copy of the journal, at the place it offered.

    Raises:
        ConfigError: the place is taken, or the journal or the keys cannot be written.
    """
    node, folder = settings.place.node, settings.run_dir
    path = folder / f"node{node}-{JOURNAL}"
    host, port = place_of(offer)
    held.enter_context(hold(host, port))  # again, in case somebody listens there after all
    try:
        state, rounds = local.copy.load()
        for old in folder.glob(f"{path.name}*"):
            old.unlink()
        with closing(Journal(path)) as journal:
            journal.save(taken_over(state, local.next_terms()), rounds)
    except (OSError, sqlite3.Error, ProtocolError) as error:
        raise ConfigError(f"the journal {path} cannot be written: {error}") from None
    access = ["--insecure"] if settings.insecure else []
    if keys is not None:
        ring = KeyRing.adopt(adopted_folder(folder, node), keys.secret, local.copy.allowed, local.copy.certificate)
        access = ["--keys", str(ring.folder)]
    relay_port = port_of(held.enter_context(hold_or_any(host, port + 1))) if local.relay[0] else 0
    servers = _serving(offer, path, relay_port, access, "--continue")
    return [replace(command, restart_arguments=(), appends=True) for command in _servers(settings, servers, environ)]


def _servers(
    settings: LaunchSettings, servers: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> Iterator[Command]:
    for name, arguments in servers.items():
        yield Command(
            name,
            [*_SERVER, *arguments],
            environ,
            _log(settings, name),
            role=Role.RELAY if name == "relay" else Role.SERVER,
            restarts=RESTARTS,
            appends=settings.resume,
            restart_arguments=["--continue"] if name == "global" else [],
            ignores_term=bool(settings.place.starter),
        )


def _network_address(place: NodePlace, port: int, held: ExitStack) -> str:
    """Return where the global server listens; on node 0, ``held`` holds the port from now on."""
    if port == 0 and place.nodes > 1:
        raise ConfigError("port 0 (any free port) works for one node only; with more, every node must know the port")
    if port == LAST_PORT and place.nodes > 1:
        raise ConfigError(f"port {port} leaves none for the relay, which takes the next one: choose a lower one (PORT)")
    ip = resolve(place.address, place.nodes, NAME_WITHIN_S if place.nodes > 1 else 0.0)
    if place.node == 0:
        port = port_of(held.enter_context(hold(ip, port)))
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def _access(settings: LaunchSettings, network: str) -> tuple[list[str], ConnectorKeys | None, list[str]]:
    """Return the global server's key arguments, this node's keys, and lines to print; empty without keys.

    Node 0 makes the keys of all nodes and returns the commands that start the others. Another node waits until its
    token exists, in case it shares the key folder with node 0.
    """
    place = settings.place
    if settings.insecure:
        return ["--insecure"], None, []
    if is_local(network):
        return [], None, []
    folder, name = default_folder(), node_name(place.node)
    if place.node == 0:
        ring = KeyRing.make(folder, [*map(node_name, range(place.nodes)), OPERATOR])
        lines = [
            f"node {node} joins with: {TOKEN_VARIABLE}={ring.token(node_name(node))} "
            f"{_INDEX.sub(str(node), settings.join_line, count=1)}"
            for node in range(1, place.nodes)
            if not (place.starter or settings.door)  # these start the others, and may store our output for all to read
        ]
        return ["--keys", str(folder)], parse_token(ring.token(name), f"the token of {name}"), lines
    path = token_path(name)
    if not os.environ.get(TOKEN_VARIABLE) and not is_there(path):
        print(
            f"{LAUNCHER}this node needs a token: set LSGD_TOKEN, or share a folder of keys with node 0 (LSGD_KEYS). "
            f"Waiting {TOKEN_WITHIN_S:g} s for {path}",
            flush=True,
        )
        deadline_s = time.monotonic() + TOKEN_WITHIN_S
        while not is_there(path) and time.monotonic() < deadline_s:
            time.sleep(0.1)
    return [], connector_keys(network, None, name, insecure=False), []


def _show_tokens(lines: Sequence[str], run_dir: Path) -> None:
    """Write the lines that start the other nodes to a private file; print them unless others can read our output."""
    if not lines:
        return
    output = os.fstat(sys.stdout.fileno())
    shown = not (stat.S_ISREG(output.st_mode) and output.st_mode & 0o077)
    if shown:
        print(*(f"{LAUNCHER}{line}" for line in lines), sep="\n", flush=True)
    path = run_dir / "join.txt"
    path.unlink(missing_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError as error:
        where = f"{default_folder()}, because {path} cannot be written: {error.strerror}"
    else:
        where = str(path)
    why = "the same lines are" if shown else "others can read this output, so the other nodes' tokens are"
    print(f"{LAUNCHER}{why} in {where}", flush=True)


def _shared_servers(settings: LaunchSettings, network: str, keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments, by name, of the servers that node 0 runs for all nodes: with a relay if it can help.

    The global server waits for the workers of all nodes, or for as many as the plan says.
    """
    used = settings.run_dir / "plan.toml"
    keeps_plan = settings.plan_path is None and settings.resume and used.exists()
    path = used if keeps_plan else settings.plan_path
    nodes, sourced = settings.place.nodes, plan.read(path, os.environ, {})
    more = ["--save-plan", str(used), "--nodes", str(nodes)]
    if settings.continues:
        more += ["--continue"]
    if path:
        more += ["--plan", str(path)]
    is_old = keeps_plan and sourced.origins.get("workers", "") == f"the plan {path}"  # the earlier run's number
    if is_old:
        more += ["--workers", "0"]
    if nodes > 1 and (is_old or not sourced.plan.run.workers) and not settings.continues:
        print(
            f"{LAUNCHER}the run begins when the workers of all {nodes} nodes have joined; to begin with N workers, "
            f"start this node with LSGD_WORKERS=N",
            flush=True,
        )
    has_relay = nodes > 1 and sourced.plan.run.transport in ("auto", "tcp")
    relay_port = place_of(network)[1] + 1 if has_relay else 0
    return _serving(network, settings.run_dir / JOURNAL, relay_port, keys, *more)


def _serving(address: str, journal: Path, relay_port: int, access: Sequence[str], *more: str) -> dict[str, list[str]]:
    """Return the arguments, by name, of the global server at an address, and of the relay unless its port is 0.

    ``access``: those about keys; ``more``: others of the global server.
    """
    arguments = ["--global", "--launched", "--listen", address, "--journal", str(journal)]
    arguments += ["--results", str(journal.parent), *access, *more]
    if not relay_port:
        return {"global": arguments}
    relay = f"{address.rpartition(':')[0]}:{relay_port}"
    return {"global": [*arguments, "--relay-address", relay], "relay": ["--relay", "--listen", relay, *access]}


def _workers(settings: LaunchSettings, local: str, environ: Mapping[str, str]) -> list[Command]:
    node = settings.place.node
    threads = max(1, processors.usable() // len(settings.devices))
    commands = []
    for index in range(settings.workers):
        name = worker_name(node, index)
        arguments, devices = _worker(settings, index)
        variables = {
            **environ,
            **devices,
            "LSGD_LOCAL": local,
            "LSGD_NODE": str(node),
            "LSGD_LOCAL_RANK": str(index),
            "LSGD_RANK": str(node * settings.workers + index),
            "LSGD_WORKERS": str(settings.place.nodes * settings.workers),
            "LSGD_RUN_DIR": str(settings.run_dir),
            "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(threads),
            "THP_MEM_ALLOC_ENABLE": environ.get("THP_MEM_ALLOC_ENABLE", "1"),  # huge pages for tensors on a CPU
        }
        if settings.resume:
            variables["LSGD_RESUME"] = str(settings.run_dir / CHECKPOINTS)
        commands.append(
            Command(
                name,
                arguments,
                variables,
                _log(settings, name),
                on_terminal=node == index == 0,
                restarts=RESTARTS,
                appends=settings.resume,
                checkpoints=settings.run_dir / CHECKPOINTS,
                ignores_term=bool(settings.place.starter),
            )
        )
    return commands


def _worker(settings: LaunchSettings, index: int) -> tuple[Sequence[str], dict[str, str]]:
    """Return the arguments of a worker's command, and the variables with its devices."""
    devices = settings.devices[index * settings.processes : (index + 1) * settings.processes]
    if settings.processes == 1 and not settings.torchrun:
        return settings.command, {"LSGD_DEVICE": devices[0]}
    devices, visible = gpus.own(devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    shown = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    return [*_ISLAND, ",".join(devices), "--", *settings.command], shown


def _observers(settings: LaunchSettings, network: str, environ: Mapping[str, str]) -> Iterator[Command]:
    insecure, ignores_term = ["--insecure"] * settings.insecure, bool(settings.place.starter)
    if settings.door:
        yield Command("door", [*LSGD, "door", *settings.door], environ, _log(settings, "door"), role=Role.PAGE)
    if settings.place.node:
        return
    if settings.log_to:
        arguments = [*LSGD, "log", "--connect", network, "--out", str(settings.run_dir), *insecure]
        arguments += [part for name in settings.log_to for part in ("--to", name)]
        log, appends = _log(settings, "logger"), settings.resume
        yield Command("logger", arguments, environ, log, role=Role.OBSERVER, appends=appends, ignores_term=ignores_term)
    if settings.dashboard is not None:
        arguments = [*LSGD, "dashboard", "--run", str(settings.run_dir), "--parent", str(os.getpid()), *insecure]
        arguments += ["--port", str(settings.dashboard)] * (settings.dashboard > 0)
        log = _log(settings, "dashboard")
        yield Command("dashboard", arguments, environ, log, role=Role.PAGE, ignores_term=ignores_term)


def _log(settings: LaunchSettings, name: str) -> Path:
    return settings.run_dir / f"{name.replace('/', '-')}.log"
