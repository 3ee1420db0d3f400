"""The command lines of lsgd check and lsgd estimate, and that nothing is left of a check that is interrupted."""

import os
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from tests import golden

from ..check.scripts import start
from ..integration.running import holders, until
from ..speed import scaled

RIGHT = Path(__file__).parents[1] / "check" / "right" / "own_loop.py"


def said(*arguments: str) -> str:
    """Return what a command prints that ends with a wrong command line, or well."""
    return CliRunner().invoke(main, arguments).output


def test_points_that_there_are_not() -> None:
    assert golden.text("check.only_points") in said("check", "--only", "1,12", "--", "python", "x.py")
    assert golden.text("check.only_points") in said("check", "--only", "data", "--", "python", "x.py")


def test_a_command_is_needed() -> None:
    assert golden.text("check.command") in said("check")


@pytest.mark.parametrize("number", ["nan", "inf", "0"])
def test_a_step_takes_a_time(number: str) -> None:
    for command in ("estimate", "doctor"):
        assert golden.text("check.bad_step_ms", number=number) in said(command, "--step-ms", number)


def test_an_estimate() -> None:
    lines = said("estimate", "--parameters", "100M", "--step-ms", "400", "--link", "1gbit").splitlines()
    assert lines[0].startswith(golden.text("check.given_link"))
    assert [line.split()[0] for line in lines[1:]] == ["2", "3", "4"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_check_that_is_interrupted(tmp_path, number) -> None:
    token = f"of-{tmp_path.name}-{number}"
    command = [sys.executable, "-m", "lsgd.client", "check", "--only", "1", "--", sys.executable, str(RIGHT)]
    check = start(command, {**os.environ, "TMPDIR": str(tmp_path), "CHECKED": token}, tmp_path, tmp_path / "output")
    facts = tmp_path.glob
    until(lambda: [*facts("lsgd-check-*/straight/check/facts-straight/*.jsonl")], "workers join")
    os.kill(check.pid, number)
    until(lambda: check.poll() is not None, "it ends", scaled(60.0))
    assert check.poll() != 0
    until(lambda: not holders(token), "all that it has started has ended")
    assert not [*facts("lsgd-check-*")]
