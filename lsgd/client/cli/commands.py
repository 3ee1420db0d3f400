"""``lsgd``: the command line of those who train."""

import functools
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from lsgd import __version__
from lsgd.algorithms import ALGORITHMS
from lsgd.client.checkpoint.run_folder import find_live, find_run
from lsgd.client.cli import completion, operate, quickstart, runs
from lsgd.client.cli.group import Group, Main, first_steps
from lsgd.client.launcher import gpus
from lsgd.client.launcher.launch import Launch, launch
from lsgd.client.launcher.place import find_place
from lsgd.client.watch.view import RunView
from lsgd.plan import plan
from lsgd.plan.options import plan_options
from lsgd.protocol.keys import OPERATOR, KeyRing, connector_keys, default_folder, node_name, token_path
from lsgd.protocol.messages import ChangeSettings, StatusQuery, StopRun
from lsgd.protocol.sockets import DEFAULT_PORT, ConnectorKeys
from lsgd.settings import fields, shown, span

DEVICE_HELP = "auto, cpu, cuda, or one GPU: cuda:0."
PLAIN_HELP = "Lines alone, as where there is no terminal: no progress below them, no colours."


@click.group(cls=Main, context_settings={"max_content_width": 110}, invoke_without_command=True)
@click.version_option(__version__)
@click.pass_context
def main(context: click.Context) -> None:
    """Train one PyTorch model on several machines with local SGD."""
    if context.invoked_subcommand is None:
        click.echo(first_steps())


@main.command("quickstart", short_help="Train the example on this machine.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the script and the results; else runs/ and the time of the start.",
)
@click.option("--device", default="auto", show_default=True, shell_complete=completion.devices, help=DEVICE_HELP)
@click.option("--plain", is_flag=True, help=PLAIN_HELP)
def quickstart_command(run_dir: Path | None, device: str, plain: bool) -> None:
    """Train the example, handwritten digits, with two workers on this machine.

    Its script and its plan are then beside the results, to be changed and run again.
    """
    sys.exit(quickstart.quickstart(run_dir or _new_run_dir(), device, plain=plain))


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command of a node the options for :func:`find_place`."""
    for option in (
        click.option("--address", help="Address of node 0, the same on all nodes; under srun the first host."),
        click.option("--nodes", type=click.IntRange(1), help="Number of nodes; under srun Slurm's, else 1."),
        click.option("--node", type=click.IntRange(0), help="Index of this node, from 0; under srun Slurm's."),
    ):
        command = option(command)
    return command


@main.command("launch", short_help="Run a script as each worker of this machine.")
@_place
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"TCP port of the global server; else {DEFAULT_PORT}, or any that is free (0) if there is one node.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Workers of this node; else one for each GPU, or {gpus.CPU_WORKERS} where there is none.",
)
@click.option("--device", default="auto", show_default=True, shell_complete=completion.devices, help=DEVICE_HELP)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan, a TOML file (node 0's).")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Folder for logs and results; else runs/ and the time of the start.",
)
@click.option("--insecure", is_flag=True, help="Go without keys on a network where everybody is trusted.")
@click.option(
    "--join-line",
    metavar="TEXT",
    help="How another node is started, for the lines that node 0 prints; NODE stands for its index.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the checkpoints in --run-dir, or of the newest run in it (else in runs/), with its plan.",
)
@click.option("--plain", is_flag=True, help=PLAIN_HELP)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=completion.files)
def launch_command(
    node: int | None,
    nodes: int | None,
    address: str | None,
    port: int | None,
    workers: int | None,
    device: str,
    plan_path: Path | None,
    run_dir: Path | None,
    insecure: bool,
    join_line: str | None,
    resume: bool,
    plain: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as each worker of this node, and the servers that they need.

    The global server is a part of node 0, which makes keys for all nodes, and prints the line that starts each other
    one with its token.

    \b
        lsgd launch --node 0 -- python train.py
        srun --ntasks-per-node=1 lsgd launch -- python train.py

    Ctrl-C or SIGTERM stops the run cleanly: the workers make the consensus model and leave; a second one ends all
    processes at once. If a process fails, the run is stopped in the same way, and its exit code is the launcher's.
    """  # noqa: D301
    if not command:
        raise click.UsageError("say what each worker runs: lsgd launch -- python my_script.py")
    place = find_place(node, nodes, address, os.environ)
    if port is None:
        port = DEFAULT_PORT if place.nodes > 1 else 0
    devices = gpus.choose(device, workers)
    if resume:
        run_dir = find_run(run_dir or Path("runs"), place.node)
        click.echo(f"[launch] goes on from the checkpoints in {run_dir}")
    run_dir = (run_dir or _new_run_dir()).absolute()
    if devices.warning:
        click.echo(f"[launch] {devices.warning}", err=True)
    click.echo(
        f"[launch] node {place.node} of {place.nodes}: {len(devices.names)} "
        f"worker{'s' * (len(devices.names) > 1)} on {', '.join(dict.fromkeys(devices.names))}; "
        f"logs and results in {run_dir}"
    )
    options = f"--nodes {place.nodes} --address {place.address} --port {port}{' --resume' * resume}"
    join_line = join_line or f"lsgd launch --node NODE {options} -- {shlex.join(command)}"
    sys.exit(
        launch(Launch(place, port, devices.names, plan_path, run_dir, command, insecure, join_line, resume, plain))
    )


def _new_run_dir() -> Path:
    return Path("runs", time.strftime("%Y%m%d-%H%M%S"))


def _connect(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give an operator's command the address of the run's global server and the keys for it."""

    @click.option(
        "--run",
        "folder",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        shell_complete=completion.runs,
        show_default=True,
        help="Folder of the run, or of several: your newest one that goes on is meant.",
    )
    @click.option(
        "--connect",
        metavar="HOST:PORT",
        help="Address of a global server, for a run of somebody else or by hand.",
    )
    @click.option(
        "--token",
        type=click.Path(path_type=Path),
        help="File with a token for it; else LSGD_TOKEN, or the user's, where one is needed.",
    )
    @click.option("--insecure", is_flag=True, help="Go without keys, where the server does too.")
    @functools.wraps(command)
    def connected(folder: Path, connect: str | None, token: Path | None, insecure: bool, **others: Any) -> Any:
        if connect is None:
            folder, connect = find_live(folder)
            click.echo(f"the run in {folder}, at {connect}:", err=True)
        elif "://" not in connect:
            connect = f"tcp://{connect}"
        return command(connect, connector_keys(connect, token, OPERATOR, insecure=insecure), **others)

    return connected


@main.command("status", short_help="Show what a run does, and what it waits for.")
@_connect
@click.option("--json", "as_json", is_flag=True, help="Print everything, as JSON (docs/operations.md lists the keys).")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C or the end of the run.")
def status_command(connect: str, keys: ConnectorKeys | None, as_json: bool, watch: bool) -> None:
    """Show a running run: its workers, its rounds, and what it waits for."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if as_json:
        status = operate.ask(connect, StatusQuery(0), keys)
        click.echo(json.dumps(status))
        while watch and status["state"] != "over":
            time.sleep(operate.WATCH_EVERY_S)
            status = operate.ask(connect, StatusQuery(0), keys)
            click.echo(f"\n{json.dumps(status)}")
    elif not watch:
        console.print(operate.view(RunView(operate.ask(connect, StatusQuery(0), keys))))
    else:
        with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            for number, run in enumerate(operate.watch(connect, keys)):
                if live:
                    live.update(operate.view(run), refresh=True)
                else:
                    console.print(*[""] * (number > 0), operate.view(run), sep="\n")


@main.command("runs", short_help="List runs: how each has ended or goes on.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print all that is known of each, as JSON.")
def runs_command(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, or in runs/, the newest first: how each has ended or goes on.

    The loss is the mean of what the workers had reported at the last global round.
    """
    found = runs.find_runs(folder)
    if as_json:
        click.echo(json.dumps(found))
    elif found:
        click.echo("\n".join(runs.view(found, max(80, shutil.get_terminal_size().columns))))
    else:
        click.echo(f"there are no runs in {folder}; name the folder: lsgd runs FOLDER", err=True)


@main.command("set", short_help="Change settings of a running run.")
@_connect
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, shell_complete=completion.settings)
def set_command(connect: str, keys: ConnectorKeys | None, changes: tuple[str, ...]) -> None:
    """Change numeric settings of a running run, all or none, for all workers from the next global round on.

    Its length (iterations, seconds) changes at once.
    """
    if not changes:
        raise click.UsageError("say which setting gets which value: lsgd set period=16")
    if wrong := [change for change in changes if "=" not in change]:
        raise click.UsageError(f"write it as NAME=VALUE, not {wrong[0]!r}")
    values = dict(change.split("=", 1) for change in changes)
    status = operate.ask(connect, ChangeSettings(values), keys)
    told = ", ".join(f"{name} = {value}" for name, value in values.items())
    click.echo(f"run {status['run']}: {told}, after {status['count']} iterations")


@main.command("stop", short_help="End a running run, with a consensus model.")
@_connect
@click.option("--reason", default="lsgd stop", show_default=True, help="What the run's log says.")
def stop_command(connect: str, keys: ConnectorKeys | None, reason: str) -> None:
    """End a running run: its workers make the consensus model and leave."""
    status = operate.ask(connect, StopRun(reason), keys)
    click.echo(f"run {status['run']} is stopping after {status['count']} iterations: {status['reason']}")


@main.command("doctor", short_help="Check this machine, and the network to others.")
@_place
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--parameters", type=click.IntRange(1), default=25_000_000, show_default=True, help="Of your model.")
@click.option(
    "--step-ms", type=click.FloatRange(0.001), default=100.0, show_default=True, help="Time of one iteration."
)
def doctor_command(
    node: int | None, nodes: int | None, address: str | None, port: int, parameters: int, step_ms: float
) -> None:
    """Check this machine, and with --nodes and --address on each of several, the network between them.

    Versions, ports both ways, the interface and why it was chosen, clocks, a short test of each link, and a small
    all-reduce. Ends with the measured bandwidth and the period that it suggests. Exit code 1: something is in the way.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it says more than is of use about names of hosts
    from lsgd.client.cli.doctor import Doctor  # and with it torch

    place = find_place(node, nodes, address, os.environ)
    sys.exit(Doctor(place, port, click.echo).examine(parameters, step_ms))


@main.command("keygen", short_help="Make keys, and a token for each node.")
@click.option(
    "--keys",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of the keys; else LSGD_KEYS, or lsgd/keys among your settings.",
)
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="How many nodes get a token.")
def keygen_command(folder: Path | None, nodes: int) -> None:
    """Make the global server's keys, and a token for each node that may join it.

    Done on node 0, before or while the server runs; what is there already is kept. A token goes to its node as a
    file (--token) or as the text of LSGD_TOKEN. Whoever has it can join the run, so keep it as you keep a password.
    To shut a node out, delete its line in the file `allowed`.
    """
    names = [node_name(node) for node in range(nodes)]
    ring = KeyRing.make(folder or default_folder(), [*names, OPERATOR])
    for name in (*names, OPERATOR):
        click.echo(f"{name:9} {token_path(name, ring.folder)}")
    click.echo(
        f"Copy each node's token to that node, so that nobody else can read it. The global server takes the keys "
        f"with: --keys {ring.folder}"
    )


@main.command("algorithms", short_help="List the algorithms, or the settings of one.")
@click.argument("name", required=False, shell_complete=completion.algorithms)
@click.option("--parameters", type=click.IntRange(1), default=25_000_000, show_default=True, help="Of the model.")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="Each on a node of its own.")
def algorithms(name: str | None, parameters: int, workers: int) -> None:
    """List the algorithms with what a worker sends in an iteration, or the settings of one.

    docs/algorithms.md has the formulas, and when to use which.
    """
    if name is not None and name not in ALGORITHMS:
        raise click.UsageError(ALGORITHMS.unknown(name))
    click.echo(f"{'':28} MB sent an iteration by one of {workers} workers, {parameters:,} parameters")
    for cls in ALGORITHMS.values() if name is None else [ALGORITHMS[name]]:
        settings = cls()
        megabytes = settings.sent_nbytes(parameters, workers) / 1e6
        rarely = " (in an exchange; its period is auto)" if settings.time_share else ""
        click.echo(f"{cls.name:28} {megabytes:10.3f}  {cls.summary}{rarely}")
    if name is None:
        return
    click.echo()
    for setting, spec in fields(ALGORITHMS[name]).items():
        value = json.dumps(shown(spec, spec.default))
        click.echo(f"  {setting:18} {value:12} {span(spec) or 'any':24} {spec.metadata['meaning']}")


@main.command("completion", short_help="Complete commands and options in your shell.")
@click.argument("shell", type=click.Choice(tuple(completion.SHELLS)), required=False)
def completion_command(shell: str | None) -> None:
    """Print the script that completes commands and options in your shell; without SHELL, the line that takes it up."""
    if shell:
        click.echo(completion.script(main, shell))
    else:
        click.echo("\n".join(completion.SHELLS.values()))


@main.group(cls=Group)
def config() -> None:
    """Show the settings of the plan."""


@config.command("show")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="The plan, a TOML file.")
@plan_options
def show(plan_path: Path | None, **flags: str | None) -> None:
    """Print each setting with where its value comes from: flag, variable, file or default."""
    variable = os.environ.get("LSGD_PLAN")
    rows = plan.read(plan_path or (Path(variable) if variable else None), os.environ, flags).rows()
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")
