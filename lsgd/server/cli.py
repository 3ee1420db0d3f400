"""``lsgd-server``: the command line of the servers and of the relay."""

import os
import secrets
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import click

from lsgd import __version__
from lsgd.built import described
from lsgd.errors import ConfigError
from lsgd.node.elsewhere import Elsewhere, Knock, dial
from lsgd.node.local_server import LocalServer
from lsgd.plan.options import plan_options
from lsgd.plan.plan import Plan, read
from lsgd.plan.run import RunSettings
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import connector_keys, is_local, listener_keys, node_name
from lsgd.protocol.messages import Place
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.protocol.sockets import Listener, default_local_address
from lsgd.server.daemon import CRASHED, Signals, complain, say
from lsgd.server.relay import Relay
from lsgd.server.serve import relay_secret, serve_global
from lsgd.settings import checked

_PATH: Any = click.Path(path_type=Path)


@click.command(context_settings={"max_content_width": 110})
@click.version_option(described(), message="lsgd-server %(version)s")
@click.option("--global", "roles", flag_value="global", multiple=True, help="Be the global server, one for the run.")
@click.option("--local", "roles", flag_value="local", multiple=True, help="Be the local server of a machine.")
@click.option(
    "--relay", "roles", flag_value="relay", multiple=True, help="Connect workers that cannot reach each other."
)
@click.option("--listen", metavar="ADDRESS", help="Where to listen: tcp://host:port or ipc://path.")
@click.option("--connect", metavar="ADDRESS", help="Local: the global server's address.")
@click.option("--node", type=click.IntRange(0), default=0, show_default=True, help="Local: index of this machine.")
@click.option("--plan", "plan_path", type=_PATH, help="Global: the plan, a TOML file.")
@click.option("--save-plan", type=_PATH, help="Global: write the plan as used to this file.")
@click.option(
    "--journal",
    "journal_path",
    type=_PATH,
    help="Global: keep the run in this file; restarted with it, the server continues the same run.",
)
@click.option(
    "--continue",
    "continues",
    is_flag=True,
    help="Global: start no new run; continue the one in the --journal, or stop.",
)
@click.option(
    "--results", type=_PATH, help="Global: write metrics.jsonl, a line for each round, and result.json to this folder."
)
@click.option(
    "--relay-address",
    metavar="ADDRESS",
    help="Global: where workers find the relay (lsgd-server --relay with the same keys): tcp://host:port.",
)
@click.option(
    "--keys",
    "keys_path",
    type=_PATH,
    help="Global: the folder that `lsgd keygen` made; else LSGD_KEYS, or the user's, where keys are needed.",
)
@click.option(
    "--token",
    "token_path",
    type=_PATH,
    help="Local: the file with this node's token; else LSGD_TOKEN, or the user's, where one is needed.",
)
@click.option("--launched", is_flag=True, hidden=True, help="Global: lsgd launch says how the other nodes join.")
@click.option("--run", default="", hidden=True, help="Global: identity of a new run; --node is where it begins.")
@click.option("--insecure", is_flag=True, help="Go without keys on a network where everybody is trusted.")
@plan_options
def main(
    roles: tuple[str, ...],
    listen: str | None,
    connect: str | None,
    node: int,
    plan_path: Path | None,
    save_plan: Path | None,
    journal_path: Path | None,
    continues: bool,
    results: Path | None,
    relay_address: str | None,
    keys_path: Path | None,
    token_path: Path | None,
    launched: bool,
    run: str,
    insecure: bool,
    **flags: Any,
) -> None:
    """Serve a run: one global server for all, and one local server on each machine.

    The global server holds the plan (the algorithm, its settings, the length); workers get it when they join.
    `lsgd config show` takes the same flags and prints each setting and where its value comes from.
    A local server takes one of them: --workers says how many workers its node has (default 1).

    Exit codes: 0 the run ended cleanly; 1 it could not; 2 wrong usage or settings; 3 a second signal ended it at once;
    70 it failed in its own code; 79 another server has more of the run, and this one gave up.
    """
    raise_descriptor_limit()
    if len(set(roles)) > 1:
        raise click.UsageError(f"one process is one server: choose one of {', '.join(f'--{role}' for role in roles)}")
    role = roles[0] if roles else None
    try:
        if role == "global":
            if connect or (node and not run) or token_path:
                raise ConfigError("--connect, --node and --token belong to a local server; omit them with --global")
            if continues and not journal_path:
                raise ConfigError("--continue continues the run in a journal; name it: --journal FILE")
            path = plan_path or (Path(os.environ["LSGD_PLAN"]) if os.environ.get("LSGD_PLAN") else None)
            plan = Plan() if continues else read(path, os.environ, flags).plan  # the journal has the run's
            address = listen or f"tcp://127.0.0.1:{DEFAULT_PORT}"
            keys = listener_keys(address, keys_path, insecure=insecure)
            if relay_address:
                place_of(relay_address)
            files = save_plan, journal_path, results
            sys.exit(
                serve_global(
                    plan,
                    address,
                    keys,
                    *files,
                    Signals(),
                    relay=relay_address or "",
                    continues=continues,
                    launched=launched,
                    run=run,
                    node=node,
                )
            )
        if role == "local":
            workers = checked(RunSettings, "workers", flags.pop("workers") or 1, "flag --workers")
            if not workers:
                raise ConfigError("--workers of a local server says how many workers its node has, at least 1")
            given = [name for name, value in {**flags, "plan": plan_path}.items() if value is not None]
            if given:
                raise ConfigError(f"--{given[0].replace('_', '-')} belongs to the plan, which the global server holds")
            if continues or journal_path or save_plan or results or relay_address:
                raise ConfigError(
                    "--continue, --journal, --relay-address, --results and --save-plan belong to the global server"
                )
            if keys_path:
                raise ConfigError("--keys belongs to the global server; a local one takes --token")
            address = listen or default_local_address()
            if not (is_local(address) or insecure):
                raise ConfigError(
                    f"a local server is for the workers of its own machine, but others can reach {address}; listen on "
                    f"ipc://PATH or tcp://127.0.0.1:PORT (or give --insecure)"
                )
            above = connect or f"tcp://127.0.0.1:{DEFAULT_PORT}"
            sys.exit(_serve_local(node, workers, address, above, token_path, insecure=insecure))
        if role == "relay":
            others = {"connect": connect, "node": node, "plan": plan_path, "journal": journal_path, "token": token_path}
            others |= {"save_plan": save_plan, "results": results, "continue": continues}
            others |= {"relay_address": relay_address, **flags}
            if given := [name for name, value in others.items() if value]:
                raise ConfigError(f"--{given[0].replace('_', '-')} is not the relay's, which takes --listen and --keys")
            sys.exit(_serve_relay(listen or f"tcp://127.0.0.1:{DEFAULT_PORT + 1}", keys_path, insecure=insecure))
        raise ConfigError(
            "say which server to be: --global (one for the run), --local (one on each machine), or --relay (beside the "
            "global one, if workers cannot reach each other)"
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except Exception:
        complain(f"this is a mistake in lsgd, please report it:\n{traceback.format_exc().rstrip()}")
        sys.exit(CRASHED)


def _serve_local(
    node: int, workers: int, address: str, global_address: str, token_path: Path | None, *, insecure: bool
) -> int:
    signals = Signals()
    keys = connector_keys(global_address, token_path, node_name(node), insecure=insecure)
    incarnation = secrets.randbits(63)
    connect = partial(dial, f"node{node}#{incarnation}".encode(), keys)
    with Listener(address) as listener:
        first = Place(0, global_address, keys.server if keys else b"")
        link = connect(first)
        say(
            f"lsgd {__version__} local server of node{node} on {listener.address}, for the global server at "
            f"{global_address}; workers find it with: LSGD_LOCAL={listener.address}"
        )
        knock = Knock()
        elsewhere = Elsewhere(node, connect, knock, first=[first])
        local = LocalServer(node, incarnation, listener, link, workers, elsewhere=elsewhere)
        try:
            return local.run(signals)
        finally:
            knock.close()
            local.following.close()


def _serve_relay(address: str, keys_path: Path | None, *, insecure: bool) -> int:
    signals = Signals()
    keys = listener_keys(address, keys_path, insecure=insecure)
    host, port = place_of(address)
    relay = Relay(host, port, relay_secret(keys))
    say(f"lsgd {__version__} relay on {address.rpartition(':')[0]}:{relay.port}, for members of runs with its keys")
    return relay.run(signals)
