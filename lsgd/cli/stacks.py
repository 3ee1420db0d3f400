"""``lsgd stacks``: where each thread of a run's processes on this machine is."""

import os
import time
from pathlib import Path

import click

from lsgd import stacks
from lsgd.cli import options
from lsgd.errors import ConfigError


@click.command("stacks", short_help="Show where each process of a run is at this moment.")
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=options.runs,
    help="Folder of the run; default: the newest.",
)
@click.option("--all", "shows_all", is_flag=True, help="Also show the threads in which only lsgd is at work.")
def stacks_command(run: Path | None, shows_all: bool) -> None:
    """Print the stacks of all threads of the run's processes on this machine, the innermost call first.

    It asks the workers, the processes of their loaders, and the launcher; also ones that hang. It changes nothing.
    """
    found = stacks.listeners()
    if run is not None:
        found = [each for each in found if each.run_dir == os.path.realpath(run)]
    elif found:
        newest = found[-1].run_dir
        found = [each for each in found if each.run_dir == newest]
    if not found:
        where = f"in {run}" if run else "on this machine, of this user,"
        raise ConfigError(f"no process of a run {where} is running; lsgd runs lists the runs")
    click.echo(f"run in {found[0].run_dir or 'no folder'}")
    for each in found:
        click.echo(f"\n{each.name}, process {each.pid}, for {time.time() - each.started_at:.0f} s: {each.command:.200}")
        threads = [thread for thread in each.stacks().strip().split("\n\n") if thread]
        shown = [thread for thread in threads if shows_all or not stacks.is_of_lsgd(thread)]
        click.echo("\n\n".join(shown) if threads else "  it does not answer: it is stopped, or waits in the kernel")
        if len(shown) < len(threads):
            click.echo(f"and {len(threads) - len(shown)} of lsgd's own (--all shows them)")
