"""``lsgd-server``: what is refused before anything starts."""

import signal
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from lsgd import __version__
from lsgd.server.cli import main
from lsgd.sockets import Listener


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """A server takes over the signals of its process, which here is that of the tests."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*arguments: str, **variables: str | None) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments, env=variables)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which server to be: --global (one for the run) or --local"),
        (["--global", "--node", "1"], "--connect, --node and --token belong to a local server"),
        (["--global", "--connect", "tcp://x:1"], "--connect, --node and --token belong to a local server"),
        (["--local", "--period", "4"], "--period belongs to the plan, which the global server holds"),
        (["--local", "--plan", "x.toml"], "--plan belongs to the plan"),
        (["--local", "--node", "-1"], "'--node'"),
        (["--global", "--plan", "/nowhere/plan.toml"], "the plan /nowhere/plan.toml cannot be read"),
        (["--global", "--period", "10", "--local-period", "4"], "is not a multiple of local_period"),
        (["--global", "--periods", "4"], "No such option"),
        (["--global", "--listen", "udp://x"], "cannot listen on 'udp://x'"),
        (["--local", "--listen", "ipc://" + "x" * 120], "longer than the system allows"),
        (["--local", "--listen", "ipc:///proc/lsgd/x"], "cannot be made"),
        (["--local", "--listen", "tcp://127.0.0.1:0", "--connect", "nonsense"], "'nonsense' is no address"),
        (["--global", "--listen", "tcp://127.0.0.1:0", "--save-plan", "/nowhere/plan"], "/nowhere/plan"),
    ],
)
def test_wrong_usage_is_told_and_exits_with_2(arguments, message) -> None:
    code, output = run(*arguments)
    assert (code, message in output) == (2, True), output
    assert "Traceback" not in output


def test_variables_are_settings_too_and_unknown_ones_are_refused() -> None:
    code, output = run("--global", LSGD_PERIOD="ten")
    assert code == 2 and "variable LSGD_PERIOD" in output
    code, output = run("--global", LSGD_PERIODS="10")
    assert code == 2 and "the variable LSGD_PERIODS is unknown" in output and "LSGD_PERIOD" in output
    code, output = run("--global", LSGD_PLAN="/nowhere/plan.toml")
    assert code == 2 and "the plan /nowhere/plan.toml cannot be read" in output


def test_a_file_in_the_place_of_a_socket_is_left_alone(tmp_path) -> None:
    path = tmp_path / "thesis"
    path.write_text("years of work")
    code, output = run("--local", "--listen", f"ipc://{path}")
    assert code == 2 and "is there and is no socket" in output
    assert path.read_text() == "years of work"


def test_a_socket_in_use_is_refused_and_a_stale_one_is_taken_over(tmp_path) -> None:
    address = f"ipc://{tmp_path}/s"
    with Listener(address):
        code, output = run("--local", "--listen", address)
        assert code == 2 and f"another server listens on {address}" in output
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/stale")
    with Listener(f"ipc://{tmp_path}/stale"):
        code, output = run("--local", "--listen", f"ipc://{tmp_path}/stale")
        assert code == 2 and "another server listens on" in output


def test_help_lists_every_setting_with_its_default_and_the_exit_codes() -> None:
    code, output = run("--help")
    assert code == 0
    for word in ("--pull-global", "--exchange-timeout-s", "--rounding", "Exit codes", "--save-plan"):
        assert word in output
    assert run("--version") == (0, f"main, version {__version__}\n")
