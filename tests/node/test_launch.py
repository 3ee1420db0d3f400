"""``lsgd launch``: its errors in one line, Slurm's answers, and whole nodes with the real servers."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lsgd import processors
from lsgd.cli.commands import main
from lsgd.errors import ConfigError
from lsgd.node import gpus, launch, place, stages
from lsgd.node.commands import LaunchSettings
from lsgd.node.place import Place, find_place, resolve
from lsgd.node.screen import Screen
from lsgd.protocol.credentials import place_of
from lsgd.protocol.keys import KeyRing
from lsgd.protocol.ports import hold_or_any, port_of
from lsgd.run_folder import is_live
from lsgd.run_folder import runs as checkpoints
from lsgd.server.reasons import Why
from tests import golden

from ..integration.running import FORKS, LIGHT, free_port, holders, lost
from ..speed import scaled

JOINED = "worker = Worker.join(model, optimizer)\nif True:"

TRAIN = """
import json, os, sys, torch
from pathlib import Path
from lsgd.client import Worker

model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
here = Path(os.environ["LSGD_RUN_DIR"])
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = (model(x) - x.sum()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            if "fail" in sys.argv and worker.rank == 1:
                raise RuntimeError("the data is bad")
            (here / f"trains{worker.rank}").touch()
    about = {name: value for name, value in os.environ.items() if name.startswith(("LSGD", "OMP", "THP"))}
    about["weights"] = model.weight.flatten().tolist()
    (here / f"worker{worker.rank}.json").write_text(json.dumps(about))
"""


class Node:
    """A launcher in a process of its own; all that it starts is known by a variable."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: tuple[str, ...] = (),
        script: str = TRAIN,
        **variables: str,
    ) -> None:
        self.run_dir = folder / "run"
        self.token = uuid.uuid4().hex
        (folder / "train.py").write_text(script)
        if "--plan" not in arguments:  # a period that is known
            variables = {"LSGD_ALGORITHM": "leader", **variables}
        environ = {"LAUNCHED": self.token, **os.environ, **variables}
        options = ["--device", "cpu", "--run-dir", str(self.run_dir), *arguments]
        command = [sys.executable, "-m", "lsgd.client", "launch", *options, "--", "python", "train.py", *program]
        self.process = FORKS.popen(command, cwd=folder, env=environ)

    def left(self) -> list[int]:
        """Return the processes that are there."""
        return holders(self.token)

    def lines(self) -> bytes:
        """Return the command lines of the processes that are there."""
        lines = []
        for pid in self.left():
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        return b"\n".join(lines)

    def finish(self) -> tuple[int, str]:
        """Return exit status and output, when it has ended and left nothing behind."""
        output, _ = self.process.communicate(timeout=scaled(90))
        assert self.left() == []
        return self.process.returncode, output

    @property
    def result(self) -> dict[str, Any]:
        """What stays of the run: its state, and its rounds."""
        rounds = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return json.loads((self.run_dir / "result.json").read_text()) | {"rounds": list(map(json.loads, rounds))}

    def about(self, rank: int) -> dict[str, object]:
        """Return what the worker of this rank has told at its end."""
        return json.loads((self.run_dir / f"worker{rank}.json").read_text())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a node that trains."""
    nodes: list[Node] = []

    def start(*arguments: str, **options: object) -> Node:
        folder = tmp_path / f"launcher {len(nodes)}"
        folder.mkdir()
        nodes.append(Node(folder, *arguments, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield start
    for node in nodes:
        node.process.kill()
        node.process.communicate()
        until(lambda node=node: not node.left(), "all processes are gone")  # type: ignore[misc]


def until(condition: Callable[[], object], what: str, deadline_s: float = scaled(60.0)) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def program(folder: Path, name: str, script: str) -> None:
    """Make a shell script that can be executed."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
class TestNode:
    """Real servers, real workers."""

    def test_trains_and_ends(self, start):
        node = start("--node", "0", "--port", "0", LSGD_ITERATIONS="100", OMP_NUM_THREADS="", DRAWS="1")
        status, output = node.finish()
        assert status == 0, output
        plan = tomllib.loads((node.run_dir / "plan.toml").read_text())
        assert (plan["workers"], plan["nodes"], plan["iterations"]) == (0, 1, 100)
        first, second = node.about(0), node.about(1)
        assert first["weights"] == second["weights"]
        assert (first["LSGD_LOCAL_RANK"], second["LSGD_LOCAL_RANK"]) == ("0", "1")
        assert (first["LSGD_RANK"], second["LSGD_RANK"], first["LSGD_WORKERS"]) == ("0", "1", "2")
        assert first["LSGD_NODE"] == "0" and first["LSGD_DEVICE"] == "cpu"
        assert first["LSGD_RUN_DIR"] == str(node.run_dir)
        assert first["OMP_NUM_THREADS"] == str(max(1, processors.usable() // 2))
        assert first["THP_MEM_ALLOC_ENABLE"] == "1"
        logs = {path.name for path in node.run_dir.glob("*.log")}
        assert logs == {"global.log", "node0.log", "node0-worker0.log", "node0-worker1.log"}
        for log in node.run_dir.glob("*.log"):
            name = log.stem.replace("-", "/")
            shown = [line for line in output.splitlines() if line.startswith(f"[{name}] ")]
            assert [f"[{name}] {line}" for line in log.read_text().splitlines()] == shown
        assert golden.text("launch.rounds_2") in output
        result = node.result
        assert (result["state"], result["code"], result["exit_code"]) == ("finished", "all_made", 0)
        assert (result["count"], result["rounds_global"], result["algorithm"]) == (100, 2, "leader")
        assert sum(member["done"] for member in result["members"]) == 100
        assert [(each["round"], each["count"]) for each in result["rounds"]] == [(1, 0), (2, 100)]
        assert result["loss"] == pytest.approx(sum(result["rounds"][1]["losses"].values()) / 2, rel=1e-5)
        assert (node.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert golden.text("launch.finished") in output

    def test_ctrl_c_makes_the_consensus(self, start):
        node = start("--node", "0")  # alone it takes any port
        until(lambda: len(list(node.run_dir.glob("trains*"))) == 2, "both workers train")
        told = CliRunner().invoke(main, ["status", "--run", str(node.run_dir.parent)])
        (listed,) = json.loads(CliRunner().invoke(main, ["runs", str(node.run_dir.parent), "--json"]).stdout)
        assert (listed["state"], listed["folder"]) == ("running", str(node.run_dir))
        assert told.exit_code == 0 and golden.text("launch.run_at", path=node.run_dir) in told.stderr
        assert ":27400:" not in told.stderr
        node.process.send_signal(signal.SIGINT)
        status, output = node.finish()
        assert status == 0, output
        assert node.about(0)["weights"] == node.about(1)["weights"]
        assert Why.ENDED(reason="lsgd launch of node0 got SIGINT") in output and "SIGTERM" not in output
        assert (node.result["state"], node.result["reason"]) == ("stopped", golden.text("launch.got_sigint"))
        listed = CliRunner().invoke(main, ["runs", str(node.run_dir.parent)])
        assert "run  stopped  leader" in listed.stdout

    def test_goes_on_with_the_run_of_its_folder_on_more_workers(self, start):
        first = start("--node", "0", "--port", "0", LSGD_ITERATIONS="64", LSGD_PERIOD="16")
        status, output = first.finish()
        assert status == 0, output
        again = ("--node", "0", "--port", "0", "--run-dir", str(first.run_dir))
        status, output = start(*again).finish()
        assert status == 1
        assert golden.text("launch.earlier_run", path=first.run_dir) in output
        folder = first.run_dir.parent  # the newest run in it is meant
        status, output = start(*again[:-1], str(folder), "--resume", "--workers", "3", LSGD_ITERATIONS="99").finish()
        assert status == 0, output
        assert golden.text("launch.resumes", path=first.run_dir) in output
        assert golden.text("launch.resumes_taking_over") in output
        assert f"{Why.ALL_MADE(limit=99)}; 99 iterations" in output
        plan = tomllib.loads((first.run_dir / "plan.toml").read_text())
        assert (plan["workers"], plan["algorithm"]["period"]) == (0, 16)
        log = (first.run_dir / "global.log").read_text()
        assert f"{Why.ALL_MADE(limit=64)}; 64" in log and f"{Why.ALL_MADE(limit=99)}; 99" in log
        result = first.result
        assert (result["count"], result["state"], len({each["run"] for each in result["rounds"]})) == (
            99,
            "finished",
            2,
        )
        assert [each["count"] for each in result["rounds"]] == [0, 32, 64, 64, 99]
        status, output = start(*again[:-1], str(folder / "nothing"), "--resume").finish()
        assert status == 1 and golden.text("launch.nothing_to_resume") in output

    def test_failing_worker_ends_the_node(self, start):
        node = start("--node", "0", "--port", "0", program=("fail",))
        status, output = node.finish()
        assert status == 1
        report = output.partition("lsgd launch: ")[2]
        assert report.startswith(golden.text("launch.failed_last_lines"))
        assert "    RuntimeError: the data is bad" in report
        result = node.result
        assert (result["state"], result["reason"]) == ("failed", golden.text("launch.failed"))
        assert (result["exit_code"], result["rounds"][0]["count"]) == (1, 0)

    def test_a_script_that_never_joins_is_said_with_a_code_of_its_own(self, start):
        node = start("--node", "0", "--workers", "1", script="print('trained alone')")
        status, output = node.finish()
        assert status == 78, output
        assert (node.result["state"], node.result["exit_code"], node.result["rounds"]) == ("failed", 78, [])
        assert golden.text("launch.untrained") in node.result["reason"]
        assert not (node.run_dir / "curve.png").exists()  # there is nothing to draw
        assert golden.text("launch.untrained_why") in output
        assert "    trained alone" in output

    @pytest.mark.parametrize("with_block", [True, False])
    def test_workers_that_leave_before_the_end_are_said_with_a_code_of_their_own(self, start, with_block):
        # Not so few that one leaves before the other has its model: that would be waited for.
        script = TRAIN.replace("while not worker.stopped:", "for epoch in range(50):")
        if not with_block:
            script = script.replace("with Worker.join(model, optimizer) as worker:", JOINED)
            assert JOINED in script
        status, output = start("--node", "0", script=script, LSGD_ITERATIONS="100000").finish()
        assert status == 78, output
        for worker in (0, 1):
            assert golden.text("launch.left_early", worker=worker) in output
        assert golden.text("launch.call_finish") in output

    def test_workers_that_leave_with_a_word_make_the_consensus(self, start):
        script = TRAIN.replace("while not worker.stopped:", "for epoch in range(3):")
        script = script.replace("    about =", "    assert worker.leave() and worker.stopped\n    about =")
        node = start("--node", "0", script=script, LSGD_ITERATIONS="100000")
        status, output = node.finish()
        assert status == 0, output
        assert Why.ALL_LEAVE(count=24) in output
        assert node.about(0)["weights"] == node.about(1)["weights"]

    def test_nodes_with_other_numbers_of_workers(self, start):
        common = ("--nodes", "3", "--address", "127.0.0.1", "--port", str(free_port()))
        first = start("--node", "0", *common, "--workers", "1", LSGD_ITERATIONS="200")
        second = start("--node", "1", *common, "--workers", "2")
        third = start("--node", "2", *common, "--workers", "2")
        for node in (first, second, third):
            status, output = node.finish()
            assert status == 0, output
        assert (
            golden.text("reasons.generation", number=1, workers=5, nodes=3)
            in (first.run_dir / "global.log").read_text()
        )
        weights = first.about(0)["weights"]
        assert all(
            node.about(rank)["weights"] == weights
            for node, ranks in ((second, (1, 2)), (third, (3, 4)))
            for rank in ranks
        )

    def test_ctrl_c_on_one_node_ends_its_part_and_the_other_trains_on(self, start):
        common = ("--nodes", "2", "--address", "127.0.0.1", "--port", str(free_port()), "--workers", "1")
        first, second = start("--node", "0", *common), start("--node", "1", *common)
        until(lambda: len(list(second.run_dir.glob("trains*"))) == 1, "node 1 trains")
        until((first.run_dir / "metrics.jsonl").exists, "a round was ordered")
        second.process.send_signal(signal.SIGINT)
        status, output = second.finish()
        assert status == 0, output
        assert "node1/worker0 leaves" in output and "SIGTERM" not in output
        alone, rounds = first.run_dir / "node0-worker0.log", len(first.result["rounds"])
        until(lambda: "rank 0 of 1" in alone.read_text(), "node 0 goes on alone")
        until(lambda: len(first.result["rounds"]) > rounds + 2, "its rounds go on")
        first.process.send_signal(signal.SIGINT)
        status, output = first.finish()
        assert status == 0, output
        assert (first.result["state"], first.result["reason"]) == ("stopped", golden.text("launch.got_sigint"))

    def test_killed_launcher_leaves_nothing(self, start):
        node = start("--node", "0", "--port", "0")
        until(lambda: len(list(node.run_dir.glob("trains*"))) == 2, "both workers train")
        assert len(node.left()) == 4  # the node's process, the global server, two workers
        node.process.kill()
        until(lambda: not node.left(), "all processes are gone")
        until(lambda: not is_live(node.run_dir), "the last of them lets the folder go")
        (listed,) = json.loads(CliRunner().invoke(main, ["runs", str(node.run_dir), "--json"]).stdout)
        assert listed["state"] == "failed" and listed["reason"].startswith(golden.text("launch.launcher_killed"))
        assert listed["run"] == node.result["rounds"][0]["run"]  # what there was by then is there

    def test_node_0_whose_launcher_was_killed_early_goes_on_with_its_journal(self, start):
        common = ("--nodes", "2", "--address", "127.0.0.1", "--port", str(free_port()), "--workers", "1")
        plan = {"LSGD_ITERATIONS": "0", "LSGD_LEASE_S": "2", "LSGD_FAILOVER": "off"}
        first = start("--node", "0", *common, **plan)
        second = start("--node", "1", *common)
        until((first.run_dir / "metrics.jsonl").exists, "a round was ordered")
        until(lambda: len(list(second.run_dir.glob("trains*"))) == 1, "node 1 trains")
        first.process.kill()
        until(lambda: not first.left(), "node 0 is gone")
        assert checkpoints(first.run_dir / "checkpoints") == []
        rounds = len(first.result["rounds"])
        again = start("--node", "0", *common, "--run-dir", str(first.run_dir.parent), "--resume", **plan)
        until(lambda: any("node1/worker0" in r["losses"] for r in first.result["rounds"][rounds:]), "both go on")
        again.process.send_signal(signal.SIGINT)
        status, output = again.finish()
        assert status == 0, output
        assert golden.text("launch.resumes_journal", path=first.run_dir) in output
        assert second.finish()[0] == 0
        assert len({each["run"] for each in first.result["rounds"]}) == 1
        numbers = [each["round"] for each in first.result["rounds"]]
        assert numbers == list(range(1, len(numbers) + 1))
        made = {member["worker"]: member["done"] for member in first.result["members"]}
        taken_off = lost((first.run_dir / "global.log").read_text())
        assert first.result["count"] == sum(made.values()) - taken_off
        assert set(made) == {"node0/worker0", "node1/worker0"}

    def test_two_nodes_under_slurm_the_second_first(self, start, tmp_path):
        program(
            tmp_path,
            "scontrol",
            'test "$*" = "show hostnames local[host,net]" && echo localhost && echo other',
        )
        slurm = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_STEP_ID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "local[host,net]",
            "LSGD_ITERATIONS": "200",
        }
        common = ("--workers", "1", "--port", str(free_port()))
        second = start(*common, SLURM_NODEID="1", **slurm)
        until((second.run_dir / "node1.log").exists, "the second node has started")
        first = start(*common, SLURM_NODEID="0", **slurm)
        for node in (second, first):
            status, output = node.finish()
            assert status == 0, output
        assert golden.text("launch.begins_when") in output
        assert (first.about(0)["LSGD_NODE"], second.about(1)["LSGD_NODE"]) == ("0", "1")
        assert first.about(0)["weights"] == second.about(1)["weights"]

    def test_plan_decides_the_number_of_workers(self, start, tmp_path):
        plan = tmp_path / "plan.toml"
        plan.write_text("workers = 1\niterations = 20\n")
        node = start("--node", "0", "--port", "0", "--workers", "1", "--nodes", "1", "--plan", str(plan))
        status, output = node.finish()
        assert status == 0, output
        assert tomllib.loads((node.run_dir / "plan.toml").read_text())["workers"] == 1


LATE = """
import atexit, json, os, signal, sys, time, torch
from pathlib import Path
from lsgd.client import Worker

def until(name):
    while not (here / name).exists():
        time.sleep(0.02)

def save():
    (here / "saving").touch()
    until("late-ended")
    (here / f"saved{worker.rank}").touch()

here = Path(os.environ["LSGD_RUN_DIR"])
late = os.environ["LSGD_LOCAL_RANK"] == "1" and (here / "died").exists()
if late:
    until("servers-ended" if sys.argv[1] == "outside" else "saving")
    atexit.register(lambda: (here / "late-ended").touch())
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = (model(x) - x.sum()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
            if os.environ["LSGD_LOCAL_RANK"] == "1" and worker.iterations == 0:
                (here / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            until("died")
    if sys.argv[1] == "inside":
        save()
if sys.argv[1] == "outside":
    save()
"""


@pytest.mark.slow
class TestEnds:
    """What is made of a run whose processes die, fail or come too late."""

    def pid(self, node: Node, words: str) -> int:
        """Return the process of a node with these words in its command line, when it is there."""
        found: list[int] = []

        def there() -> bool:
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in node.left()}
            found[:] = [pid for pid, line in lines.items() if words.encode() in line]
            return bool(found)

        until(there, f"a process of {words}")
        return found[0]

    def train(self, node: Node) -> None:
        until(lambda: len(list(node.run_dir.glob("trains*"))) == 2, "both workers train")

    @pytest.mark.parametrize("saves", ["inside", "outside"])
    def test_a_worker_that_comes_back_too_late_is_no_failure(self, start, saves):
        """The other one saves meanwhile, with its local server still there, or after that has ended too."""
        node = start("--node", "0", "--port", "0", program=(saves,), script=LATE, LSGD_ITERATIONS="40")
        if saves == "outside":
            until((node.run_dir / "saving").exists, "a worker saves")
            until(lambda: b"lsgd.server" not in node.lines(), "the servers have ended")
            (node.run_dir / "servers-ended").touch()
        status, output = node.finish()
        assert status == 0, output
        assert (node.run_dir / "saved0").exists()
        assert golden.text("launch.too_late") in output
        assert node.result["state"] == "finished"
        assert node.result["reason"].endswith(golden.text("launch.too_late_ended"))

    def test_the_node_of_a_global_server_that_is_lost_saves_checkpoints(self, start):
        """Its journal is gone when it is to be started again."""
        node = start("--node", "0", LSGD_PERIOD="16")
        log = node.run_dir / "global.log"
        until(lambda: log.exists() and log.read_text().count("global round ") > 2, "rounds are made")
        server = self.pid(node, "lsgd.server --global")
        os.kill(server, signal.SIGSTOP)
        for journal in node.run_dir.glob("journal.sqlite*"):
            journal.unlink()
        os.kill(server, signal.SIGKILL)
        status, output = node.finish()
        assert status == 2, output
        assert golden.text("launch.exit_75") in output
        assert golden.text("launch.state_saved") in output
        saved = {path.name for path in (node.run_dir / "checkpoints").glob("*/*/*.safetensors")}
        assert saved == {"node0-worker0.safetensors", "node0-worker1.safetensors"}

    def test_ctrl_c_while_the_global_server_is_started_again(self, start):
        node = start("--node", "0", "--port", str(free_port()))
        self.train(node)
        os.kill(self.pid(node, "lsgd.server --global"), signal.SIGKILL)
        assert any("restarting it" in line for line in node.process.stdout)  # the launcher has seen that it is gone
        node.process.send_signal(signal.SIGINT)
        status, output = node.finish()
        assert status == 0, output
        assert node.about(0)["weights"] == node.about(1)["weights"]

    def test_a_worker_that_dies_goes_on_from_its_checkpoint(self, start):
        node = start("--node", "0", "--port", "0", LSGD_CHECKPOINT_EVERY="1", LSGD_PERIOD="16")
        self.train(node)
        until(lambda: list(node.run_dir.glob("checkpoints/*/*/node0-worker1.*")), "it has a checkpoint")
        os.kill(worker := self.worker(node, 1), signal.SIGKILL)
        until(lambda: self.worker(node, 1) not in (0, worker), "it is there again")
        log = node.run_dir / "node0-worker1.log"
        until(lambda: "generation" in log.read_text().partition("resumes from")[2], "it takes part")
        node.process.send_signal(signal.SIGINT)
        status, output = node.finish()
        assert status == 0, output
        resumes = [node.about(rank).get("LSGD_RESUME") for rank in (0, 1)]
        assert resumes == [None, str(node.run_dir / "checkpoints")]

    def worker(self, node: Node, rank: int) -> int:
        """Return the process of a worker, 0 if it is not there."""
        for pid in node.left():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if f"LSGD_LOCAL_RANK={rank}".encode() in environ:
                return pid
        return 0

    def test_a_second_launch_in_a_live_folder_leaves_it_alone(self, start):
        node = start("--node", "0", "--port", "0")
        self.train(node)
        log, journal = node.run_dir / "global.log", node.run_dir / "journal.sqlite"
        there = (log.read_text(), journal.stat().st_ino)
        status, output = start("--node", "0", "--port", "0", "--run-dir", str(node.run_dir)).finish()
        assert status == 1
        assert golden.text("launch.in_use", path=node.run_dir) in output
        assert f"process {node.process.pid} on {socket.gethostname()}" in output
        assert log.read_text().startswith(there[0]) and journal.stat().st_ino == there[1]
        node.process.send_signal(signal.SIGINT)
        assert node.finish()[0] == 0

    def test_full_disk_for_logs_and_plan(self, start, tmp_path):
        run_dir = tmp_path / "full"
        run_dir.mkdir()
        for name in ("global.log", "node0.log", "node0-worker0.log", "plan.toml.tmp", "result.json.tmp"):
            (run_dir / name).symlink_to("/dev/full")
        arguments = ("--node", "0", "--port", "0", "--run-dir", str(run_dir))
        status, output = start(*arguments, LSGD_ITERATIONS="60").finish()
        assert status == 0, output
        assert output.count(golden.text("launch.log_full")) == 1
        assert golden.text("launch.plan_full", path=run_dir) in output
        assert (run_dir / "worker1.json").exists()


class TestTokens:
    """The lines that start the other nodes have tokens in them."""

    LINES = ("node 1 joins with: LSGD_TOKEN=secret lsgd launch --node 1",)

    @pytest.mark.parametrize("mode", [0o644, 0o600])
    def test_standard_output_is_a_file(self, tmp_path, monkeypatch, mode):
        path = tmp_path / "slurm-1.out"
        path.touch(mode)
        path.chmod(mode)
        with path.open("w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            launch._show_tokens(self.LINES, tmp_path)
        said, private = path.read_text(), tmp_path / "join.txt"
        if mode == 0o600:
            assert said == golden.text("launch.same_lines", first=self.LINES[0], path=private)
        else:
            assert "secret" not in said and golden.text("launch.other_tokens", path=private) in said
        assert private.read_text() == f"{self.LINES[0]}\n"
        assert private.stat().st_mode & 0o777 == 0o600

    def test_the_index_is_the_only_word_that_is_replaced(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LSGD_KEYS", str(tmp_path))
        text = "lsgd launch --node NODE --address GPUNODE1 -- python t.py --data /NODES NODE"
        place = Place(0, 2, "GPUNODE1")
        settings = LaunchSettings(place, 1, ("cpu",), None, tmp_path, ("python",), join_line=text)
        _, _, (line,) = launch._access(settings, "tcp://192.0.2.1:1")
        assert line.endswith(golden.text("launch.next_line"))

    def test_standard_output_is_none(self, tmp_path, capfd):
        launch._show_tokens(self.LINES, tmp_path)
        assert "LSGD_TOKEN=secret" in capfd.readouterr().out


class TestUnderAScheduler:
    """What differs where Slurm and others start the launchers."""

    @pytest.mark.slow
    def test_sigterm_to_all_processes_is_for_the_launcher_alone(self, start):
        size = ("--nodes", "1", "--workers", "2", "--log-to", "csv")
        node = start(*size, NODE_RANK="0", NNODES="1", LSGD_CHECKPOINT_EVERY="1")
        until(lambda: checkpoints(node.run_dir / "checkpoints"), "it trains")
        for pid in node.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        status, output = node.finish()
        assert status == 0, output
        assert golden.text("launch.sigterm") in output and "killed by" not in output
        *_, last = (node.run_dir / "curves.csv").read_text().splitlines()
        assert int(last.split(",")[2]) == json.loads((node.run_dir / "result.json").read_text())["count"]

    @pytest.mark.slow
    def test_resumes_if_there_is_anything(self, start, tmp_path):
        here = ("--nodes", "1", "--workers", "1", "--run-dir", str(tmp_path / "run"), "--resume-if-any")
        status, output = start(*here, LSGD_ITERATIONS="40").finish()
        assert status == 0 and "resumes from" not in output, output
        status, output = start(*here, LSGD_ITERATIONS="60").finish()
        assert status == 0 and golden.text("launch.resumes_at", path=tmp_path / "run") in output, output
        counts = [json.loads(line)["count"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert counts[-1] == 60 and counts.count(0) == 1  # from the beginning once

    def test_workers_are_in_no_group_of_torchrun(self, tmp_path, monkeypatch):
        group = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        group |= {"ROLE_RANK": "0", "ROLE_NAME": "default", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        others, given = {"MASTER_ADDR": "n0", "FRANK": "1", "RANKS": "2"}, dict[str, str]()
        for name, value in (group | others).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(launch, "_run", lambda *options: given.update(options[5]) or ((0, "", ""), False))
        place = Place(0, 1, "127.0.0.1")
        assert launch.launch(LaunchSettings(place, 0, ("cpu",), None, tmp_path, ("python",))) == 0
        assert not given.keys() & group.keys() and given.items() >= others.items()

    def test_has_to_know_which_run_to_resume(self):
        done = CliRunner().invoke(main, ["launch", "--resume-if-any", "true"])
        assert done.exit_code == 2 and golden.text("launch.same_run_dir") in done.output


class TestRefusals:
    """What is wrong, in one line, before anything is started."""

    @pytest.fixture
    def refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
        """Return the one line with which ``lsgd launch`` refuses its arguments."""
        monkeypatch.chdir(tmp_path)

        def refused(*arguments: str, command: str = "python") -> str:
            result = CliRunner().invoke(main, ["launch", "--device", "cpu", *arguments, "--", command])
            line = result.stderr.strip()
            assert result.exit_code == 1 and line.startswith("Error: ") and "\n" not in line, result.output
            assert not (tmp_path / "runs").exists()
            return line

        return refused

    def test_index(self, refused):
        assert golden.text("launch.which_node") in refused("--nodes", "2")
        assert golden.text("launch.no_such_node") in refused("--node", "1")
        assert "NUM_GROUPS" in refused("--node", "2", "--nodes", "2", "--address", "10.0.0.1")

    def test_address(self, refused):
        assert "IP_ADDR=10.0.0.1" in refused("--node", "0", "--nodes", "2")
        line = refused("--node", "0", "--address", "192.0.2.1")
        assert golden.text("launch.no_address") in line
        assert "'no.such.host.invalid'" in refused("--node", "0", "--address", "no.such.host.invalid")

    def test_port(self, refused):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            line = refused("--node", "0", "--port", str(port))
        assert golden.text("launch.port_taken", port=port, pid=os.getpid()) in line and f"PORT={port + 2}" in line
        two = ("--node", "0", "--nodes", "2", "--address", "127.0.0.1")
        assert golden.text("launch.port_known") in refused(*two, "--port", "0")
        assert golden.text("launch.no_relay_port") in refused(*two, "--port", "65535")

    def test_command(self, refused):
        assert golden.text("launch.not_found") in refused("--node", "0", "--port", "0", command="no-such-program")

    def test_token(self, refused, tmp_path, monkeypatch):
        ring = KeyRing.make(tmp_path / "keys", ["node0"])
        node1 = ("--node", "1", "--nodes", "2", "--address", "192.0.2.1")
        monkeypatch.setenv("LSGD_KEYS", str(ring.folder))
        monkeypatch.setenv("LSGD_TOKEN", ring.token("node0"))
        assert golden.text("launch.other_token") in refused(*node1)
        monkeypatch.delenv("LSGD_TOKEN")
        monkeypatch.setattr(launch, "TOKEN_WITHIN_S", 0.1)
        assert golden.text("launch.copy_token") in refused(*node1)

    def test_plan(self, refused, tmp_path):
        (tmp_path / "plan.toml").write_text("iteration = 3")
        line = refused("--node", "0", "--port", "0", "--plan", "plan.toml")
        assert golden.text("launch.mean_iterations") in line

    def test_logger_without_its_package(self, refused, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "lsgd[wandb]" in refused("--node", "0", "--port", "0", "--log-to", "wandb")

    def test_device(self, refused):
        assert golden.text("launch.unknown_device") in refused("--node", "0", "--device", "gpu")


class TestPlace:
    """Which node of how many, from the arguments or from Slurm."""

    SLURM = {  # noqa: RUF012
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "n[1-4]",
    }

    @pytest.fixture(autouse=True)
    def scontrol(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program(tmp_path, "scontrol", 'echo "first-of-$3"; echo another')
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def test_arguments_alone(self):
        assert find_place(0, None, None, {}) == Place(0, 1, "127.0.0.1")
        assert find_place(1, 2, "10.0.0.1", {}) == Place(1, 2, "10.0.0.1")
        assert find_place(1, 2, "fe80::1", {}).address == "fe80::1"
        for more in ("tcp://10.0.0.1:27400", "node0:27400"):
            with pytest.raises(ConfigError, match=golden.pattern("launch.more_than_address")):
                find_place(1, 2, more, {})

    def test_an_index_given_by_hand_is_not_slurms(self):
        assert find_place(0, None, None, self.SLURM) == Place(0, 1, "127.0.0.1")

    @pytest.mark.parametrize(
        ("variables", "starter"),
        [
            ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "n0\nn1\nn2"}, "SkyPilot"),
            ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "n0"}, "torchrun"),
            ({"PET_NODE_RANK": "1", "PET_NNODES": "3", "PET_MASTER_ADDR": "n0"}, "Kubeflow"),
            ({"NODE_RANK": "1", "NNODES": "3", "MASTER_ADDR": "n0"}, "the cluster"),
            ({"JOB_COMPLETION_INDEX": "1", "NNODES": "3", "MASTER_ADDR": "n0"}, "Kubernetes"),
            (SLURM | {"GROUP_RANK": "2"}, "Slurm"),
        ],
    )
    def test_others_that_start_launchers(self, variables, starter):
        place = find_place(None, 3, None, variables)
        assert (place.node, place.nodes, place.starter) == (1, 3, starter)
        assert find_place(None, None, "10.0.0.1", variables).address == "10.0.0.1"
        if starter != "Slurm":
            assert find_place(None, None, None, variables) == Place(1, 3, "n0")
        assert find_place(0, None, None, variables) == Place(0, 1, "127.0.0.1")

    def test_an_index_without_a_number_of_nodes_says_nothing(self):
        assert find_place(None, None, None, {"JOB_COMPLETION_INDEX": "7"}) == Place(0, 1, "127.0.0.1")

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            (
                {"PET_NODE_RANK": "0", "PET_NNODES": "1:4"},
                golden.pattern("launch.kubeflow_nodes"),
            ),
            ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun --nproc-per-node 1"),
        ],
    )
    def test_others_that_say_what_cannot_be(self, variables, message):
        with pytest.raises(ConfigError, match=message):
            find_place(None, None, None, variables)

    def test_slurm(self):
        assert find_place(None, None, None, self.SLURM) == Place(1, 4, "first-of-n[1-4]")
        assert find_place(None, None, "10.0.0.1", self.SLURM) == Place(1, 4, "10.0.0.1")

    def test_a_step_on_fewer_nodes_than_the_job(self):
        step = {**self.SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[2-3]"}
        assert find_place(None, None, None, step) == Place(1, 2, "first-of-n[2-3]")

    def test_two_launchers_on_a_node(self):
        with pytest.raises(ConfigError, match="srun --ntasks-per-node=1"):
            find_place(None, None, None, {**self.SLURM, "SLURM_LOCALID": "1"})

    def test_scontrol_fails(self, tmp_path):
        program(tmp_path, "scontrol", "exit 1")
        with pytest.raises(ConfigError, match="IP_ADDR"):
            find_place(None, None, None, self.SLURM)

    def test_a_name_that_only_means_this_machine(self, monkeypatch):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(ConfigError, match=golden.pattern("launch.name_is_here")):
            resolve("node1", nodes=2)
        assert resolve("node1", nodes=1) == "127.0.1.1"
        assert resolve("localhost", nodes=2) == "127.0.1.1"

    def test_a_mistyped_address_of_node_0(self):
        with pytest.raises(ConfigError, match=golden.pattern("launch.name_unknown")):
            resolve("10.0.0..1", nodes=2)

    def test_a_node_does_not_take_over_at_a_port_that_is_taken_by_now(self, tmp_path, monkeypatch):
        with socket.create_server(("127.0.0.1", free_port())) as taken:
            offer = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            settings = LaunchSettings(Place(1, 2, "127.0.0.1"), 1, ("cpu",), None, tmp_path, ("python",))
            monkeypatch.setattr(stages, "place_to_serve", lambda *_: offer)
            made = stages.Stages(
                *(settings, "tcp://127.0.0.1:1", None, None, {}, contextlib.ExitStack()),
                *(None, Screen(plain=True), print, print),  # type: ignore[arg-type]
            )
            made._local = SimpleNamespace(following=SimpleNamespace(copy=None))  # type: ignore[assignment]
            with pytest.raises(ConfigError, match=golden.pattern("launch.taken")):
                made._take_over()
        assert not list(tmp_path.glob("*journal*"))

    @pytest.mark.parametrize(
        ("starter", "status", "code"), [("", 69, 69), ("Slurm", 69, 0), ("torchrun", 69, 0), ("Slurm", 1, 1)]
    )
    def test_a_node_that_came_too_late_does_not_make_a_scheduler_end_the_others(self, starter, status, code, capsys):
        assert launch.exit_code(status, starter) == code
        assert (golden.text("launch.lets_save") in capsys.readouterr().out) is (code != status)

    def test_a_node_on_the_machine_of_node_0_would_serve_at_another_port(self):
        port = free_port()
        with contextlib.ExitStack() as held:
            offer = place.place_to_serve(Place(1, 2, "127.0.0.1"), f"tcp://127.0.0.1:{port}", held)
            host, own = place_of(offer)
            assert host == "127.0.0.1" and own != port
            with hold_or_any(host, own) as another:
                assert port_of(another) != own, "it is held until the launcher ends"


@pytest.mark.slow
class TestDevices:
    """One device for each worker, and what to do where torch cannot use the GPUs."""

    @pytest.fixture
    def nvidia_smi(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
        """Put a driver of this version with two GPUs on the machine."""
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PYTHONPATH", LIGHT["PYTHONPATH"])
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return lambda version: program(tmp_path, "nvidia-smi", f"echo {version}; echo {version}")

    def test_cpu(self):
        assert gpus.choose("cpu", None) == gpus.Devices(("cpu", "cpu"))
        assert gpus.choose("cpu", 3) == gpus.Devices(("cpu", "cpu", "cpu"))
        assert gpus.choose("cpu", None, 2) == gpus.Devices(("cpu",) * 4)

    def test_each_island_sees_its_own_gpus_alone(self):
        assert gpus.own(["cuda:2", "cuda:3"], "") == (("cuda:0", "cuda:1"), "2,3")
        assert gpus.own(["cuda:2", "cuda:3"], "4,5,6,7") == (("cuda:0", "cuda:1"), "6,7")
        assert gpus.own(["cpu", "cpu"], "0") == (("cpu", "cpu"), "0")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs of this machine")
    @pytest.mark.parametrize(
        ("driver", "remedy"),
        [("580.95.05", "whl/cu130"), ("535.104.12", "whl/cu126"), ("470.42.01", golden.text("launch.update_driver"))],
    )
    def test_gpus_that_torch_cannot_use(self, nvidia_smi, driver, remedy, tmp_path, monkeypatch):
        nvidia_smi(driver)
        (tmp_path / "json.py").write_text("raise ImportError('not the one of Python')")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError) as refused:
            gpus.choose("cuda", None)
        line = str(refused.value)
        assert f"driver {driver}, torch.version.cuda {torch.version.cuda}" in line and remedy in line

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPUs of this machine")
    def test_gpus_that_torch_cannot_use_are_left_alone_where_the_cpu_will_do(self, nvidia_smi):
        nvidia_smi("470.42.01")
        chosen = gpus.choose("auto", 1)
        assert chosen.names == ("cpu",)
        assert (
            chosen.warning.startswith(golden.text("launch.on_cpu"))
            and golden.text("launch.update_driver") in chosen.warning
        )

    def test_hidden_gpus(self, nvidia_smi, monkeypatch):
        nvidia_smi("580.95.05")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert gpus.choose("auto", 1) == gpus.Devices(("cpu",))
        with pytest.raises(ConfigError, match=golden.pattern("launch.hidden_gpus")):
            gpus.choose("cuda", None)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_torch_is_asked_where_nvidia_smi_fails_and_the_system_has_a_gpu(self, nvidia_smi, tmp_path, monkeypatch):
        program(tmp_path, "nvidia-smi", "exit 18")  # the driver was updated, and not loaded again
        monkeypatch.setattr(gpus, "_has_device_files", lambda: True)
        warning = golden.text("launch.on_cpu_no_gpu")
        assert gpus.choose("auto", 1) == gpus.Devices(("cpu",), warning)
        monkeypatch.setattr(gpus, "_PROBE", "print('[2, 0, 0]')")
        assert gpus.choose("auto", None) == gpus.Devices(("cuda:0", "cuda:1"))
        monkeypatch.setattr(gpus, "_PROBE", "import time; time.sleep(60)")
        monkeypatch.setattr(gpus, "PROBE_WITHIN_S", 0.1)
        with pytest.raises(ConfigError, match=golden.pattern("launch.driver_hangs")):
            gpus.choose("cuda", None)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, nvidia_smi, tmp_path, monkeypatch):
        monkeypatch.setattr(gpus, "_has_device_files", lambda: False)
        program(tmp_path, "nvidia-smi", "exit 9")
        assert gpus.choose("auto", None) == gpus.Devices(("cpu", "cpu"))
        with pytest.raises(ConfigError, match=golden.pattern("launch.no_gpu")):
            gpus.choose("cuda:0", None)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_workers_take_turns(self):
        count = torch.cuda.device_count()
        every = tuple(f"cuda:{index}" for index in range(count))
        assert gpus.choose("auto", None).names == every
        assert gpus.choose("cuda", 2 * count).names == every * 2
        assert gpus.choose("cuda:0", 2).names == ("cuda:0", "cuda:0")
        with pytest.raises(ConfigError, match=f"torch sees {count} GPUs"):
            gpus.choose(f"cuda:{count}", None)


def test_config_show_tells_where_each_value_comes_from(tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text("workers = 4\niterations = 10\nseconds = 5\n")
    monkeypatch.setenv("LSGD_ITERATIONS", "20")
    monkeypatch.setenv("LSGD_SECONDS", "6")
    arguments = ["config", "show", "--plan", str(tmp_path / "plan.toml"), "--seconds", "7"]
    result = CliRunner().invoke(main, arguments)
    rows = {
        name: (value, origin) for name, value, origin in (line.split(None, 2) for line in result.output.splitlines())
    }
    assert rows["workers"] == ("4", f"the plan {tmp_path / 'plan.toml'}")
    assert rows["iterations"] == ("20", "variable LSGD_ITERATIONS")
    assert rows["seconds"] == ("7.0", "flag --seconds")
    assert rows["algorithm.period"][1] == "default"


def test_config_show_refuses_in_one_line(tmp_path):
    result = CliRunner().invoke(main, ["config", "show", "--plan", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the plan ") and result.stderr.count("\n") == 1
