"""``lsgd quickstart``: trains the example from a copy of its script, which the user can change."""

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path

import click

import lsgd
from lsgd.errors import ConfigError
from lsgd.node import gpus
from lsgd.node.commands import LaunchSettings
from lsgd.node.launch import launch
from lsgd.node.place import Place

SCRIPT, PLAN = "digits.py", "digits.toml"
"""The files of ``lsgd.examples`` that are copied to the run folder."""

WORKERS = 2


def quickstart(run_dir: Path, device: str, *, plain: bool) -> int:
    """Train the example with two workers on this machine, and print how to continue; return the exit status.

    Raises:
        ConfigError: a library is missing, or the folder is of another run or cannot be written.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            f"the example learns the digits of scikit-learn, which is missing: "
            f"{sys.executable} -m pip install scikit-learn matplotlib"
        )
    chosen = gpus.choose(device, WORKERS)
    devices = chosen.names
    script, plan = run_dir / SCRIPT, run_dir / PLAN
    again = f"lsgd launch --workers {WORKERS} --plan {shlex.quote(str(plan))} -- python {shlex.quote(str(script))}"
    try:
        if script.exists() or plan.exists():
            raise ConfigError(
                f"{run_dir} has a {SCRIPT} already: name another folder with --run-dir, or train it: {again}"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in (script, plan):
            shutil.copyfile(Path(lsgd.__file__).parent / "examples" / path.name, path)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written ({error.strerror}): name a folder with --run-dir") from None
    if chosen.warning:
        click.echo(f"[launch] {chosen.warning}", err=True)
    click.echo(f"[launch] {WORKERS} workers on {', '.join(dict.fromkeys(devices))} train {script}")
    place = Place(0, 1, "127.0.0.1")
    status = launch(
        LaunchSettings(place, 0, devices, plan, run_dir.absolute(), (sys.executable, str(script)), plain=plain)
    )
    if status == 0:
        click.echo(f"\nIts script is {script}, its settings are in {plan}.\nChange them, and train again:\n  {again}")
    return status
