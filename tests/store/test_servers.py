"""Stores on real servers (S3, SFTP, Google's cloud), behind a link that is cut, freezes or is slow."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lsgd.node import storing
from lsgd.node.storing import Storing
from lsgd.server.reasons import Why
from lsgd.store.manifest import manifest_of
from tests import golden

from ..integration.running import FORKS, Fork, until
from ..speed import scaled
from .servers import S3, Google, Link, Server, Sftp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param.lacking:
        pytest.skip(request.param.lacking)
    made = request.param(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    made = Link(server.port)
    yield made
    made.close()


@pytest.fixture
def uploading(
    tmp_path: Path, server: Server, link: Link, monkeypatch
) -> Iterator[Callable[..., tuple[Storing, list[str]]]]:
    """Start the process that uploads a run folder over the link, and what watches it."""
    monkeypatch.setattr(storing, "RESTART_PAUSE_S", 0.0)
    started: list[Storing] = []

    def start(run: str, *arguments: str) -> tuple[Storing, list[str]]:
        lines: list[str] = []
        made = Storing(server.url(link.port, run), tmp_path, 0, server.variables(link.port))
        made._arguments += arguments
        made.begin(lines.append)
        started.append(made)
        return made, lines

    yield start
    for each in started:
        each._kill()
        each.join(scaled(10))


def checkpoint(folder: Path, count: int, nbytes: int) -> tuple[str, Path]:
    name = f"checkpoints/run-aa/{count}/node0-worker0.safetensors"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(nbytes))
    return name, path


@pytest.mark.parametrize("server", [S3, Sftp], indirect=True, ids=["s3", "sftp"])
def test_an_upload_that_is_cut_counts_only_when_it_is_whole(server, link, uploading, tmp_path, capfd) -> None:
    name, path = checkpoint(tmp_path, 8, 12 << 20)
    link.bytes_per_s = 4e6
    store, lines = uploading("cut")
    until(lambda: link.passed > 4 << 20, "a third has passed")
    link.mode = "cut"
    until(lambda: any("training continues" in line for line in lines), "the failure is said", scaled(120.0))
    assert f"{name}.json" not in server.names("cut")
    link.mode, link.bytes_per_s = "pass", 1e9
    until(lambda: f"{name}.json" in server.names("cut"), "the manifest is there")
    manifest = json.loads(server.get("cut", f"{name}.json"))
    assert manifest["chunks"] == [list(chunk) for chunk in manifest_of(name, path).chunks]
    assert server.get("cut", name) == path.read_bytes()
    store.finish()
    assert not any("Traceback" in line for line in lines), lines
    assert golden.text("store.has_all", url=store.url) in capfd.readouterr().out


@pytest.mark.parametrize("server", [S3, Sftp], indirect=True, ids=["s3", "sftp"])
def test_a_link_that_freezes_is_given_up_and_tried_anew(server, link, uploading, tmp_path, monkeypatch) -> None:
    name, _ = checkpoint(tmp_path, 8, 100_000)
    link.mode = "freeze"
    store, lines = uploading("frozen", "--stalled-s", "1.5")
    until(lambda: any(f"no data has moved to {store.url}" in line for line in lines), "the stall is noticed")
    until(lambda: any("ended with code 75; it starts again" in line for line in lines), "it starts again")
    store._arguments = store._arguments[:-2]  # the next one has the usual time
    link.mode = "pass"
    until(lambda: f"{name}.json" in server.names("frozen"), "the manifest is there")
    link.mode = "freeze"
    checkpoint(tmp_path, 16, 100_000)
    told: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "waiting" in line or "SIGTERM" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(storing, "_show", hear)
    with store.noticing():
        store.finish(wait_s=300.0)
    waits, goes_on, lacks = told
    assert waits == golden.text("store.waits_for_rest", url=store.url)
    first = golden.text("store.last_files_first", url=store.url)
    assert goes_on == first
    assert golden.text("store.lacks_files", url=store.url, path=tmp_path) in lacks
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


TRAIN = """
import sys

import torch
from lsgd.client import Worker

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
with Worker.join(model, optimizer) as worker:
    loader = worker.loader(data, batch_size=8)
    while not worker.stopped:
        for (x,) in worker.batches(loader):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
    worker.save(f"{sys.argv[1]}-{worker.iterations}")
"""


BETWEEN = """
import os
import signal

for number in (signal.SIGHUP, signal.SIGTERM):  # whoever draws the curve is between the run and the wait for the store
    os.kill(os.getpid(), number)
raise ImportError
"""


def test_signals_between_the_run_and_the_wait_for_the_store_end_nothing(tmp_path) -> None:
    server = SimpleNamespace(url=lambda port, run: f"file://{tmp_path}/store/{run}", variables=lambda port: os.environ)
    (tmp_path / "matplotlib.py").write_text(BETWEEN)
    run = launch(tmp_path, server, 0, "--store", server.url(0, "run"), LSGD_ITERATIONS="20", DRAWS="1")
    output, _ = run.communicate(timeout=scaled(90))
    assert run.returncode == 0, output
    assert golden.text("store.last_files_of", signal="SIGHUP", path=tmp_path) in output
    assert golden.text("store.last_files_of", signal="SIGTERM", path=tmp_path) in output
    assert golden.text("store.run_has_all", path=tmp_path) in output
    count = json.loads((tmp_path / "store/run/result.json").read_text())["count"]
    assert list(tmp_path.glob(f"store/run/checkpoints/*/{count}/node0-worker0.safetensors.json"))


def launch(folder: Path, server: Server, port: int, *arguments: str, **more: str) -> Fork:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lsgd.client", "launch", "--workers", "1", "--device", "cpu", *arguments]
    often = {"LSGD_ALGORITHM": "local", "LSGD_PERIOD": "8", "LSGD_CHECKPOINT_EVERY": "50"}
    command += ["--", sys.executable, "train.py", server.url(port, "model")]
    return FORKS.popen(command, cwd=folder, env={**server.variables(port), **often, **more})


@pytest.mark.parametrize("server", [S3, Sftp, Google], indirect=True, ids=["s3", "sftp", "gs"])
def test_a_machine_that_is_taken_away_leaves_what_another_one_resumes_from(server, link, tmp_path) -> None:
    """SIGTERM on a slow link; then an empty disk. (Google's library retries by itself for longer than a test.)"""
    link.bytes_per_s, url = 2e6, server.url(link.port, "spot")
    one = launch(tmp_path / "one", server, link.port, "--store", url)
    until(lambda: any("/node0-worker0.safetensors.json" in name for name in server.names("spot")), "a checkpoint")
    one.send_signal(signal.SIGTERM)
    output, _ = one.communicate(timeout=scaled(90))
    assert golden.text("store.launch_has_all", url=url) in output
    count = json.loads(server.get("spot", "result.json"))["count"]
    last = f"checkpoints/{next(n for n in server.names('spot') if f'/{count}/' in n).split('/')[1]}/{count}"
    assert f"{last}/node0-worker0.safetensors.json" in server.names("spot"), output
    assert server.get(f"model-{count}", "model.safetensors")

    two = launch(tmp_path / "two", server, link.port, "--resume", url, LSGD_ITERATIONS=str(count + 20))
    output, _ = two.communicate(timeout=scaled(90))
    assert two.returncode == 0, output
    assert golden.text("store.restored", count=count, url=url) in output
    assert f"resumes after {count} iterations" in output and Why.ALL_MADE(limit=count + 20) in output
    assert (tmp_path / "two/runs/spot/result.json").exists()
    assert json.loads(server.get("spot", "result.json"))["count"] == count + 20
