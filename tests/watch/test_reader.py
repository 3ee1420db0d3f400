"""What everybody who follows a run says when its global server gives up for another one."""

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.errors import JoinError
from lsgd.node.panel import Panel
from lsgd.protocol.messages import Endpoint, Moved, encode
from lsgd.protocol.sockets import Listener, wait_for
from lsgd.watch.reader import Reader
from tests import golden

from ..integration.running import DEADLINE_S, until

SAID = "the other part has more. The run continues on node1, at tcp://10.0.0.2:27400: follow it there"


@pytest.fixture
def moved() -> Iterator[str]:
    """Return the address of a server that says where the run continues, whatever it is asked."""
    answer = encode(Moved("r", Endpoint(1, "tcp://10.0.0.2:27400"), "the other part has more", "r"))
    listener, ended = Listener("tcp://127.0.0.1:0"), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            wait_for(0.05, listener)
            for peer, _ in listener.receive():
                listener.send(peer, [b"", answer])

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.address
    ended.set()
    thread.join()
    listener.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["status", "--watch"],
        ["status", "--json"],
        ["status", "--healthy"],
        ["set", "period=8"],
        ["stop"],
        pytest.param(["metrics", "--port", "0"], marks=pytest.mark.slow),  # needs prometheus_client
        ["log", "--to", "csv", "--out", "."],
    ],
    ids=" ".join,
)
def test_each_command_says_where_the_run_continues(moved, tmp_path, monkeypatch, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("lsgd.cli.commands.HEALTHY_WITHIN_S", DEADLINE_S)
    done = CliRunner().invoke(main, [*arguments, "--connect", moved])
    assert (done.exit_code, done.output.splitlines()[-1]) == (1, f"Error: {SAID}")


def test_the_panel_of_a_launcher_says_it_too(moved) -> None:
    shown: list[list[str]] = []
    screen = SimpleNamespace(panel=shown.append, is_terminal=True)
    panel = Panel(screen, lambda: (moved, None))  # type: ignore[arg-type]
    panel.start()
    until(lambda: shown, "it says so")
    panel.close()
    assert shown[0] == [golden.text("watch.no_progress", said=SAID)]


def test_a_reader_raises_it_each_time(moved) -> None:
    with Reader(moved) as reader:
        for _ in range(2):
            with pytest.raises(JoinError, match="node1, at tcp://10"):
                while True:
                    reader.read(10.0)
