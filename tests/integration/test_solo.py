"""A script without servers runs alone, by the same protocol, and leaves nothing behind however it ends."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lsgd.client.control.identity import Identity
from lsgd.client.control.solo import Solo, is_alone
from lsgd.errors import ConfigError
from tests import golden

from ..check.scripts import start
from ..speed import scaled
from .running import holders, until

TRAIN = """
import sys, time, torch
from lsgd.client import Worker

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=8)
    for epoch in range(int(sys.argv[1]) if sys.argv[1:] else 10**9):
        for (x,) in worker.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            if worker.iterations == 4:
                print("trains", flush=True)
        if worker.stopped:
            break
    assert worker.leave()
    assert worker.consensus_distance == 0 and worker.timings.steps == worker.iterations
    print("made", worker.iterations, worker.world_size, worker.algorithm.period, worker.status()["state"])
"""


class Script:
    """A script, with the variables of this process that are not lsgd's; all that it starts is known by a variable."""

    def __init__(self, folder: Path, *arguments: str, script: str = TRAIN, **variables: str) -> None:
        self.token = uuid.uuid4().hex
        self.folder = folder
        (folder / "my_script.py").write_text(script)
        (folder / "tmp").mkdir()
        known = {name: value for name, value in os.environ.items() if not name.startswith("LSGD_")}
        own = {"TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder), "SCRIPT": self.token}
        command = [sys.executable, "my_script.py", *arguments]
        self.process = start(command, known | own | variables, folder, folder / "output")

    @property
    def output(self) -> str:
        self.process.poll()
        return (self.folder / "output").read_text()

    def trains(self) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, self.output
            return "trains" in self.output

        until(seen, "the script trains")

    def ends(self) -> int:
        """Return the exit code, when there is one and nothing is left."""
        until(lambda: self.process.poll() is not None, "it ends", scaled(60))
        until(lambda: not self.left() and not os.listdir(self.folder / "tmp"), "nothing is left")
        return self.process.poll()

    def left(self) -> list[int]:
        return holders(self.token)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a name short enough for sockets in it."""
    path = Path("/tmp") / f"lsgd-solo-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", path], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("loops", [(), ("3",)], ids=["to the plan's end", "leaves"])
def test_it_trains_by_the_plan_and_says_so_in_one_line(folder, loops) -> None:
    (folder / "plan.toml").write_text('workers = 4\niterations = 40\n[algorithm]\nname = "local"\nperiod = 4\n')
    script = Script(folder, *loops, LSGD_PLAN="plan.toml", LSGD_PERIOD="5")
    assert script.ends() == 0, script.output
    made = 24 if loops else 40
    assert f"\nmade {made} 1 5 over" in script.output
    (line,) = re.findall("^.* runs alone.*$", script.output, re.MULTILINE)
    assert line == (golden.text("solo.alone", arguments="".join(f" {x}" for x in loops)))


@pytest.mark.slow
def test_a_fork_of_the_script_has_no_part_in_the_run(folder) -> None:
    lines = ("child = os.fork()", "if not child: sys.exit(3)", "assert os.waitstatus_to_exitcode(os.wait()[1]) == 3")
    forks = "worker.report(loss)\n" + "".join(f"            {line}\n" for line in lines)
    text = "import os\n" + TRAIN.replace("worker.report(loss)\n", forks)
    script = Script(folder, "1", script=text, LSGD_ITERATIONS="40")
    assert script.ends() == 0, script.output
    assert "\nmade 8 1 " in script.output and "left" not in script.output and "ends" not in script.output


@pytest.mark.slow
def test_a_script_that_does_not_train_in_the_run_is_said_with_a_code_of_its_own(folder) -> None:
    script = Script(folder, "3", script=TRAIN.replace("worker.batches(loader)", "loader"))
    assert script.ends() == 78, script.output
    assert golden.text("solo.trained_nothing") in script.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_killed_leaves_nothing(folder, number) -> None:
    script = Script(folder)
    script.trains()
    assert golden.text("solo.no_end") in script.output
    assert script.left() == [script.process.pid] and not os.listdir(script.folder / "tmp")
    os.kill(script.process.pid, number)
    assert script.ends() != 0
    assert ("KeyboardInterrupt" in script.output) == (number == signal.SIGINT)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LSGD_PERIOD": "none"}, golden.pattern("plan.no_integer", setting="variable LSGD_PERIOD: period = 'none'")),
        ({"LSGD_PLAN": "away.toml"}, r"the plan away\.toml cannot be read"),
        ({"LSGD_ITERATION": "7"}, r"LSGD_ITERATION is unknown; did you mean"),
    ],
)
def test_a_wrong_setting_is_an_error_before_any_server_starts(environ, message, caplog) -> None:
    with pytest.raises(ConfigError, match=message):
        Solo(environ, Identity(0, 1, "", None))
    assert not caplog.messages


@pytest.mark.parametrize(
    ("environ", "alone"),
    [
        ({}, True),
        ({"LSGD_SOLO": "1", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_LOCALID": "0"}, False),
        ({"LSGD_LOCAL_RANK": "0"}, False),
        ({"LSGD_SOLO": "1", "LSGD_LOCAL": "ipc:///x"}, False),
        ({"LSGD_SOLO": "0"}, False),
    ],
)
def test_who_is_alone(monkeypatch, tmp_path, environ: Mapping[str, str], alone) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert is_alone(environ) is alone


def test_who_finds_a_server_is_not_alone(open_run, monkeypatch) -> None:
    socket = Path(open_run.local_address(0).removeprefix("ipc://"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket.parent))
    assert is_alone({})
    (socket.parent / "lsgd-local.sock").symlink_to(socket)
    assert not is_alone({})
    with pytest.raises(ConfigError, match="neither 1"):
        is_alone({"LSGD_SOLO": "2"})
