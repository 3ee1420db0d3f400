"""What commands have in common: groups, options, and shell completion."""

import difflib
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from lsgd.algorithms import ALGORITHMS
from lsgd.errors import ConfigError, LsgdError
from lsgd.plan.run import LENGTH_SETTINGS
from lsgd.protocol.keys import OPERATOR, connector_keys
from lsgd.protocol.ports import DEFAULT_PORT
from lsgd.protocol.sockets import keys_for
from lsgd.run_folder import find_live
from lsgd.settings import changeable


class Number(click.FloatRange):
    """A finite number in a range; click alone takes ``nan`` for one, and ``inf`` where there is no upper bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or say why it is none."""
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not finite.", param, ctx)


VERBOSE_HELP = "Show every line of the logs: rounds, generations, checkpoints, who joins."


SHELLS = {
    "bash": 'eval "$(lsgd completion bash)"          # in ~/.bashrc',
    "zsh": 'eval "$(lsgd completion zsh)"           # in ~/.zshrc, after compinit',
    "fish": "lsgd completion fish | source           # in ~/.config/fish/config.fish",
}


Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completion(names: Callable[[], Iterable[str]], otherwise: str = "") -> Completion:
    """Complete these names; if none matches, let the shell complete names of files or folders (``otherwise``)."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names() if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type=otherwise)] * bool(otherwise)

    return complete


def _changeable() -> list[str]:
    return sorted({*LENGTH_SETTINGS, *(name for cls in ALGORITHMS.values() for name in changeable(cls))})


algorithms = _completion(lambda: ALGORITHMS)
settings = _completion(lambda: (f"{name}=" for name in _changeable()))
files = _completion(list, "file")
devices = _completion(lambda: ("auto", "cpu", "cuda"))
runs = _completion(lambda: sorted((str(path) for path in Path("runs").glob("*/")), reverse=True), "dir")
"""Completions of arguments; of run folders, those in runs/ come first, the newest before the others."""


SECTIONS = {
    "Train": ("quickstart", "check", "up", "launch"),
    "Watch and steer": (
        "status",
        "runs",
        "peers",
        "dashboard",
        "report",
        "compare",
        "log",
        "alert",
        "metrics",
        "set",
        "stop",
    ),
    "Find a fault": ("stacks", "replay"),
    "Prepare": ("doctor", "estimate", "keygen", "algorithms", "config", "completion"),
}
"""The commands by purpose; all others are listed under Other."""

FIRST_STEPS = (
    ("train the example on this machine, in half a minute", "lsgd quickstart"),
    ("train your own script, one worker for each GPU", "lsgd launch -- python my_script.py"),
    ("the same on each of several machines", "lsgd up -- python my_script.py"),
    ("see what the run does and waits for", "lsgd status --watch"),
    ("list your runs: which are running, and how the others ended", "lsgd runs"),
    ("check this machine before the first run", "lsgd doctor"),
)


class Commands(click.Group):
    """Commands that print lsgd's errors as one line, and suggest the nearest name for an unknown command."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LsgdError as error:
            raise click.ClickException(str(error)) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the named command."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, 1)
            hint = f"did you mean: {ctx.command_path} {near[0]}" if near else f"there are {', '.join(known)}"
            if args[0].endswith(".py"):
                hint = f"to train with a script: lsgd launch -- python {args[0]}"
            ctx.fail(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class Main(Commands):
    """``lsgd`` itself."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by purpose."""
        known = {name: self.commands[name] for name in self.list_commands(ctx)}
        named = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in known if name not in named)
        for section, names in {**SECTIONS, "Other": others}.items():
            rows = [(name, known[name].get_short_help_str(100)) for name in names if name in known]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def first_steps() -> str:
    """Return the first commands that a new user needs."""
    width = max(len(example) for _, example in FIRST_STEPS)
    lines = [f"  {example:{width}}  {what}" for what, example in FIRST_STEPS]
    return "\n".join(
        ["Train one PyTorch model on several machines with local SGD.", "", *lines, "", "All commands: lsgd --help"]
    )


FOLDER = "lsgd.folder"
"""Key in a command's context: folder of the run that was found."""

plan = functools.partial(click.option, "--plan", "plan_path", envvar="LSGD_PLAN", type=click.Path(path_type=Path))
"""The option for the plan, with its variable."""


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
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


def connect(
    command: Callable[..., Any], *, ended: Callable[..., bool] = lambda folder, **others: False
) -> Callable[..., Any]:
    """Give an operator's command the address of the run's global server and the keys for it.

    ``ended``: called instead if no run is running, with the folder and the other options; False: that is an error.
    """

    @click.option(
        "--run",
        "folder",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        shell_complete=runs,
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
        key = b""
        if connect is None:
            try:
                folder, connect, key = find_live(folder)
            except ConfigError:
                if ended(folder, **others):
                    return None
                raise
            click.get_current_context().meta[FOLDER] = folder
            click.echo(f"the run in {folder}, at {connect}:", err=True)
        elif "://" not in connect:
            if not connect.rpartition(":")[2].isdecimal():
                raise click.UsageError(f"--connect {connect} has no port: --connect {connect}:{DEFAULT_PORT}")
            connect = f"tcp://{connect}"
        run_folder = click.get_current_context().meta.get(FOLDER)
        keys = connector_keys(connect, token, OPERATOR, insecure=insecure, run_folder=run_folder)
        return command(connect, keys_for(keys, key), **others)

    return connected
