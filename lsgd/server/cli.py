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
from lsgd.node.candidates import Candidates, Knock, dial
from lsgd.node.local_server import LocalServer
from lsgd.plan.options import plan_options
from lsgd.plan.plan import Plan, read
from lsgd.plan.run import RunSettings
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import connector_keys, is_local, listener_keys, node_name
from lsgd.protocol.messages import Endpoint
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.processes import raise_descriptor_limit
from lsgd.protocol.sockets import Listener, default_local_address
from lsgd.server.daemon import CRASHED, Signals, complain, say
from lsgd.server.relay import Relay
from lsgd.server.serve import relay_secret, serve_global
from lsgd.settings import checked

_PATH: Any = click.Path(path_type=Path)
_keys = click.option(
    "--keys",
    type=_PATH,
    help="The folder that `lsgd keygen` made; else LSGD_KEYS, or the user's, where keys are needed.",
)
_insecure = click.option("--insecure", is_flag=True, help="Go without keys on a network where everybody is trusted.")


class _Server(click.Command):
    """One of the servers: it says whose an option is that another one has, and that a mistake is lsgd's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            owners = [
                name for name, other in main.commands.items() for p in other.params if error.option_name in p.opts
            ]
            if not owners:
                raise
            owner = " or ".join(owners)
            raise click.UsageError(f"{error.option_name} is an option of {owner}, not of {self.name}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        raise_descriptor_limit()
        try:
            sys.exit(super().invoke(ctx))
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        except click.ClickException:
            raise
        except Exception:
            complain(f"this is a mistake in lsgd, please report it:\n{traceback.format_exc().rstrip()}")
            sys.exit(CRASHED)


class _Servers(click.Group):
    """Commands named by flags, which may stand anywhere on the line."""

    command_class = _Server

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--version" in args:
            return super().parse_args(ctx, ["--version"])
        chosen = list(dict.fromkeys(arg for arg in args if arg in self.commands))
        if len(chosen) > 1:
            raise click.UsageError(f"one process is one server: choose one of {', '.join(chosen)}", ctx)
        if chosen:
            args = [
                "--",
                *chosen,
                *(arg for arg in args if arg not in chosen),
            ]  # what follows -- are no options of ours
        elif "--help" not in args:
            raise click.UsageError(
                "say which server to be: --global (one for the run), --local (one on each machine), or --relay (beside "
                "the global one, if workers cannot reach each other)",
                ctx,
            )
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [" | ".join(self.list_commands(ctx)), "[OPTIONS]"]


@click.group(cls=_Servers, context_settings={"max_content_width": 110})
@click.version_option(described(), message="lsgd-server %(version)s")
def main() -> None:
    """Serve a run: one global server for all, and one local server on each machine.

    Each has options of its own: lsgd-server --global --help.

    Exit codes: 0 the run ended cleanly; 1 it could not; 2 wrong usage or settings; 3 a second signal ended it at once;
    70 it failed in its own code; 79 another server has more of the run, and this one gave up.
    """


@main.command("--global", short_help="Be the global server, one for the run.")
@click.option("--listen", metavar="ADDRESS", help="Where to listen: tcp://host:port or ipc://path.")
@click.option("--plan", type=_PATH, help="The plan, a TOML file.")
@click.option("--save-plan", type=_PATH, help="Write the plan as used to this file.")
@click.option(
    "--journal",
    type=_PATH,
    help="Keep the run in this file; restarted with it, the server continues the same run.",
)
@click.option(
    "--continue", "continues", is_flag=True, help="Start no new run; continue the one in the --journal, or stop."
)
@click.option(
    "--results", type=_PATH, help="Write metrics.jsonl, a line for each round, and result.json to this folder."
)
@click.option(
    "--relay-address",
    metavar="ADDRESS",
    default="",
    help="Where workers find the relay (lsgd-server --relay with the same keys): tcp://host:port.",
)
@_keys
@click.option("--launched", is_flag=True, hidden=True, help="lsgd launch says how the other nodes join.")
@click.option(
    "--run", type=(str, int), default=("", 0), hidden=True, help="Identity of a new run, and where it begins."
)
@_insecure
@plan_options
def _global(
    listen: str | None,
    plan: Path | None,
    save_plan: Path | None,
    journal: Path | None,
    continues: bool,
    results: Path | None,
    relay_address: str,
    keys: Path | None,
    launched: bool,
    run: tuple[str, int],
    insecure: bool,
    **flags: Any,
) -> int:
    """Be the global server, one for the run.

    It holds the plan (the algorithm, its settings, the length); workers get it when they join.
    `lsgd config show` takes the same flags and prints each setting and where its value comes from.
    """
    if continues and not journal:
        raise ConfigError("--continue continues the run in a journal; name it: --journal FILE")
    path = plan or (Path(os.environ["LSGD_PLAN"]) if os.environ.get("LSGD_PLAN") else None)
    used = Plan() if continues else read(path, os.environ, flags).plan  # the journal has the run's
    address = listen or f"tcp://127.0.0.1:{DEFAULT_PORT}"
    ring = listener_keys(address, keys, insecure=insecure)
    if relay_address:
        place_of(relay_address)
    name, node = run
    return serve_global(
        used,
        address,
        ring,
        save_plan,
        journal,
        results,
        Signals(),
        relay=relay_address,
        continues=continues,
        launched=launched,
        run=name,
        node=node,
    )


@main.command("--local", short_help="Be the local server of a machine.")
@click.option("--listen", metavar="ADDRESS", help="Where its workers connect: ipc://path or tcp://127.0.0.1:port.")
@click.option("--connect", metavar="ADDRESS", help="The global server's address.")
@click.option("--node", type=click.IntRange(0), default=0, show_default=True, help="Index of this machine.")
@click.option("--workers", default="1", show_default=True, metavar="N", help="How many workers this machine has.")
@click.option(
    "--token", type=_PATH, help="The file with this node's token; else LSGD_TOKEN, or the user's, where one is needed."
)
@_insecure
def _local(listen: str | None, connect: str | None, node: int, workers: str, token: Path | None, insecure: bool) -> int:
    """Be the local server of a machine."""
    count = checked(RunSettings, "workers", workers, "flag --workers")
    if not count:
        raise ConfigError("--workers of a local server says how many workers its node has, at least 1")
    address = listen or default_local_address()
    if not (is_local(address) or insecure):
        raise ConfigError(
            f"a local server is for the workers of its own machine, but others can reach {address}; listen on "
            f"ipc://PATH or tcp://127.0.0.1:PORT (or give --insecure)"
        )
    above = connect or f"tcp://127.0.0.1:{DEFAULT_PORT}"
    return _serve_local(node, count, address, above, token, insecure=insecure)


@main.command("--relay", short_help="Connect workers that cannot reach each other.")
@click.option("--listen", metavar="ADDRESS", default=f"tcp://127.0.0.1:{DEFAULT_PORT + 1}", show_default=True)
@_keys
@_insecure
def _relay(listen: str, keys: Path | None, insecure: bool) -> int:
    """Connect workers that cannot reach each other."""
    signals = Signals()
    ring = listener_keys(listen, keys, insecure=insecure)
    host, port = place_of(listen)
    relay = Relay(host, port, relay_secret(ring))
    say(f"lsgd {__version__} relay on {listen.rpartition(':')[0]}:{relay.port}, for members of runs with its keys")
    return relay.run(signals)


def _serve_local(
    node: int, workers: int, address: str, global_address: str, token_path: Path | None, *, insecure: bool
) -> int:
    signals = Signals()
    keys = connector_keys(global_address, token_path, node_name(node), insecure=insecure)
    incarnation = secrets.randbits(63)
    connect = partial(dial, f"node{node}#{incarnation}".encode(), keys)
    with Listener(address) as listener:
        first = Endpoint(0, global_address, keys.server if keys else b"")
        link = connect(first)
        say(
            f"lsgd {__version__} local server of node{node} on {listener.address}, for the global server at "
            f"{global_address}; workers find it with: LSGD_LOCAL={listener.address}"
        )
        knock = Knock()
        candidates = Candidates(node, connect, knock, first=[first])
        local = LocalServer(node, incarnation, listener, link, workers, candidates=candidates)
        try:
            return local.run(signals)
        finally:
            knock.close()
            local.following.close()
