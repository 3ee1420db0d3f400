"""``lsgd-server``: the command line of both servers."""

import os
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from lsgd import __version__
from lsgd.errors import ConfigError
from lsgd.keys import KeyRing, is_local, link_keys, listener_keys, node_name
from lsgd.options import plan_options
from lsgd.plan import Plan, read
from lsgd.server import global_daemon, local_daemon
from lsgd.server.daemon import Signals
from lsgd.server.journal import Journal
from lsgd.sockets import DEFAULT_PORT, Link, Listener, default_local_address


@click.command(context_settings={"max_content_width": 110})
@click.version_option(__version__)
@click.option("--global", "role", flag_value="global", help="Be the global server, one for the run.")
@click.option("--local", "role", flag_value="local", help="Be the local server of a machine.")
@click.option("--listen", metavar="ADDRESS", help="Where to listen: tcp://host:port or ipc://path.")
@click.option("--connect", metavar="ADDRESS", help="Local: the global server's address.")
@click.option(
    "--node", type=click.IntRange(0), default=0, show_default=True, help="Local: index of this machine."
)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="Global: the plan, a TOML file.")
@click.option(
    "--save-plan", type=click.Path(path_type=Path), help="Global: write the plan as used to this file."
)
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(path_type=Path),
    help="Global: keep the run in this file; started again with it, the server goes on with the same run.",
)
@click.option(
    "--keys",
    "keys_path",
    type=click.Path(path_type=Path),
    help="Global: the folder that `lsgd keygen` made; else LSGD_KEYS, or the user's, where keys are needed.",
)
@click.option(
    "--token",
    "token_path",
    type=click.Path(path_type=Path),
    help="Local: the file with this node's token; else LSGD_TOKEN, or the user's, where one is needed.",
)
@click.option("--insecure", is_flag=True, help="Go without keys on a network where everybody is trusted.")
@plan_options
def main(
    role: str | None,
    listen: str | None,
    connect: str | None,
    node: int,
    plan_path: Path | None,
    save_plan: Path | None,
    journal_path: Path | None,
    keys_path: Path | None,
    token_path: Path | None,
    insecure: bool,
    **flags: Any,
) -> None:
    """Serve a run: one global server for all, and one local server on each machine.

    The plan (which algorithm, its settings, how long) is the global server's; workers get it when they join.
    `lsgd config show` takes the same flags and prints each setting with where its value comes from.

    Exit codes: 0 the run ended cleanly; 1 it could not; 2 wrong usage or settings; 3 ended at once by a second
    signal.
    """
    try:
        if role == "global":
            if connect or node or token_path:
                raise ConfigError(
                    "--connect, --node and --token belong to a local server; leave them away with --global"
                )
            path = plan_path or (Path(os.environ["LSGD_PLAN"]) if os.environ.get("LSGD_PLAN") else None)
            plan = read(path, os.environ, flags).plan
            address = listen or f"tcp://127.0.0.1:{DEFAULT_PORT}"
            keys = listener_keys(address, keys_path, insecure=insecure)
            sys.exit(_serve_global(plan, address, keys, save_plan, journal_path))
        if role == "local":
            given = [name for name, value in {**flags, "plan": plan_path}.items() if value is not None]
            if given:
                raise ConfigError(
                    f"--{given[0].replace('_', '-')} belongs to the plan, which the global server holds"
                )
            if keys_path:
                raise ConfigError("--keys belongs to the global server; a local one takes --token")
            address = listen or default_local_address()
            if not (is_local(address) or insecure):
                raise ConfigError(
                    f"a local server is for the workers of its own machine, and others can reach {address}; listen on "
                    f"ipc://PATH or tcp://127.0.0.1:PORT (or give --insecure)"
                )
            above = connect or f"tcp://127.0.0.1:{DEFAULT_PORT}"
            sys.exit(_serve_local(node, address, above, token_path, insecure=insecure))
        raise ConfigError(
            "say which server to be: --global (one for the run) or --local (one on each machine)"
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _serve_global(
    plan: Plan, address: str, keys: KeyRing | None, save_plan: Path | None, journal_path: Path | None
) -> int:
    signals = Signals()
    journal = Journal(journal_path) if journal_path else None
    with Listener(address, keys) as listener:
        coordinator = global_daemon.begin(plan, journal)
        if save_plan:
            try:
                save_plan.write_text(coordinator.plan.to_toml(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"the plan cannot be written to {save_plan}: {error.strerror}") from None
        global_daemon.announce(listener.address, coordinator.plan, keys.folder if keys else None)
        return global_daemon.GlobalDaemon(coordinator, listener, journal).run(signals)


def _serve_local(
    node: int, address: str, global_address: str, token_path: Path | None, *, insecure: bool
) -> int:
    signals = Signals()
    keys = link_keys(global_address, token_path, node_name(node), insecure=insecure)
    incarnation = secrets.randbits(63)
    with (
        Listener(address) as listener,
        Link(global_address, f"node{node}#{incarnation}".encode(), keys) as link,
    ):
        local_daemon.announce(node, listener.address, global_address)
        return local_daemon.LocalDaemon(node, incarnation, listener, link).run(signals)
