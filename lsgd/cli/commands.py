"""``lsgd``: the command line of those who train."""

import functools
import json
import os
import shlex
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console
from rich.live import Live

from lsgd.algorithms import ALGORITHMS
from lsgd.built import described
from lsgd.cli import check, compare, options, quickstart, runs, stacks, up, watching
from lsgd.cli.options import Commands, Main, first_steps
from lsgd.errors import JoinError
from lsgd.node import gpus, storing
from lsgd.node.commands import LaunchSettings
from lsgd.node.launch import launch
from lsgd.node.place import Place, find_place
from lsgd.output import show_any_text
from lsgd.plan import plan
from lsgd.plan.estimate import number_of
from lsgd.plan.options import plan_options
from lsgd.protocol.keys import ALLOWED, OPERATOR, KeyRing, default_folder, node_name, token_path
from lsgd.protocol.messages import ChangeSettings, StatusQuery, StopRun
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.run_folder import CHECKPOINTS, ENDED, find_run
from lsgd.run_folder import runs as runs_with_checkpoints
from lsgd.settings import fields, shown, span
from lsgd.store.objects import is_url
from lsgd.watch import require, terminal
from lsgd.watch.curves import LOGGERS
from lsgd.watch.reader import ask
from lsgd.watch.view import RunView

HEALTHY_WITHIN_S = 1.0
HERE = "here"
"""What ``--resume`` means without a URL."""
DEVICE_HELP = "auto, cpu, cuda, or one GPU: cuda:0."
PLAIN_HELP = "Print lines only, as without a terminal: no progress display, no colors."


@click.group(cls=Main, context_settings={"max_content_width": 110}, invoke_without_command=True)
@click.version_option(described(), message="lsgd %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train one PyTorch model on several machines with local SGD."""
    show_any_text()
    if context.invoked_subcommand is None:
        click.echo(first_steps())


@main.command("quickstart", short_help="Train the example on this machine.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the script and the results; default: runs/ and the start time.",
)
@click.option("--device", default="auto", show_default=True, shell_complete=options.devices, help=DEVICE_HELP)
@click.option("--plain", is_flag=True, help=PLAIN_HELP)
def quickstart_command(run_dir: Path | None, device: str, plain: bool) -> None:
    """Train the example, handwritten digits, with two workers on this machine.

    Its script and plan are copied beside the results, for you to change and run again.
    """
    sys.exit(quickstart.quickstart(run_dir or _new_run_dir(), device, plain=plain))


def _in_words(devices: int, processes: int) -> str:
    """Describe the number of workers, and of processes per worker, for this many devices in all."""
    workers = devices // processes
    each = f" of {processes} processes" if processes > 1 else ""
    return f"{workers} worker{'s' * (workers > 1)}{each}"


@main.command("launch", short_help="Run a script as each worker of this machine.")
@options.node_options
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"TCP port of the global server; default: {DEFAULT_PORT}, or any free port (0) with one node.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help=f"Workers of this node; default: one for each GPU, or {gpus.CPU_WORKERS} without GPUs.",
)
@click.option(
    "--processes-per-worker",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes per worker: the script puts the model in DDP, or shards it over them (FSDP2).",
)
@click.option(
    "--torchrun",
    is_flag=True,
    help="Set torchrun's variables, so that each worker's script can call init_process_group and use DDP as it is.",
)
@click.option("--device", default="auto", show_default=True, shell_complete=options.devices, help=DEVICE_HELP)
@options.plan(help="The plan, a TOML file (node 0's).")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Folder for logs and results; default: runs/ and the start time.",
)
@click.option("--insecure", is_flag=True, help="Use no keys, on a network where everybody is trusted.")
@click.option(
    "--join-line",
    metavar="TEXT",
    help="Command that starts another node, for the lines that node 0 prints; NODE stands for its index.",
)
@click.option(
    "--store",
    metavar="URL",
    default="",
    help="Upload checkpoints and results there during the run: s3://bucket/run, file:///shared/run, ...",
)
@click.option("--alert", default="", help=f"Tell of what goes wrong, on node 0. {watching.ALERT_HELP}")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=HERE,
    metavar="[URL]",
    help="Resume from the checkpoints in --run-dir, or of the newest run in it (default: in runs/), with its plan; "
    "with a URL (or --store), from the newest there.",
)
@click.option(
    "--resume-if-any",
    is_flag=True,
    help="Resume if --run-dir or --store has checkpoints, else begin a new run there: one command for all starts.",
)
@click.option(
    "--log-to",
    multiple=True,
    type=click.Choice(list(LOGGERS)),
    help="Write the run's curves into the run folder, on node 0; may be repeated.",
)
@click.option(
    "--dashboard",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=0,
    metavar="[PORT]",
    help="Also serve the run's page on node 0 (like lsgd dashboard, to this machine only).",
)
@click.option("--plain", is_flag=True, help=PLAIN_HELP)
@click.option("--verbose", is_flag=True, envvar="LSGD_VERBOSE", help=options.VERBOSE_HELP)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=options.files)
def launch_command(
    node: int | None,
    nodes: int | None,
    address: str | None,
    port: int | None,
    workers: int | None,
    processes_per_worker: int,
    torchrun: bool,
    device: str,
    plan_path: Path | None,
    run_dir: Path | None,
    insecure: bool,
    join_line: str | None,
    store: str,
    alert: str,
    resume: str | None,
    resume_if_any: bool,
    log_to: tuple[str, ...],
    dashboard: int | None,
    plain: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as each worker of this node, and the servers that they need.

    Node 0 runs the global server. It makes keys for all nodes, and prints the commands that start the other nodes, with
    their tokens.

    \b
        lsgd launch --node 0 -- python train.py
        srun --ntasks-per-node=1 lsgd launch -- python train.py

    Ctrl-C or SIGTERM stops the run cleanly: the workers form the consensus model and leave. A second one kills all
    processes at once. If a process fails, the run is stopped the same way, with that process's exit code.
    """  # noqa: D301
    if not command:
        raise click.UsageError("say what each worker runs: lsgd launch -- python my_script.py")
    if dashboard is not None:
        require("lsgd launch --dashboard", "dashboard", *watching.DASHBOARD_NEEDS)
    place = find_place(node, nodes, address, os.environ)
    if port is None:
        port = DEFAULT_PORT if place.nodes > 1 else 0
    devices = gpus.choose(device, workers, processes_per_worker)
    if resume_if_any and run_dir is None:
        raise click.UsageError("--resume-if-any needs the run's folder: --run-dir DIR, the same at each start")
    source, store = _stores(store, resume)
    if source:
        run_dir = run_dir or Path("runs", source.rstrip("/").rpartition("/")[2])
    resumes = _prepare(source, run_dir, place, required=resume is not None, if_any=resume_if_any)
    if resume is not None and not source:
        run_dir = find_run(run_dir or Path("runs"), place.node, place.nodes)
    if resumes and run_dir:
        origin = "checkpoints" if runs_with_checkpoints(run_dir / CHECKPOINTS) else "journal"
        click.echo(f"[launch] resumes from the {origin} in {run_dir}")
    run_dir = (run_dir or _new_run_dir()).absolute()
    if devices.warning:
        click.echo(f"[launch] {devices.warning}", err=True)
    click.echo(
        f"[launch] node {place.node} of {place.nodes}: {_in_words(len(devices.names), processes_per_worker)} on "
        f"{', '.join(dict.fromkeys(devices.names))}; "
        f"logs and results in {run_dir}"
    )
    again = f" --run-dir {shlex.quote(str(run_dir))} --resume-if-any" if resume_if_any else " --resume" * resumes
    again += f" {shlex.quote(str(source))}" * (resumes and source != store and not resume_if_any)
    again += f" --store {shlex.quote(str(store))}" * bool(store)
    if processes_per_worker > 1:
        again += f" --processes-per-worker {processes_per_worker}"
    again += " --torchrun" * torchrun
    node_options = f"--nodes {place.nodes} --address {place.address} --port {port}{again}"
    join_line = join_line or f"lsgd launch --node NODE {node_options} -- {shlex.join(command)}"
    settings = LaunchSettings(
        place,
        port,
        devices.names,
        plan_path,
        run_dir,
        command,
        insecure,
        join_line,
        resumes,
        resume_if_any,
        log_to=log_to,
        alert=alert,
        dashboard=dashboard,
        plain=plain,
        verbose=verbose,
        processes=processes_per_worker,
        torchrun=torchrun,
        store=store,
    )
    sys.exit(launch(settings))


def _stores(store: str, resume: str | None) -> tuple[str, str]:
    """Return the URLs of the store to resume from and of the one to upload to; empty: none."""
    source = store if resume in (None, HERE) else str(resume)
    for url in (source, store):
        if url and not is_url(url):
            raise click.UsageError(
                f"{url!r} is no URL such as s3://bucket/run or file:///shared/run; a folder is given with --run-dir, "
                f"and the command after --"
            )
    return source, store or source


def _prepare(source: str, run_dir: Path | None, place: Place, *, required: bool, if_any: bool) -> bool:
    """Return whether the run is resumed; bring what a store has of it into the run folder."""
    here = run_dir is not None and bool(runs_with_checkpoints(run_dir / CHECKPOINTS))
    if source and run_dir and (required or if_any):
        here |= storing.bring(source, run_dir, place.node, required=required and not here)
        return here
    return required or (if_any and here)


def _new_run_dir() -> Path:
    return Path("runs", time.strftime("%Y%m%d-%H%M%S"))


def _show_end(folder: Path, *, as_json: bool = False, healthy: bool = False, **_: Any) -> bool:
    """Show how the newest run in a folder ended; return False if there is none that has ended."""
    run = next(iter(runs.find_runs(folder)), {})
    if healthy or run.get("state") not in ENDED:
        return False
    if as_json:
        click.echo(json.dumps(run))
        return True
    click.echo(f"the run in {run['folder']} has ended:", err=True)
    shown = terminal.view(RunView(run)) if "run" in run else f"{run['state']}: {run.get('reason', '')}"
    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(shown)
    return True


@main.command("status", short_help="Show a run's progress, and what it waits for, or how it ended.")
@functools.partial(options.connect, ended=_show_end)
@click.option(
    "--json", "as_json", is_flag=True, help="Print everything, as JSON (docs/guides/monitoring.md lists the keys)."
)
@click.option("--watch", is_flag=True, help="Redraw it every two seconds, until Ctrl-C or the end of the run.")
@click.option(
    "--healthy",
    is_flag=True,
    help=f"Print one line; exit code 1 if no global server answers within {HEALTHY_WITHIN_S:g} s (for probes).",
)
def status_command(connect: str, keys: ConnectorKeys | None, as_json: bool, watch: bool, healthy: bool) -> None:
    """Show a running run: its workers, its rounds, and what it waits for; if none is running, how the newest ended."""
    try:
        _show(connect, keys, as_json=as_json, watch=watch, healthy=healthy)
    except JoinError:  # it has perhaps ended meanwhile, or its launcher waits for the store
        folder = click.get_current_context().meta.get(options.FOLDER)
        if not (folder and _show_end(folder, as_json=as_json, healthy=healthy)):
            raise


def _show(connect: str, keys: ConnectorKeys | None, *, as_json: bool, watch: bool, healthy: bool) -> None:
    if healthy:
        status = ask(connect, StatusQuery(0), keys, HEALTHY_WITHIN_S)
        click.echo(
            f"healthy: run {status['run']} is {status['state']}, {status['count']} iterations: {status['reason']}"
        )
        return
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if as_json:
        status = ask(connect, StatusQuery(0), keys)
        click.echo(json.dumps(status))
        while watch and status["state"] != "over":
            time.sleep(terminal.WATCH_EVERY_S)
            status = ask(connect, StatusQuery(0), keys)
            click.echo(f"\n{json.dumps(status)}")
    elif not watch:
        console.print(terminal.view(RunView(ask(connect, StatusQuery(0), keys))))
    else:
        with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            for number, run in enumerate(terminal.watch(connect, keys)):
                if live:
                    live.update(terminal.view(run), refresh=True)
                else:
                    console.print(*[""] * (number > 0), terminal.view(run), sep="\n")


@main.command("runs", short_help="List runs: which are running, and how the others ended.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print everything known about each, as JSON.")
def runs_command(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, or in runs/, the newest first: which are running, and how the others ended.

    The loss is the mean of the workers' reported losses at the last global round.
    """
    found = runs.find_runs(folder)
    if as_json:
        click.echo(json.dumps(found))
    elif found:
        click.echo("\n".join(runs.view(found, max(80, shutil.get_terminal_size().columns))))
    else:
        click.echo(f"there are no runs in {folder}; name the folder: lsgd runs FOLDER", err=True)


@main.command("replay", short_help="Show what a run's server decided last, and why.")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--last", type=click.IntRange(1), default=200, show_default=True, help="How many lines.")
@click.option("--worker", default="", help="Only what concerns this worker, such as node0/worker1.")
def replay_command(run: Path, last: int, worker: str) -> None:
    """Decide again on what the server of the run in the folder RUN heard last, and show the decisions.

    Each has its time, what was said, what was noted with its code, the answers, and what the run waits for. The server
    keeps the last 16 MB of what it hears in inputs.bin and inputs-before.bin, which lead to the same decisions again.
    A bug report needs these two files. They hold names, addresses and settings, but no keys.
    """
    from lsgd.cli import replay  # and the coordinator with it

    for line in replay.lines(run, last, worker):
        click.echo(line)


def _pairs(context: click.Context, parameter: click.Parameter, changes: tuple[str, ...]) -> dict[str, str]:
    if not changes:
        raise click.UsageError("say which setting gets which value: lsgd set period=16")
    if wrong := [change for change in changes if "=" not in change]:
        raise click.UsageError(f"write it as NAME=VALUE, not {wrong[0]!r}: lsgd set period=16")
    return dict(change.split("=", 1) for change in changes)


@main.command("set", short_help="Change settings of a running run.")
@options.connect
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, callback=_pairs, shell_complete=options.settings)
def set_command(connect: str, keys: ConnectorKeys | None, changes: dict[str, str]) -> None:
    """Change numbers and switches of a running run, for all workers from the next global round; all changes or none.

    The run's length (iterations, seconds) changes at once.
    """
    status = ask(connect, ChangeSettings(changes), keys)
    changed = ", ".join(f"{name} = {value}" for name, value in changes.items())
    click.echo(f"run {status['run']}: {changed}, after {status['count']} iterations")


@main.command("stop", short_help="End a running run, with a consensus model.")
@options.connect
@click.option("--reason", default="lsgd stop", show_default=True, help="What the run's log says.")
def stop_command(connect: str, keys: ConnectorKeys | None, reason: str) -> None:
    """End a running run: its workers form the consensus model and leave."""
    status = ask(connect, StopRun(reason), keys)
    click.echo(f"run {status['run']} is stopping after {status['count']} iterations: {status['reason']}")


@main.command("doctor", short_help="Check this machine, and the network to others.")
@options.node_options
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--parameters", default="25M", show_default=True, help="Of your model: 100M.")
@click.option("--step-ms", type=options.Number(0.001), default=100.0, show_default=True, help="Time of one iteration.")
def doctor_command(
    node: int | None, nodes: int | None, address: str | None, port: int, parameters: str, step_ms: float
) -> None:
    """Check this machine. With --nodes and --address, started on each node, also check the network between them.

    It checks versions, ports both ways, the interface and why it was chosen, and clocks, and runs a short test of each
    link and a small all-reduce. It prints the measured bandwidth and the period that this suggests. Exit code 1: a
    check failed.
    """
    size = number_of(parameters)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch logs too much about host names
    from lsgd.cli.doctor import Doctor  # imports torch

    place = find_place(node, nodes, address, os.environ)
    sys.exit(Doctor(place, port, click.echo).examine(size, step_ms))


@main.command("keygen", short_help="Make keys, and a token for each node.")
@click.option(
    "--keys",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of the keys; default: LSGD_KEYS, or lsgd/keys in your configuration folder.",
)
@click.option("--nodes", type=click.IntRange(1), default=2, show_default=True, help="How many nodes get a token.")
def keygen_command(folder: Path | None, nodes: int) -> None:
    """Make the global server's keys, and a token for each node that may join it.

    Run it on node 0, before or while the server runs; existing keys are kept. Give each node its token as a file
    (--token) or as the text of LSGD_TOKEN. Anybody who has a token can join the run, so keep it like a password. To
    shut a node out, delete its line in the file `allowed`.
    """
    names = [node_name(node) for node in range(nodes)]
    ring = KeyRing.make(folder or default_folder(), [*names, OPERATOR])
    elsewhere = f"as before; for a new token, delete its line in {ring.folder / ALLOWED}"
    for name in (*names, OPERATOR):
        path = token_path(name, ring.folder)
        click.echo(f"{name:9} {path if path.exists() else elsewhere}")
    click.echo(
        f"Copy each node's token to that node, so that nobody else can read it. Start the global server with: "
        f"--keys {ring.folder}"
    )


@main.command("algorithms", short_help="List the algorithms, or the settings of one.")
@click.argument("name", required=False, shell_complete=options.algorithms)
@click.option("--parameters", type=click.IntRange(1), default=25_000_000, show_default=True, help="Of the model.")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="Each on its own node.")
def algorithms(name: str | None, parameters: int, workers: int) -> None:
    """List the algorithms with what a worker sends per iteration, or the settings of one.

    docs/guides/algorithms.md says when to use which, and docs/concepts/formulas.md has the formulas.
    """
    if name is not None and name not in ALGORITHMS:
        raise click.UsageError(ALGORITHMS.unknown(name))
    click.echo(f"{'':28} MB sent an iteration by one of {workers} workers, {parameters:,} parameters")
    for cls in ALGORITHMS.values() if name is None else [ALGORITHMS[name]]:
        settings = cls()
        megabytes = settings.sent_nbytes(parameters, workers) / 1e6
        rarely = " (MB of one exchange: its period is auto)" if settings.period_is_auto else ""
        click.echo(f"{cls.name:28} {megabytes:10.3f}  {cls.summary}{rarely}")
    if name is None:
        return
    click.echo()
    for setting, spec in fields(ALGORITHMS[name]).items():
        value = json.dumps(shown(spec, spec.default))
        click.echo(f"  {setting:18} {value:12} {span(spec) or 'any':24} {spec.metadata['meaning']}")


@main.command("completion", short_help="Complete commands and options in your shell.")
@click.argument("shell", type=click.Choice(tuple(options.SHELLS)), required=False)
def completion_command(shell: str | None) -> None:
    """Print the script that completes commands and options in your shell; without SHELL, the line that loads it."""
    if shell:
        kind = get_completion_class(shell)
        assert kind is not None
        click.echo(kind(main, {}, "lsgd", "_LSGD_COMPLETE").source())
    else:
        click.echo("\n".join(options.SHELLS.values()))


@main.group(cls=Commands)
def config() -> None:
    """Show the settings of the plan."""


@config.command("show")
@options.plan(help="The plan, a TOML file.")
@plan_options
def show(plan_path: Path | None, **flags: str | None) -> None:
    """Print each setting and the source of its value: flag, variable, file or default."""
    rows = plan.read(plan_path, os.environ, flags).rows()
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")


for command in (
    check.check_command,
    check.estimate_command,
    watching.log_command,
    watching.alert_command,
    watching.metrics_command,
    watching.dashboard_command,
    watching.report_command,
    compare.compare_command,
    up.up_command,
    up.peers_command,
    up.door_command,
    stacks.stacks_command,
):
    main.add_command(command)
