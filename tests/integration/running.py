"""Real servers and real worker processes, each ended by its id and seen to be gone."""

import atexit
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.testbed.launch import free_port as free_port  # for the tests
from lsgd.protocol.events import GenerationBegan, Happening, decode_event
from lsgd.protocol.messages import PROTOCOL, Events, EventsQuery, Generation, Status, StatusQuery, decode, encode
from lsgd.protocol.sockets import Connector, wait_for
from tests import golden

from ..speed import scaled

HERE = Path(__file__).parent
SCRIPTS = HERE / "workers"
DEADLINE_S = scaled(90.0)
LOADED_BY_WORKERS = (
    *("torch", "torch._dynamo", "torch.profiler", "numpy.ctypeslib", "encodings.idna"),
    *("lsgd.plan.options", "lsgd.client.worker", "lsgd.cli.commands", "lsgd.server.cli", "warm"),
)
"""Modules that workers use sooner or later. The first optimizer imports torch._dynamo, which takes as long as torch."""
ROOM = 1 << 15
"""For the command lines and variables of forks."""
LIGHT = {"PYTHONPATH": os.pathsep.join([str(HERE / "light"), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
"""Variables of processes that train and compile nothing: they start in half the time (light/sitecustomize.py)."""


H = TypeVar("H", bound=Happening)


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Return what ``condition`` returns as soon as that is true."""
    end = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.05)  # whoever looks takes the processor from what it waits for
    return result


def lost(said: str) -> int:
    """Return how many iterations a global server has taken off the count, by what it has said."""
    return sum(map(int, re.findall(golden.pattern("reasons.taken_off"), said)))


def holders(token: str) -> list[int]:
    """Return the processes whose variables have this text: a test's own, with all that they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Process:
    """A process under test: a server, or a script of the server of forks. Its output is a file."""

    def __init__(self, name: str, pid: int, log: Path, poll: Callable[[], int | None]) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.poll = poll

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def says(self, pattern: str, deadline_s: float = DEADLINE_S) -> re.Match[str]:
        """Return the match of ``pattern`` in the output, when it is there."""

        def found() -> re.Match[str] | None:
            ended = self.poll() is not None  # before its output is read, which is whole then
            match = re.search(pattern, self.output, re.MULTILINE)
            assert match or not ended, f"{self.name} ended without saying {pattern!r}:\n{self.output}"
            return match

        return until(found, f"{self.name} says {pattern!r}:\n{self.output}", deadline_s)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit code, when there is one."""
        try:
            until(lambda: self.poll() is not None, f"{self.name} ends", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        code = self.poll()
        assert code is not None
        return code

    def succeeds(self, deadline_s: float = DEADLINE_S) -> str:
        """Return the output, when the process has ended well."""
        code = self.wait(deadline_s)
        assert code == 0, f"{self.name} ended with {code}:\n{self.output}"
        return self.output

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just now
                self.send(number)

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class Fork(Process):
    """A process of the server of forks with the interface of ``subprocess.Popen``. Its output is a pipe."""

    def __init__(self, pid: int, poll: Callable[[], int | None], pipe: int) -> None:
        super().__init__("fork", pid, Path(os.devnull), poll)
        self.stdout = open(pipe)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float = DEADLINE_S) -> tuple[str, None]:
        """Return the rest of its output, when it has ended and all that write there, and nothing as that of errors."""
        output: list[str] = []
        if not self.stdout.closed:
            reader = threading.Thread(target=lambda: output.append(self.stdout.read()), daemon=True)
            reader.start()
            reader.join(timeout)
            assert not reader.is_alive(), f"process {self.pid} does not end within {timeout:g} s"
            self.stdout.close()
        self.wait(timeout)
        return "".join(output), None

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts programs in Python by forks (forkserver.py); it starts itself with the first of them.

    Args:
        modules: to import before the first fork.
        variables: of the server of forks.
    """

    def __init__(self, *modules: str, **variables: str) -> None:
        self._modules = modules
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        self._lock = threading.RLock()

    def start(
        self, program: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path, host: int = 0
    ) -> Process:
        """Start a module, or a script by its path, whose output goes to a file."""
        command = [sys.executable, *(() if program.endswith(".py") else ("-m",)), program, *arguments]
        pid = self._fork(command, environ=environ, log=str(log), cwd=os.getcwd(), host=host, launches=False)
        return Process(log.stem, pid, log, lambda: self._code(pid))

    def popen(
        self, command: Sequence[object], *, env: Mapping[str, str], cwd: Path | None = None, host: int = 0
    ) -> Fork:
        """Start a command of Python that starts others, here or on the host of a testbed with this first process."""
        reading, writing = os.pipe()
        log = f"/proc/{os.getpid()}/fd/{writing}"
        folder = str(cwd or os.getcwd())
        pid = self._fork(list(map(str, command)), environ=env, log=log, cwd=folder, host=host, launches=True)
        os.close(writing)
        return Fork(pid, lambda: self._code(pid), reading)

    def _fork(self, command: list[str], *, environ: Mapping[str, str], **how: object) -> int:
        request = {"command": command, "environ": dict(environ), **how}
        with self._lock:
            if self._process is None:
                self._process = self._begin()
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            return int(until(self._take_started, f"{shlex.join(command)} starts"))

    def _begin(self) -> subprocess.Popen[bytes]:
        one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        environ = {**os.environ, **one_thread, **self._variables, "ROOM": "-" * ROOM}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "forkserver.py"), " ".join(self._modules), "-" * ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        assert process.stdin and process.stdout
        self._requests, self._answers = process.stdin, process.stdout
        assert "ready" in json.loads(self._answers.readline())
        os.set_blocking(self._answers.fileno(), False)
        atexit.register(self.close)
        return process

    def close(self) -> None:
        """End the server of forks."""
        assert self._process is not None
        self._requests.close()
        self._process.wait(DEADLINE_S)
        self._answers.close()

    def _take_started(self) -> int | None:
        self._read()
        return self._started.pop() if self._started else None

    def _code(self, pid: int) -> int | None:
        self._read()
        return self._codes.get(pid)

    def _read(self) -> None:
        with self._lock:
            while line := self._answers.readline():
                answer = json.loads(line)
                if "started" in answer:
                    self._started.append(answer["started"])
                    self._codes.pop(answer["started"], None)  # of another with its number
                else:
                    self._codes[answer["ended"]] = answer["code"]


FORKS = ForkServer(*LOADED_BY_WORKERS)
"""Forks workers, and launchers with all that these start."""


def fields_of(what: Happening) -> dict[str, object]:
    return {each.name: getattr(what, each.name) for each in dataclasses.fields(what)}


class Cluster:
    """Servers and workers of one run on this machine, on free ports and sockets of their own.

    Args:
        folder: of logs, and the workers' run folder.
    """

    server_forks = ForkServer("lsgd.server.cli", "encodings.idna")
    worker_forks = FORKS

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self._sockets = Path(tempfile.mkdtemp(prefix="lsgd-test-", dir="/tmp"))
        self.processes: list[Process] = []

    @property
    def lost(self) -> int:
        """How many iterations the global servers have taken off the count."""
        return sum(lost(path.read_text()) for path in self.folder.glob("global-*.log"))

    def server(self, name: str, *arguments: str) -> Process:
        """Start ``lsgd-server`` with these arguments."""
        return self._start(self.server_forks, "lsgd.server", name, arguments, {})

    def fresh_server(self, name: str, *arguments: str, **variables: str) -> Process:
        """The same in an interpreter of its own, which has what the system and these variables give it."""
        log = self._log(name)
        with log.open("wb") as stream:
            popen = subprocess.Popen(
                [sys.executable, "-m", "lsgd.server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            )
        self.processes.append(Process(name, popen.pid, log, popen.poll))
        return self.processes[-1]

    def start_global(self, *arguments: str, listen: str = "tcp://127.0.0.1:0") -> Process:
        """Start the global server and note its address; without an algorithm, Leader SGD, whose period is known."""
        if not {"--algorithm", "--plan"} & set(arguments):
            arguments += ("--algorithm", "leader")
        server = self.server("global", "--global", "--listen", listen, *arguments)
        self.address = server.says(r"global server on (\S+),")[1]
        return server

    def start_local(self, node: int = 0) -> Process:
        """Start the local server of a node."""
        arguments = ["--node", str(node), "--listen", self.local_address(node), "--connect", self.address]
        server = self.server(f"local{node}", "--local", *arguments)
        server.says(golden.pattern("server.local_server_of"))
        return server

    def local_address(self, node: int) -> str:
        return f"ipc://{self._sockets}/node{node}"

    def worker(self, script: str, node: int = 0, index: int = 0, *arguments: object, **variables: str) -> Process:
        """Start a script of workers/ as a worker."""
        variables = {
            "LSGD_LOCAL": self.local_address(node),
            "LSGD_LOCAL_RANK": str(index),
            "LSGD_RUN_DIR": str(self.folder),
            **variables,
        }
        program = str(SCRIPTS / f"{script}.py")
        return self._start(self.worker_forks, program, f"worker{node}.{index}", arguments, variables)

    def start(self, *arguments: str, nodes: int = 1) -> tuple[Process, list[Process]]:
        """Start the global server and a local one for each node."""
        return self.start_global(*arguments), [self.start_local(node) for node in range(nodes)]

    def ask(self, message: Any) -> Any:
        """Send a message to the global server as an operator does and return the answer."""
        with Connector(self.address, f"test{time.monotonic_ns()}".encode()) as link:
            until(lambda: link.send([encode(message)]), "the global server takes a message")
            end = time.monotonic() + DEADLINE_S
            while time.monotonic() < end:
                wait_for(0.1, link)
                for frames in link.receive():
                    return decode(frames[1])
        outputs = "".join(f"\n\n{p.name}, {p.poll()}:\n{p.output}" for p in self.processes)
        raise AssertionError(f"the global server does not answer; exit codes and outputs:{outputs}")

    def status(self) -> dict[str, Any]:
        answer = self.ask(StatusQuery(0))
        assert isinstance(answer, Status)
        return json.loads(answer.report)

    def told(self) -> list[Happening]:
        """Return what the global server has told since it was started, in order."""
        found: list[Happening] = []
        while True:
            answer = self.ask(EventsQuery(PROTOCOL, len(found)))
            assert isinstance(answer, Events) and answer.lost == 0
            found += [decode_event(answer.first + i, item).what for i, item in enumerate(answer.items)]
            if len(found) >= answer.last:
                return found

    def tells(self, kind: type[H], **values: object) -> H:
        """Return the first of this kind with these values that the global server has told, when it has."""

        def found() -> H | None:
            of_kind = (what for what in self.told() if isinstance(what, kind))
            return next((what for what in of_kind if values.items() <= fields_of(what).items()), None)

        return cast(H, until(found, f"the global server tells {kind.__name__} {values}"))

    def generation(self, number: int) -> Generation:
        """Return a generation, when it has begun."""

        def found() -> Generation | None:
            generations = [what.generation for what in self.told() if isinstance(what, GenerationBegan)]
            return next((each for each in generations if each.number == number), None)

        return cast(Generation, until(found, f"generation {number} begins"))

    def result(self, node: int, index: int) -> dict[str, Any]:
        """Return what a worker has written down as its result."""
        return json.loads((self.folder / f"node{node}-worker{index}.json").read_text())

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}-{len(self.processes)}.log"

    def _start(
        self,
        forks: ForkServer,
        program: str,
        name: str,
        arguments: Sequence[object],
        variables: Mapping[str, str],
    ) -> Process:
        environ = {**os.environ, **variables}
        self.processes.append(forks.start(program, [str(a) for a in arguments], environ, self._log(name)))
        return self.processes[-1]

    def close(self) -> None:
        """End what still runs, the workers first."""
        for process in reversed(self.processes):
            process.end()
        gone = [p.name for p in self.processes if p.poll() is None]
        assert not gone
        shutil.rmtree(self._sockets)


def train_two(program: str, cluster: Cluster, plan: list[str], *arguments: object, first: Sequence[object] = ()) -> Any:
    """Train in two workers, the first with more arguments, and return the last status and what they know."""
    server, _ = cluster.start("--workers", "2", *plan)
    workers = [cluster.worker(program, 0, i, *arguments, *(first if i == 0 else ())) for i in range(2)]
    for worker in workers:
        worker.succeeds()
    return server.succeeds(), [cluster.result(0, i) for i in range(2)]


def check_trainers_without_an_end(program: str, cluster: Cluster) -> None:
    """Check that all have the consensus, also one that is done long before the other, and that one of them saves."""
    plan, first = ["--algorithm", "local", "--period", "4"], ("--max-steps", 6)
    _, workers = train_two(program, cluster, plan, "--max-steps", 40, first=first)
    assert [w["steps"] for w in workers] == [w["iterations"] for w in workers] == [6, 40]
    assert workers[0]["final"] == workers[1]["final"] and [w["first"] for w in workers].count(True) == 1
    outputs = [p.output for p in cluster.processes if p.name.startswith("worker")]
    assert all(
        golden.text("exchange.waits_for_others") in each and golden.text("exchange.not_consensus") not in each
        for each in outputs
    )
