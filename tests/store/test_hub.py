"""Stores on Hugging Face's hub: its own library, with a small server that answers as the hub's API does.

(The hub itself is not on this machine: this shows what lsgd asks of the library, and that names fit, not what the hub
does with large files.)
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lsgd.client.checkpoint import model_files
from lsgd.client.control.island import Island
from lsgd.store.manifest import manifest_of
from lsgd.store.objects import Store
from lsgd.store.restore import restore
from lsgd.store.upload import Uploads

COMMIT = "c" * 40
TREE, FILE = "/api/models/user/repo/tree/main", "/user/repo/resolve/main/"


class Hub(BaseHTTPRequestHandler):
    """One repository, user/repo, whose files are in memory."""

    files: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, content: object, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def entries(self, under: str, recursive: bool) -> list[dict[str, object]]:
        """Return what is below a path."""
        top, found = f"{under}/" if under else "", dict[str, dict[str, object]]()
        for name, data in self.files.items():
            if name.startswith(top):
                head, _, rest = name[len(top) :].partition("/")
                if recursive or not rest:
                    found[name] = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                else:
                    found[top + head] = {"type": "directory", "path": top + head, "oid": "0" * 40}
        return list(found.values())

    def do_GET(self) -> None:
        parts = urlparse(self.path)
        path = unquote(parts.path)
        if path.startswith(TREE):
            found = self.entries(path.removeprefix(TREE).strip("/"), "recursive=true" in parts.query.lower())
            self.reply(found) if found else self.lacks()
        elif path.startswith("/api/models/user/repo"):
            self.reply({"id": "user/repo", "sha": COMMIT, "siblings": [], "private": False, "tags": []})
        elif path.startswith(FILE) and (name := path.removeprefix(FILE)) in self.files:
            self.reply_part(self.files[name], self.headers.get("Range"))
        else:
            self.lacks()

    def lacks(self) -> None:
        self.reply({"error": "not found"}, 404, X_Error_Code="EntryNotFound")

    def reply_part(self, data: bytes, wanted: str | None) -> None:
        if wanted is None:
            self.reply(data, ETag='"0"')
            return
        start, end = (int(x) for x in wanted.removeprefix("bytes=").split("-"))
        self.reply(data[start : end + 1], 206, Content_Range=f"bytes {start}-{end}/{len(data)}")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        path, content = unquote(urlparse(self.path).path), self.content()
        if path.endswith("/paths-info/main"):
            wanted = json.loads(content)["paths"] if content[:1] == b"{" else []
            self.reply([e for name in wanted for e in self.entries("", True) if e["path"] == name])
        elif path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(content)["files"]]
            self.reply({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif path.endswith("/commit/main"):
            for line in content.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    self.files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
                if operation["key"] == "deletedFile":
                    del self.files[operation["value"]["path"]]
            self.reply({"commitUrl": "http://127.0.0.1/user/repo/commit/c", "commitOid": COMMIT})
        else:
            self.lacks()


@pytest.fixture
def files(monkeypatch) -> Iterator[dict[str, bytes]]:
    from huggingface_hub import constants, hf_file_system

    handler = type("OneHub", (Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    there = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", there)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", there + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    hf_file_system.HfFileSystem.clear_instance_cache()
    yield handler.files
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_checkpoint_goes_to_the_hub_and_comes_back(files, tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    name = "checkpoints/run-aa/8/node0-worker0.safetensors"
    (one / name).parent.mkdir(parents=True)
    (one / name).write_bytes(b"a checkpoint")
    store, said = Store("hf://user/repo/run1"), list[str]()
    uploads = Uploads(store, one, 0, said.append)
    while uploads.upload_next():
        pass
    assert sorted(files) == [f"run1/{name}", f"run1/{name}.json"]
    assert restore(Store("hf://user/repo/run1"), two, 0, said.append)
    assert manifest_of(name, two / name).chunks == manifest_of(name, one / name).chunks
    store.remove(name)
    assert list(files) == [f"run1/{name}.json"]


def test_a_model_goes_to_the_hub(files, tmp_path) -> None:
    model = nn.Linear(4, 4)
    assert model_files.save_to_store(model, "hf://user/repo", 1 << 20, Island()) == ["hf://user/repo/model.safetensors"]
    (tmp_path / "m").write_bytes(files["model.safetensors"])
    assert torch.equal(load_file(tmp_path / "m")["weight"], model.weight)
