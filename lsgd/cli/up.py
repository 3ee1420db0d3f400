"""``lsgd up``, ``lsgd peers`` and ``lsgd door``: two machines in two lines."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from lsgd.cli import options
from lsgd.node.launch import launch
from lsgd.plan import plan
from lsgd.protocol.ports import DEFAULT_PORT


@click.command("up", short_help="Train on several machines: type the same on each.")
@click.option("--at", metavar="HOST[:PORT]", default="", help="Join the machine there, in another network.")
@click.option("--code", default="", help="The code that the other machine shows, where nobody can type it.")
@click.option("--nodes", type=click.IntRange(2), default=2, show_default=True, help="Machines at the beginning.")
@click.option("--workers", type=click.IntRange(1), help="Workers of each machine; default: one for each GPU, or 2.")
@click.option("--device", default="auto", show_default=True, shell_complete=options.devices, help="As of lsgd launch.")
@options.plan(help="The plan, a TOML file, of the machine that begins the run.")
@click.option("--name", default="", help="Name of the run, and of its folder in runs/; default: the start time.")
@click.option("--port", type=click.IntRange(1, 65534), default=DEFAULT_PORT, show_default=True, help="Of the servers.")
@click.option("--new", is_flag=True, help="Begin a run here, whoever else is there, and whatever died.")
@click.option("--anyway", is_flag=True, help="Join even if the script or lsgd is another one than there.")
@click.option("--plain", is_flag=True, help="Print lines only, as without a terminal.")
@click.option("--verbose", is_flag=True, envvar="LSGD_VERBOSE", help=options.VERBOSE_HELP)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=options.files)
def up_command(
    at: str,
    code: str,
    nodes: int,
    workers: int | None,
    device: str,
    plan_path: Path | None,
    name: str,
    port: int,
    new: bool,
    anyway: bool,
    plain: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Run a script on several machines: type the same line on each of them.

    \b
        lsgd up -- python train.py

    The first machine begins a run and waits. The second one finds it in the local network, and each shows a code of
    two words; type one machine's code on the other, once. In another network, give the second one the address of the
    first: --at. Both need the script and its data. If this machine's part of the run died, the same line resumes it.
    """  # noqa: D301
    if not command:
        raise click.UsageError("say what each worker runs: lsgd up -- python train.py")
    plan.read(plan_path, os.environ, {})  # what is wrong with it is said before anybody types a code
    from lsgd.pairing.start import find_place  # the libraries for it take a while
    from lsgd.pairing.up import Wishes

    wishes = Wishes(command, at, code, new, name, nodes, port, workers or 0, anyway)
    settings = find_place(wishes, device, workers, plan_path, lambda text: click.echo(f"[up] {text}"))
    sys.exit(launch(replace(settings, plain=plain, verbose=verbose)))


@click.command("peers", short_help="List the machines of this network that run lsgd up.")
@click.option("--forget", metavar="NAME", help="Forget a machine: it needs a code again.")
def peers_command(forget: str | None) -> None:
    """List the machines that this one sees in its network, and those that it has paired with."""
    from lsgd.pairing import start

    lines, remarks = (start.forget(forget), []) if forget else start.look()
    for line in lines:
        click.echo(line)
    for remark in remarks:
        click.echo(remark, err=True)


@click.command("door", hidden=True)
@click.option("--run", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--about", required=True)
@click.option("--joined/--open", default=False)
def door_command(folder: Path, about: str, joined: bool) -> None:
    """Let other machines join a run while it goes on, or only show this one. Started by lsgd launch."""
    from lsgd.pairing.about import About
    from lsgd.pairing.start import keep_door

    keep_door(folder, About.read(json.loads(about)), joined=joined)
