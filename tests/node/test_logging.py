"""``lsgd launch --log-to``: what is written of a run whose global server dies, read back."""

import csv
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests import golden

from ..speed import scaled
from .test_launch import TRAIN, start, until

__all__ = ["start"]

HOLDS = """
            while len(losses) > 200 and not (here / "go").exists():
                time.sleep(0.05)
"""
LOGS = (
    TRAIN.replace("import json,", "losses = []; import time, json,")
    .replace(
        "worker.report(loss)",
        'worker.report(loss); worker.log({"score": 1 + worker.rank}); losses.append(loss); time.sleep(0.01)',
    )
    .replace("            optimizer.zero_grad()\n", HOLDS + "            optimizer.zero_grad()\n")
)
"""Workers that wait after 200 steps until the test lets them go on."""


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what the table has in whole lines: by name iterations and values; nothing if it is not there yet."""
    found: dict[str, list[tuple[int, float]]] = {}
    path = folder / "curves.csv"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for row in csv.DictReader(line for line in lines if line.endswith("\n")):
        found.setdefault(row["name"], []).append((int(row["iterations"]), float(row["value"])))
    return found


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads: records of a length, its checksum, an event and its checksum."""
    found: dict[str, list[tuple[int, float]]] = {}
    (path,) = folder.glob("tensorboard/*/events.out.tfevents.*")
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        data = data[16 + length :]
    return found


def pid_of(node, word: bytes) -> int:
    """Return the process of a node with this word in its command line."""
    for pid in node.left():
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process with {word!r}")


@pytest.mark.slow
def test_each_round_is_written_once_though_the_server_dies(start):
    variables = {"LSGD_ITERATIONS": "1000", "LSGD_PERIOD": "32", "LSGD_LOCAL_PERIOD": "32"}
    node = start("--log-to", "csv", "--log-to", "tensorboard", "--log-to", "csv", script=LOGS, **variables)
    until(lambda: "user/score" in curves(node.run_dir), "it is logged")
    os.kill(pid_of(node, b"--global"), signal.SIGKILL)
    (node.run_dir / "go").touch()
    status, output = node.finish()
    assert status == 0 and golden.text("node.global_killed") in output, output
    assert golden.text("node.points_written", path=node.run_dir) in output
    written, rounds = curves(node.run_dir), [each for each in node.result["rounds"] if each["scope"] == "global"]
    assert written["rounds"] == [(each["count"], each["round"]) for each in rounds]
    losses = [(each["count"], loss) for each in rounds if (loss := each["losses"]["node0/worker1"]) is not None]
    assert [at for at, _ in written["loss/node0/worker1"]] == [at for at, _ in losses]
    assert [x for _, x in written["loss/node0/worker1"]] == pytest.approx([x for _, x in losses], rel=1e-4)
    assert 1.5 in [mean for _, mean in written["user/score"]]  # later one of the two may have left
    assert written["progress"][-1][1] > 0.5
    sent = [value for _, value in written["bytes/sent"]]
    assert sent == sorted(sent) and sent[-1] > 0
    seen = events(node.run_dir)
    assert set(seen) == set(written)
    for name, points in written.items():
        assert [at for at, _ in seen[name]] == [at for at, _ in points]
        assert [x for _, x in seen[name]] == pytest.approx([x for _, x in points], rel=1e-6)


@pytest.mark.slow
def test_a_logger_that_joins_late_writes_what_it_finds_and_one_that_fails_ends_nothing(start, tmp_path):
    node = start("--log-to", "csv", script=LOGS, LSGD_ITERATIONS="600", LSGD_PERIOD="16", LSGD_LOCAL_PERIOD="16")
    until(lambda: "rounds" in curves(node.run_dir), "rounds")
    os.kill(pid_of(node, b"log"), signal.SIGKILL)
    command = [sys.executable, "-m", "lsgd.client", "log", "--run", str(node.run_dir), "--to", "csv"]
    with subprocess.Popen([*command, "--out", str(tmp_path / "late")], stderr=subprocess.PIPE, text=True) as late:
        until(lambda: "rounds" in curves(tmp_path / "late"), "the late one has joined")
        (node.run_dir / "go").touch()
        _, errors = late.communicate(timeout=scaled(60))
    assert late.returncode == 0, errors
    status, output = node.finish()
    assert (
        status == 0 and golden.text("node.logger_killed") in output and golden.text("node.continues_without") in output
    )
    assert curves(tmp_path / "late")["rounds"] == [(each["count"], each["round"]) for each in node.result["rounds"]]


def test_wandb_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is missing: pip install 'lsgd[wandb]' (it takes 100 MB)")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    code = (
        "import sys; from pathlib import Path; from lsgd.watch.curves import Point; "
        "from lsgd.watch.curves import LOGGERS; logger = LOGGERS['wandb'](Path(sys.argv[1]), 'r'); "
        "logger.write(Point(1.0, 8, {'loss/consensus': 0.5})); logger.flush(); logger.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=scaled(110)
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss/consensus" in path.read_bytes()
