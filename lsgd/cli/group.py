"""The group of all commands: the first steps, help by purpose, and errors that say what to type."""

import difflib
from typing import Any

import click

from lsgd.errors import LsgdError

SECTIONS = {
    "Train": ("quickstart", "launch"),
    "Watch and steer": ("status", "runs", "dashboard", "report", "log", "metrics", "set", "stop"),
    "Prepare": ("doctor", "keygen", "algorithms", "config", "completion"),
}
"""The commands by purpose; all others are listed under Other."""

FIRST_STEPS = (
    ("train the example on this machine, in half a minute", "lsgd quickstart"),
    ("train your own script, one worker for each GPU", "lsgd launch -- python my_script.py"),
    ("see what the run does and waits for", "lsgd status --watch"),
    ("list your runs: which are running, and how the others ended", "lsgd runs"),
    ("check this machine before the first run", "lsgd doctor"),
)


class Group(click.Group):
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
            told = f"did you mean: {ctx.command_path} {near[0]}" if near else f"there are {', '.join(known)}"
            if args[0].endswith(".py"):
                told = f"to train with a script: lsgd launch -- python {args[0]}"
            ctx.fail(f"there is no command {args[0]!r}; {told}")
        return super().resolve_command(ctx, args)


class Main(Group):
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
