"""Commands that show a run outside the terminal: a page, metrics, curves, a report."""

from pathlib import Path

import click

from lsgd.cli import options
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch import alerts, curves, metrics, require
from lsgd.watch.curves import LOGGERS

ALERT_HELP = "A command for the shell (it finds LSGD_ALERT and LSGD_ALERT_CODE), or an address that gets JSON by POST."

DASHBOARD_NEEDS = ("tornado", "plotly")


@click.command("log", short_help="Write the curves of a running run: CSV, TensorBoard, W&B.")
@options.connect
@click.option(
    "--to",
    "names",
    multiple=True,
    required=True,
    type=click.Choice(list(LOGGERS)),
    help="What to write; may be repeated.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; default: the run's.")
def log_command(connect: str, keys: ConnectorKeys | None, names: tuple[str, ...], out: Path | None) -> None:
    """Write the curves of a running run, from its beginning to its end.

    csv writes curves.csv, tensorboard writes event files in tensorboard/, wandb writes a run in wandb/ (offline, unless
    WANDB_MODE says otherwise).
    """
    run_dir = click.get_current_context().meta.get(options.FOLDER)
    out = out or run_dir
    if out is None:
        raise click.UsageError("with --connect, say where to write the curves: --out FOLDER")
    names = tuple(dict.fromkeys(names))
    count = curves.write(connect, keys, out.absolute(), names, run_dir)
    click.echo(f"{count} points written to {click.format_filename(out.absolute())} ({', '.join(names)})")


@click.command("alert", short_help="Tell a person what goes wrong in a running run: a command, or a web hook.")
@options.connect
@click.option("--to", required=True, help=ALERT_HELP)
def alert_command(connect: str, keys: ConnectorKeys | None, to: str) -> None:
    """Tell of a running run until its end, each thing once.

    Rounds that fail, workers that are away or behind, a loss that is no number or does not fall, a silent server, a
    full disk, and the end.
    """
    run_dir = click.get_current_context().meta.get(options.FOLDER) or Path()
    alerts.watch(connect, keys, to, run_dir, click.echo)


@click.command("metrics", short_help="Serve the metrics of a running run to Prometheus.")
@options.connect
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; whoever can reach it can read."
)
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="0: any free port.")
def metrics_command(connect: str, keys: ConnectorKeys | None, host: str, port: int) -> None:
    """Serve the metrics of a running run to Prometheus, until a minute after its end."""
    metrics.serve(connect, keys, host, port, click.echo)


@click.command("dashboard", short_help="Serve a page that shows a running run live.")
@options.connect
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; any other needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), help="Default: 8484, or else any free port.")
@click.option("--private", is_flag=True, help="Require a token on this machine too.")
@click.option("--parent", type=int, default=0, hidden=True, help="End with this process, our parent.")
def dashboard_command(
    connect: str, keys: ConnectorKeys | None, host: str, port: int | None, private: bool, parent: int
) -> None:
    """Serve a page that shows a running run live, until Ctrl-C.

    Only this machine can open it; from another one: ssh -L 8484:localhost:8484 THIS-MACHINE. With --host, others can
    open it with the token in the printed address; traffic is not encrypted.
    """
    require("lsgd dashboard", "dashboard", *DASHBOARD_NEEDS)
    from lsgd.watch.dashboard.server import open_dashboard

    folder = click.get_current_context().meta.get(options.FOLDER)
    open_dashboard(connect, keys, host, port, folder, lambda url: click.echo(f"dashboard: {url}"), private, parent)


@click.command("report", short_help="Write the page of a finished run as one HTML file.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: report.html in the run's folder."
)
def report_command(folder: Path, output: Path | None) -> None:
    """Write the page of the run in FOLDER as one HTML file, which needs no network and can be mailed.

    After lsgd launch --dashboard it also has the timeline, the throughput and the log.
    """
    require("lsgd report", "dashboard", "plotly")
    from lsgd.watch.dashboard.page import report

    output = output or folder / "report.html"
    text = report(folder)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}; name another file with -o") from None
    click.echo(f"{click.format_filename(output)}: {len(text) / 1e6:.1f} MB")
