"""Options that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lsgd.cli import completion
from lsgd.protocol.keys import OPERATOR, connector_keys
from lsgd.protocol.sockets import DEFAULT_PORT
from lsgd.run_folder import find_live

FOLDER = "lsgd.folder"
"""Key in a command's context: folder of the run that was found."""

plan = functools.partial(click.option, "--plan", "plan_path", envvar="LSGD_PLAN", type=click.Path(path_type=Path))
"""The option for the plan, with its variable."""


def place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a node's command the options for :func:`find_place`."""
    for option in (
        click.option("--address", help="Address of node 0, the same on all nodes; without --node, the scheduler's."),
        click.option("--nodes", type=click.IntRange(1), help="Number of nodes; default: the scheduler's, or 1."),
        click.option(
            "--node",
            type=click.IntRange(0),
            help="Index of this node, from 0; default: the scheduler's (Slurm's, ...).",
        ),
    ):
        command = option(command)
    return command


def connect(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give an operator's command the address of the run's global server and the keys for it."""

    @click.option(
        "--run",
        "folder",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        shell_complete=completion.runs,
        show_default=True,
        help="Folder of the run, or of several runs: your newest one that is running.",
    )
    @click.option(
        "--connect",
        metavar="HOST:PORT",
        help="Address of a global server, for a run that somebody else launched, or that was started by hand.",
    )
    @click.option(
        "--token",
        type=click.Path(path_type=Path),
        help="File with a token for it, if it needs one; default: LSGD_TOKEN, or the user's.",
    )
    @click.option("--insecure", is_flag=True, help="Use no keys, if the server uses none either.")
    @functools.wraps(command)
    def connected(folder: Path, connect: str | None, token: Path | None, insecure: bool, **others: Any) -> Any:
        if connect is None:
            folder, connect = find_live(folder)
            click.get_current_context().meta[FOLDER] = folder
            click.echo(f"the run in {folder}, at {connect}:", err=True)
        elif "://" not in connect:
            if not connect.rpartition(":")[2].isdecimal():
                raise click.UsageError(f"--connect {connect} has no port: --connect {connect}:{DEFAULT_PORT}")
            connect = f"tcp://{connect}"
        return command(connect, connector_keys(connect, token, OPERATOR, insecure=insecure), **others)

    return connected
