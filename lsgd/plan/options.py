"""The plan's settings as flags of a command line."""

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from lsgd.algorithms import ALGORITHMS
from lsgd.plan.plan import flag
from lsgd.plan.run import RunSettings
from lsgd.settings import fields, shown, span


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a click command one flag for each setting of the plan; it receives strings by name, or None."""
    for name, help_text in reversed(_flags().items()):
        command = click.option(flag(name), name, metavar="VALUE", help=help_text)(command)
    return command


def _flags() -> dict[str, str]:
    """Return the help text of each flag; a setting that several algorithms share is one flag."""
    flags = {"algorithm": f"The algorithm: {', '.join(ALGORITHMS)}."}
    found: dict[str, list[tuple[str, dataclasses.Field[Any]]]] = {}
    for section, cls in (("", RunSettings), *ALGORITHMS.items()):
        for name, spec in fields(cls).items():
            found.setdefault(name, []).append((section, spec))
    for name, specs in found.items():
        of = f"[{', '.join(section for section, _ in specs)}] " if specs[0][0] else ""
        defaults = {shown(spec, spec.default) for _, spec in specs}
        default = f"default {defaults.pop()}" if len(defaults) == 1 else "defaults: lsgd algorithms NAME"
        first = specs[0][1]
        flags[name] = f"{of}{first.metadata['meaning']} ({default}; {span(first) or 'any'})"
    return flags
