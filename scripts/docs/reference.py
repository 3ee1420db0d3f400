"""The reference: Python from the docstrings, the command line from click, the settings from the fields of the plan."""

import inspect
import json
import re
from collections.abc import Iterator

import click

from lsgd.algorithms import ALGORITHMS
from lsgd.cli.commands import main as lsgd
from lsgd.plan.plan import DEFAULT, flag, variable
from lsgd.plan.run import RunSettings
from lsgd.server.cli import main as lsgd_server
from lsgd.settings import changeable, fields, shown, span

INDEX = """# Reference

- [Python](python.md): the public names of the client library, the Trainers, and what an algorithm of your own needs.
- [Command line](cli.md): every command of `lsgd` and `lsgd-server`, with its options.
- [Settings](settings.md): every setting of the plan, with its default and its range.
- [Exit codes and signals](exit-codes.md): how each process of a run ends, and how you end a run.
"""
PYTHON = """# Python

The public names of lsgd. [The client library](../guides/client.md) tells how they work together.

## The client

::: lsgd.client.wrap.wrap
::: lsgd.client.worker.Worker
::: lsgd.client.control.identity.device
::: lsgd.client.optimizer.muon
::: lsgd.client.iteration.reports.Timings

## Trainers

::: lsgd.integrations.transformers.LsgdCallback
    options:
      members: [worker]
      show_root_full_path: true

::: lsgd.integrations.lightning.LsgdCallback
    options:
      members: [worker]
      show_root_full_path: true

::: lsgd.integrations.accelerate.LsgdLoop

::: lsgd.integrations.ray.LsgdConfig
    options:
      members: false
::: lsgd.integrations.ray.report

## Without lsgd's servers

::: lsgd.ddp_hook.QuantizedState
::: lsgd.ddp_hook.quantized_hook

## Errors

::: lsgd.errors
    options:
      heading_level: 2
      show_root_heading: false
      show_root_toc_entry: false

## For algorithms and codecs of your own

::: lsgd.settings.AlgorithmSettings
::: lsgd.settings.Schedule
::: lsgd.settings.setting
::: lsgd.algorithms.base.Algorithm
::: lsgd.collectives.group.Group
::: lsgd.codecs.base.Codec
"""
CLI = """# Command line

Every command answers `--help`. [Running lsgd](../start/usage.md) has examples.
[Exit codes and signals](exit-codes.md) has the exit codes.
"""
SETTINGS = f"""# Settings of the plan

A setting has one name. It is a key of the plan file (`local_period`), a flag of `lsgd-server --global`
(`{flag("local_period")}`) and a variable (`{variable("local_period")}`). Precedence: flag, variable, file.
[Running lsgd](../start/usage.md#the-plan) shows a plan file. `lsgd config show` prints what is in effect.
`lsgd set` changes those that are *settable* during a run.

The algorithm itself is `name` in the `[algorithm]` table, `{flag("algorithm")}`, or `{variable("algorithm")}`.
Without it a run takes `{DEFAULT.name}`. [Algorithms](../guides/algorithms.md) says which one to take.
"""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page; mkdocstrings fills in that of Python."""
    yield "index", INDEX
    yield "python", PYTHON
    yield "cli", cli()
    yield "settings", settings()


def cli() -> str:
    """Return the page of all commands."""
    sections = (_command(command, path) for path, command in commands())
    return "\n".join((CLI, *sections))


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield each command by the words that one types, those of the workers' side first."""
    yield from _walk("lsgd", lsgd)
    yield from _walk("lsgd-server", lsgd_server)


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        part = command.get_command(context, name)
        assert part is not None
        yield from _walk(f"{path} {name}", part)


def _command(command: click.Command, path: str) -> str:
    context = click.Context(command, info_name=path)
    settings = {flag("algorithm")} | {flag(name) for cls in _sections().values() for name in fields(cls)}
    rows = ["| option | meaning |", "|---|---|"]
    has_settings = False
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        if option.metavar == "VALUE" and option.opts[0] in settings:
            has_settings = True
        elif record := option.get_help_record(context):
            rows.append(f"| {_code(record[0].replace(' RANGE', ''))} | {_linked(_cell(record[1]))} |")
    lines = [f"## {path}", "", "```text", f"{path} {' '.join(command.collect_usage_pieces(context))}", "```", ""]
    lines += [_linked(_help(command.help or "")), ""]
    lines += [*rows, ""] if len(rows) > 2 else []
    if has_settings:
        lines += ["Each [setting of the plan](settings.md) is an option of this command, too.", ""]
    return "\n".join(lines)


def _help(text: str) -> str:
    """Return a command's help as Markdown: a paragraph that click prints as it is becomes code."""
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", inspect.cleandoc(text.split("\f")[0]))
    return "\n\n".join(
        "```console\n" + "\n".join(f"$ {line.strip()}" for line in p.split("\n")[1:]) + "\n```" if p[0] == "\b" else p
        for p in paragraphs
    )


def settings() -> str:
    """Return the page of all settings."""
    parts = [SETTINGS]
    for name, cls in _sections().items():
        title, text = (f"## {name}", f"{cls.summary}.") if name else ("## The run", f"{cls.__doc__}")
        rows = ["| setting | default | values | meaning | settable |", "|---|---|---|---|---|"]
        free = changeable(cls)
        for key, spec in fields(cls).items():
            default = json.dumps(shown(spec, spec.default))
            values = span(spec) or ("true | false" if isinstance(spec.default, bool) else "any")
            change = "yes" if key in free else ""
            meaning = _cell(spec.metadata["meaning"])
            rows.append(f"| {_code(key)} | {_code(default)} | {_cell(values)} | {meaning} | {change} |")
        parts.append("\n".join((title, "", text, "", *rows, "")))
    return "\n".join(parts)


def _sections() -> dict[str, type]:
    return {"": RunSettings, **ALGORITHMS}


def _linked(text: str) -> str:
    """Return text with a link for each page that it names."""
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", text)


def _cell(text: str) -> str:
    """Return text for a cell of a table: a bar would end it, and an angle bracket begin a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")
