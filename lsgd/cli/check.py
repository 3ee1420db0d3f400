"""``lsgd check``: proves a script right before it trains; and ``lsgd estimate``: what more machines are worth."""

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import click

from lsgd.cli import options
from lsgd.plan.estimate import lines, link_of, number_of

WRONG = 1
"""Exit code if anything is wrong."""


def _points(context: click.Context, parameter: click.Parameter, text: str | None) -> set[int]:
    numbers = set(range(1, 10))
    if text is None:
        return numbers
    try:
        chosen = {int(each) for each in text.split(",")}
    except ValueError:
        chosen = {0}
    if not chosen <= numbers:
        raise click.UsageError(f"--only takes numbers of points, 1 to 9, such as --only 1,2,3, not {text!r}")
    return chosen


@click.command("check", short_help="Prove that a script is right, before it trains.")
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="Workers, all on this machine.")
@click.option(
    "--steps", type=click.IntRange(8), default=40, show_default=True, help="Of each worker, in each run of the script."
)
@click.option("--only", metavar="POINTS", callback=_points, help="Only these points: 1,2,8.")
@click.option("--link", metavar="LINK", help="For point 9: 100mbit,20ms.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write what was found as JSON.")
@click.option(
    "--patience-s",
    type=options.Number(5),
    default=120.0,
    show_default=True,
    help="How long nothing may move, such as while the script loads its data.",
)
@click.option("--device", default="auto", show_default=True, shell_complete=options.devices, help="As for lsgd launch.")
@click.option("--keep", is_flag=True, help="Keep the scratch folder, with what the script wrote, and all logs.")
@options.plan(help="The plan, a TOML file.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=options.files)
def check_command(
    workers: int,
    steps: int,
    only: set[int],
    link: str | None,
    json_path: Path | None,
    patience_s: float,
    device: str,
    keep: bool,
    plan_path: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND as a few workers on this machine, several times, and say what is wrong with it, and in which line.

    \b
        lsgd check -- python train.py
        lsgd check --only 1,2,3 -- python train.py --epochs 1

    What it writes goes to a scratch folder, as far as its paths are relative. It takes about as long as starting the
    script six times. Exit code 0: nothing is wrong; 1: something is.
    """  # noqa: D301
    if not command:
        raise click.UsageError("say what each worker runs: lsgd check -- python my_script.py")
    from lsgd.check.check import Check, table  # imports torch
    from lsgd.check.runs import Script
    from lsgd.check.verdicts import Status

    found = link_of(link) if link else None
    scratch = Path(tempfile.mkdtemp(prefix="lsgd-check-"))
    script = Script(command, scratch, workers, steps, patience_s, plan_path, device, source=Path.cwd())
    click.echo(f"[check] {shlex.join(command)}, in {scratch}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # everything that was started ends, too
    try:
        verdicts = Check(script, lambda words: click.echo(f"[check] {words}"), found).judge(only)
        click.echo(
            "\n".join(["", *table(verdicts, lambda where: where.replace(f"{os.path.realpath(os.curdir)}/", ""))])
        )
        if json_path is not None:
            json_path.write_text(json.dumps([each.as_json() for each in verdicts], indent=2) + "\n", encoding="utf-8")
    finally:
        if keep:
            click.echo(f"[check] kept in {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(WRONG if any(each.status is Status.WRONG for each in verdicts) else 0)


@click.command("estimate", short_help="Say what 2, 3 and 4 machines are worth on a link.")
@click.option("--parameters", default="25M", show_default=True, help="Of the model, those that train: 100M.")
@click.option("--step-ms", type=options.Number(0.001), default=100.0, show_default=True, help="Time of one step.")
@click.option("--link", default="100mbit,20ms", show_default=True, help="Of each machine.")
@click.option("--steps", default="10k", show_default=True, help="Of one machine, in the whole training.")
@click.option("--muon", is_flag=True, help="The optimizer is Muon, with which rounds hide behind steps.")
def estimate_command(parameters: str, step_ms: float, link: str, steps: str, muon: bool) -> None:
    """Say how many times as fast 2, 3 and 4 machines reach the loss of one, as a range."""
    found = lines(number_of(parameters), step_ms / 1e3, link_of(link), number_of(steps), muon=muon)
    click.echo("\n".join(found))
