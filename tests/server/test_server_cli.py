"""``lsgd-server``: what is refused before anything starts."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from lsgd import __version__
from lsgd.errors import ConfigError
from lsgd.plan.plan import Plan
from lsgd.protocol.sockets import Listener, default_local_address
from lsgd.server import serve
from lsgd.server.cli import main
from tests import golden

from .helpers import as_a_user_without_rights


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
        ([], golden.text("server.say_which")),
        (["--global", "--local"], golden.text("server.one_process")),
        (["--global", "--node", "1"], golden.text("server.option_of", option="--node", of="--local", kind="--global")),
        (
            ["--connect", "tcp://x:1", "--global"],
            golden.text("server.option_of", option="--connect", of="--local", kind="--global"),
        ),
        (
            ["--local", "--period", "4"],
            golden.text("server.option_of", option="--period", of="--global", kind="--local"),
        ),
        (["--local", "--workers", "0"], golden.text("server.says_how_many")),
        (["--local", "--workers", "two"], golden.text("plan.no_integer", setting="flag --workers: workers = 'two'")),
        (
            ["--local", "--plan", "x.toml"],
            golden.text("server.option_of", option="--plan", of="--global", kind="--local"),
        ),
        (
            ["--local", "--keys", "x"],
            golden.text("server.option_of", option="--keys", of="--global or --relay", kind="--local"),
        ),
        (["--local", "--node", "-1"], "'--node'"),
        (["--global", "--plan", "/nowhere/plan.toml"], "the plan /nowhere/plan.toml cannot be read"),
        (
            ["--global", "--algorithm", "leader", "--period", "10", "--local-period", "4"],
            golden.text("server.no_multiple"),
        ),
        (["--global", "--periods", "4"], "No such option"),
        (["--global", "--listen", "udp://x"], "cannot listen on 'udp://x'"),
        (["--global", "--listen", "tcp://10.0.0..1:1", "--insecure"], golden.text("server.not_of_this_machine")),
        (["--local", "--listen", "ipc://" + "x" * 120], golden.text("server.too_long")),
        (["--local", "--listen", "ipc:///proc/lsgd/x"], "the socket /proc/lsgd/x cannot be used: No such file"),
        (["--local", "--listen", "tcp://127.0.0.1:0", "--connect", "nonsense"], golden.text("server.nonsense")),
        (
            ["--relay", "--connect", "tcp://127.0.0.1:1"],
            golden.text("server.option_of", option="--connect", of="--local", kind="--relay"),
        ),
        (
            ["--relay", "--period", "3"],
            golden.text("server.option_of", option="--period", of="--global", kind="--relay"),
        ),
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
    assert code == 2 and golden.text("server.unknown_variable") in output and "LSGD_PERIOD" in output
    code, output = run("--global", LSGD_PLAN="/nowhere/plan.toml")
    assert code == 2 and golden.text("server.no_plan") in output


def test_a_file_in_the_place_of_a_socket_is_left_alone(tmp_path) -> None:
    path = tmp_path / "thesis"
    path.write_text("years of work")
    code, output = run("--local", "--listen", f"ipc://{path}")
    assert code == 2 and golden.text("server.no_socket") in output
    assert path.read_text() == "years of work"


def test_a_socket_in_another_users_folder_is_told(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "hers"
    folder.mkdir(mode=0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))  # as after `su` from her session
    told = f"the socket {folder}/lsgd-local.sock cannot be used: Permission denied"
    with as_a_user_without_rights(tmp_path), pytest.raises(ConfigError, match=told):
        Listener(default_local_address())


def test_a_socket_in_use_is_refused_and_a_stale_one_is_taken_over(tmp_path) -> None:
    address = f"ipc://{tmp_path}/s"
    with Listener(address):
        code, output = run("--local", "--listen", address)
        assert code == 2 and golden.text("server.process_listens", pid=os.getpid(), address=address) in output
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/stale")
    with Listener(f"ipc://{tmp_path}/stale"):
        code, output = run("--local", "--listen", f"ipc://{tmp_path}/stale")
        assert code == 2 and "listens on" in output


def test_a_server_that_is_to_go_on_begins_no_new_run(tmp_path) -> None:
    assert golden.text("server.name_journal") in run("--global", "--continue")[1]
    journal, plan = ("--journal", str(tmp_path / "j")), ("--plan", str(tmp_path / "gone.toml"))  # the journal has it
    code, output = run("--global", "--continue", *journal, *plan, "--listen", "tcp://127.0.0.1:0")
    assert code == 2 and golden.text("server.no_unfinished") in output
    code, output = run("--local", "--continue")
    assert code == 2 and golden.text("server.option_of", option="--continue", of="--global", kind="--local") in output


def test_a_server_that_fails_in_its_own_code_says_where_with_an_exit_code_of_its_own(monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise OverflowError("an integer is too large")

    monkeypatch.setattr("lsgd.server.serve.GlobalDaemon.run", fail)
    code, said = run("--global", "--listen", "tcp://127.0.0.1:0")
    assert code == 70
    assert golden.text("server.own_mistake") in said and "OverflowError: an integer is too large" in said


def test_a_plan_that_cannot_be_written_ends_no_server_that_goes_on(tmp_path, capsys) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("iterations = 7\n")
    (tmp_path / "plan.toml.tmp").symlink_to("/dev/full")
    for continued in (False, True):
        serve._save_plan(Plan(), path, continued=continued)
        assert golden.text("server.plan_full", path=path) in capsys.readouterr().err
        assert path.read_text() == "iterations = 7\n"
        assert not (tmp_path / "plan.toml.tmp").exists()
        (tmp_path / "plan.toml.tmp").symlink_to("/dev/full")
    serve._save_plan(Plan(), tmp_path / "nowhere" / "plan.toml", continued=True)
    assert golden.text("server.no_file_continues") in capsys.readouterr().err


def test_a_plan_replaces_nothing_but_a_file(tmp_path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(ConfigError, match=golden.pattern("server.plan_irregular", path=path)):
        serve._save_plan(Plan(), path, continued=False)
    assert path.is_fifo()


def test_help_lists_every_setting_with_its_default_and_the_exit_codes() -> None:
    code, output = run("--global", "--help")
    assert code == 0
    output += run("--help")[1]
    for word in ("--pull-global", "--exchange-timeout-s", "--rounding", "Exit codes", "--save-plan"):
        assert word in output
    words = " ".join(output.split())
    assert golden.text("server.help_steps") in words
    assert golden.text("server.help_iterations") in words
    for line in (["--version"], ["--global", "--version"]):
        code, said = run(*line)
        assert code == 0 and said.startswith(f"lsgd-server {__version__} (a checkout), Python 3.")
