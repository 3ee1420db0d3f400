"""A join whose local server does not answer: gone, it is said in seconds; there but busy, it is waited for."""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lsgd.client.control import joining
from lsgd.client.control.identity import Identity
from lsgd.client.control.island import Island
from lsgd.client.control.joining import find_server
from lsgd.errors import JoinError
from lsgd.protocol.messages import WorkerHelloReply, encode
from lsgd.protocol.sockets import Listener, wait_for
from tests import golden

from ..speed import scaled


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "FIND_WITHIN_S", 0.3)
    monkeypatch.setattr(joining, "SILENCE_S", 0.3)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/local"


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Busy(logging.Handler):
    """A local server that answers nobody until a worker has said twice that it asks again."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self._idle, self._over = threading.Event(), threading.Event()
        self._listener = Listener(address)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if sum("it is there" in each for each in self.said) == 2:
            self._idle.set()

    def _serve(self) -> None:
        self._idle.wait(scaled(60))
        while not self._over.is_set():
            wait_for(0.05, self._listener)
            for peer, _ in self._listener.receive():
                self._listener.send(peer, [encode(WorkerHelloReply(3, "tcp://127.0.0.1:9"))])

    def close(self) -> None:
        self._idle.set()
        self._over.set()
        self._thread.join(scaled(30))
        self._listener.close()
        super().close()


def find(address: str, timeout_s: float) -> joining.Found:
    return find_server(Island(), Identity(0, 7, address, None), timeout_s)


def test_a_server_that_is_there_but_busy_is_waited_for(impatient, address, opened) -> None:
    server = Busy(address)
    opened.callback(server.close)
    joining.logger.addHandler(server)
    opened.callback(joining.logger.removeHandler, server)
    found = find(address, 60.0)
    opened.callback(found.close)
    assert found.node == 3
    assert re.search(golden.pattern("joining.asks_again"), server.said[0])


def test_a_busy_server_is_waited_for_no_longer_than_asked(impatient, address, opened) -> None:
    opened.enter_context(Listener(address))
    with pytest.raises(JoinError, match=golden.pattern("joining.looking")):
        find(address, 0.5)


def test_a_server_that_is_gone_is_not_waited_for(impatient, address) -> None:
    Listener(address).close()
    with pytest.raises(JoinError, match=golden.pattern("joining.no_local_server")):
        find(address, 600.0)
