"""``lsgd compare``: runs side by side."""

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from lsgd.cli import options
from lsgd.watch import compare, require


@click.command("compare", short_help="Compare runs: settings, speed, and losses over iterations and time.")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), shell_complete=options.runs)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Also draw the losses: a PNG file."
)
def compare_command(folders: tuple[Path, ...], output: Path | None) -> None:
    """Compare the runs in these folders, finished or not.

    Losses are those that the workers report, their mean over the last twentieth of the run.
    """
    if len(folders) < 2:
        raise click.UsageError("name the folders of two runs or more; lsgd runs lists them")
    runs = [compare.run_of(folder) for folder in folders]
    head, *rows = compare.table(runs)
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)
    if output is not None:
        require("lsgd compare --output", "examples", "matplotlib")
        from lsgd.watch.curve import draw_beside

        draw_beside(runs, output)
        click.echo(f"\nthe losses are drawn in {click.format_filename(output)}")
