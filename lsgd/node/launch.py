"""``lsgd launch``: starts, shows and ends everything that one node runs.

This process is the node's local server. It starts the workers and, on node 0, the global server. The workers learn
who they are from variables: ``LSGD_LOCAL`` (the local server's address), ``LSGD_NODE``, ``LSGD_LOCAL_RANK``,
``LSGD_RANK`` and ``LSGD_WORKERS`` (as if all nodes had as many workers), ``LSGD_DEVICE``, ``LSGD_RUN_DIR``, and
``LSGD_RESUME`` for a resumed run. A worker of several processes has a parent
process (:mod:`lsgd.node.island`), so each worker is one process here.
"""

import os
import re
import shlex
import shutil
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from lsgd import run_folder, stacks
from lsgd.errors import ConfigError, RunOverError
from lsgd.node import storing
from lsgd.node.commands import LaunchSettings, log_of, worker_commands
from lsgd.node.node import Node
from lsgd.node.place import NAME_WITHIN_S, Place, resolve
from lsgd.node.process import Process, Role
from lsgd.node.screen import LAUNCHER, Screen
from lsgd.node.stages import Serving, Stages, show_result
from lsgd.node.transcript import Reading, Transcript, own_lines
from lsgd.plan import plan
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import (
    OPERATOR,
    TOKEN_VARIABLE,
    KeyRing,
    connector_keys,
    default_folder,
    is_local,
    is_there,
    kept_token,
    node_name,
    parse_token,
    token_path,
)
from lsgd.protocol.messages import Endpoint
from lsgd.protocol.ports import hold, port_of
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.protocol.socket_folder import SOCKET_NAME, socket_folder
from lsgd.protocol.sockets import ConnectorKeys, Listener
from lsgd.run_folder import CHECKPOINTS, JOURNAL, claimed, runs, stage_name, stage_of
from lsgd.server.daemon import Signals
from lsgd.server.journal import new_run
from lsgd.watch import results
from lsgd.watch.curves import check

TOKEN_WITHIN_S = 60.0
"""How long a node waits for node 0 to write its token to a shared folder."""

LAST_PORT = 65535
"""The highest port there is."""

_INDEX = re.compile(r"(?<!\S)NODE(?!\S)")  # where the index of a node stands in the line that starts it
_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+")
"""Variables of torchrun, which may have started this launcher: the workers are not in that group."""


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
    access, keys, lines = _access(settings, network)
    serving = _shared_servers(settings, network, access, environ) if place.node == 0 else None
    known = run_folder.known(settings.run_dir, place.node) if place.node else []
    joins = place.node > 0 and keys is not None
    with claimed(settings.run_dir, place.node, network), kept_token(place.node, settings.run_dir, joins=joins):
        stacks.listen("launcher", settings.run_dir)
        if place.node == 0 and not settings.continues:
            for old in settings.run_dir.glob(f"{JOURNAL}*"):  # of an earlier run with this folder
                old.unlink()
            results.clear(settings.run_dir, resume=settings.resume)
        _show_tokens(lines, settings.run_dir)
        store = storing.Storing(settings.store, settings.run_dir, place.node, environ) if settings.store else None
        with ExitStack() as after:
            (status, *end), serves = _run(settings, network, known, keys, serving, environ, store, after, held)
            if serves:
                show_result(results.finish(settings.run_dir, status, *end))
            if store is not None:
                store.finish()
        return exit_code(status, place.starter)


def exit_code(status: int, starter: str) -> int:
    """Return this launcher's exit code: the node's, but not one with which its ``starter`` would end other nodes.

    Where all workers joined too late, those of others may still save.
    """
    if not starter or status != RunOverError.exit_code:
        return status
    print(f"{LAUNCHER}exit code 0 instead of {status}, so that {starter} lets the other nodes save", flush=True)
    return 0


def _run(
    settings: LaunchSettings,
    network: str,
    known: Sequence[Endpoint],
    keys: ConnectorKeys | None,
    serving: Serving | None,
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
    local = f"ipc://{folder / SOCKET_NAME}"
    environ.pop(TOKEN_VARIABLE, None)  # scripts print and log their environment
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = opened.enter_context(Listener(local))
        made = Screen(plain=settings.plain, verbose=settings.verbose, brief=settings.place.node > 0)
        screen = opened.enter_context(closing(made))
        if store is not None:
            store.begin(partial(screen.line, ""))
            opened.callback(store.detach)
        reading = opened.enter_context(closing(Reading()))
        own = own_lines(Transcript(screen, name, log_of(settings, name), -1, False, again=settings.resume), reading)
        stages = Stages(settings, network, keys, serving, environ, held, listener, screen, *own)
        opened.callback(stages.close)
        first = stages.begin([Endpoint(0, network, keys.server if keys else b""), *(p for p in known if p.node >= 0)])
        commands = [*first.commands, *worker_commands(settings, local, environ)]
        node = Node(
            name,
            sorted(commands, key=lambda command: command.role in (Role.OBSERVER, Role.PAGE)),
            first.local,
            partial(Process, screen=screen, reading=reading),
            screen.say,
            panel=first.panel,
            shared=settings.place.nodes > 1,
            serve=first.serve,
            following=stages.next,
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


def _network_address(place: Place, port: int, held: ExitStack) -> str:
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


def _shared_servers(
    settings: LaunchSettings, network: str, access: Sequence[str], environ: Mapping[str, str]
) -> Serving:
    """Return how node 0 serves all nodes: with a relay if it can help.

    The global server waits for the workers of all nodes, or for as many as the plan says. A resumed launch continues
    in the stage of its last checkpoint.
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
    if settings.resume and (stage := max(map(stage_of, runs(settings.run_dir / CHECKPOINTS)[:1]), default=1)) > 1:
        more += ["--run", stage_name(new_run(), stage), "0"]
    if nodes > 1 and (is_old or not sourced.plan.run.workers) and not settings.continues:
        print(
            f"{LAUNCHER}the run begins when the workers of all {nodes} nodes have joined; to begin with N workers, "
            f"start this node with LSGD_WORKERS=N",
            flush=True,
        )
    has_relay = nodes > 1 and sourced.plan.run.transport in ("auto", "tcp")
    relay_port = place_of(network)[1] + 1 if has_relay else 0
    return Serving(network, settings.run_dir / JOURNAL, relay_port, access, more, used, environ)
