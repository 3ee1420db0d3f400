"""The plan's settings as flags of a command line."""

from collections.abc import Callable
from typing import Any

import click

from lsgd.algorithms import ALGORITHMS
from lsgd.plan.plan import flag
from lsgd.plan.run import RunSettings
from lsgd.settings import fields, span


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command one flag for each setting of the plan; it receives strings by name, or None."""
    for name, help_text in reversed(_flags().items()):
        command = click.option(flag(name), name, metavar="VALUE", help=help_text)(command)
    return command


def _flags() -> dict[str, str]:
    """Return the help text of each flag; a setting that several algorithms share is one flag."""
    flags = {"algorithm": f"The algorithm: {', '.join(ALGORITHMS)}."}
    sections: list[tuple[str, type]] = [("", RunSettings), *ALGORITHMS.items()]
    for section, cls in sections:
        for name, spec in fields(cls).items():
            of = f"[{section}] " if section else ""
            text = f"{of}{spec.metadata['meaning']} (default {spec.default}; {span(spec) or 'any'})"
            if name in flags:
                earlier, _, _ = flags[name].partition("] ")
                flags[name] = flags[name].replace(earlier, f"{earlier}, {section}", 1)
            else:
                flags[name] = text
    return flags
