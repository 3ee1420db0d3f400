"""What one node runs: the settings of a launch, and the commands of the processes that follow from them."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lsgd import processors
from lsgd.node import gpus
from lsgd.node.place import Place
from lsgd.node.process import LSGD, Command, Role
from lsgd.protocol.messages import worker_name
from lsgd.run_folder import CHECKPOINTS, is_unfinished, runs

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
        alert: command or address that is told of what goes wrong, from node 0; empty: nobody is.
        dashboard: port of the run's page, on node 0; 0: any; None: no page.
        plain: whether to print lines only, even on a terminal.
        processes: number of processes per worker; several share a model, or hold replicas of one.
        torchrun: whether a single process, too, gets torchrun's variables.
        store: URL to which this node's files are uploaded; empty: none.
        door: arguments of the process through which other machines join (``lsgd up``); empty: none, and node 0 prints
            the lines that start the other nodes.
        verbose: whether details are shown, and not only written to the logs.
    """

    place: Place
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
    alert: str = ""
    dashboard: int | None = None
    plain: bool = False
    processes: int = 1
    torchrun: bool = False
    store: str = ""
    door: tuple[str, ...] = ()
    verbose: bool = False

    @property
    def workers(self) -> int:
        """Number of workers on this node."""
        return len(self.devices) // self.processes

    @property
    def continues(self) -> bool:
        """Whether it resumes from the journal: other nodes may still have the model, and there is no checkpoint."""
        saved = runs(self.run_dir / CHECKPOINTS)
        return self.resume and self.place.nodes > 1 and not saved and is_unfinished(self.run_dir)


def server_commands(
    settings: LaunchSettings, servers: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> Iterator[Command]:
    """Yield the commands of servers, given their arguments by name."""
    for name, arguments in servers.items():
        yield Command(
            name,
            [*_SERVER, *arguments],
            environ,
            log_of(settings, name),
            role=Role.RELAY if name == "relay" else Role.SERVER,
            restarts=RESTARTS,
            appends=settings.resume,
            restart_arguments=["--continue"] if name == "global" else [],
            ignores_term=bool(settings.place.starter),
        )


def worker_commands(settings: LaunchSettings, local: str, environ: Mapping[str, str]) -> list[Command]:
    """Return the commands of the workers; ``local``: address of their local server."""
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
                log_of(settings, name),
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


def observer_commands(settings: LaunchSettings, network: str, environ: Mapping[str, str]) -> Iterator[Command]:
    """Yield the commands of what follows the run of the global server at an address."""
    insecure, ignores_term = ["--insecure"] * settings.insecure, bool(settings.place.starter)
    if settings.door:
        yield Command("door", [*LSGD, "door", *settings.door], environ, log_of(settings, "door"), role=Role.PAGE)
    if settings.place.node:
        return
    if settings.log_to:
        arguments = [*LSGD, "log", "--connect", network, "--out", str(settings.run_dir), *insecure]
        arguments += [part for name in settings.log_to for part in ("--to", name)]
        log, appends = log_of(settings, "logger"), settings.resume
        yield Command("logger", arguments, environ, log, role=Role.OBSERVER, appends=appends, ignores_term=ignores_term)
    if settings.alert:
        arguments = [*LSGD, "alert", "--run", str(settings.run_dir), "--to", settings.alert, *insecure]
        log, appends = log_of(settings, "alert"), settings.resume
        yield Command("alert", arguments, environ, log, role=Role.OBSERVER, appends=appends, ignores_term=ignores_term)
    if settings.dashboard is not None:
        arguments = [*LSGD, "dashboard", "--run", str(settings.run_dir), "--parent", str(os.getpid()), *insecure]
        arguments += ["--port", str(settings.dashboard)] * (settings.dashboard > 0)
        log = log_of(settings, "dashboard")
        yield Command("dashboard", arguments, environ, log, role=Role.PAGE, ignores_term=ignores_term)


def log_of(settings: LaunchSettings, name: str) -> Path:
    """Return the log of a process."""
    return settings.run_dir / f"{name.replace('/', '-')}.log"
