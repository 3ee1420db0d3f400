"""What is uploaded when, what a store then has, and what of it comes back: over fsspec's store in memory."""

import io
import json
import os
import re
import resource
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from lsgd.cli import commands
from lsgd.cli.commands import main
from lsgd.client.checkpoint import model_files
from lsgd.client.checkpoint.file import pack, write
from lsgd.client.control.island import Island
from lsgd.digests import CHUNK_NBYTES
from lsgd.errors import ConfigError
from lsgd.node import storing
from lsgd.node.commands import LaunchSettings
from lsgd.protocol.credentials import run_certificate
from lsgd.protocol.keys import KeyRing, adopted_folder
from lsgd.protocol.sockets import new_key_pair
from lsgd.run_folder import CHECKPOINTS
from lsgd.store import manifest as manifests
from lsgd.store import restore as restoring
from lsgd.store import upload
from lsgd.store.manifest import Manifest, by_age, manifest_of
from lsgd.store.objects import Store, StoreError
from lsgd.store.restore import restore
from lsgd.store.upload import Uploads, serve
from tests import golden

from ..speed import scaled


class Clock:
    """A time that passes only when something waits."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)


class Flaky(Store):
    """A store whose operations fail while ``broken`` says so."""

    broken: Callable[[str], bool] = staticmethod(lambda name: False)

    def upload(self, name: str, path: Path) -> None:
        if self.broken(name):
            raise StoreError(f"the store {self.url} cannot write {name}: the link is cut")
        super().upload(name, path)


class Machine:
    """A run folder, and what uploads it."""

    def __init__(self, folder: Path, store: Store, node: int = 0) -> None:
        self.folder, self.store, self.said = folder, store, list[str]()
        self.clock = Clock()
        self.uploads = Uploads(store, folder, node, self.said.append, self.clock)
        self._time = 1_000_000_000

    def writes(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self._time += 10
        os.utime(path, (self._time, self._time))
        return path

    def checkpoint(self, count: int, file: str = "node0-worker0", run: str = "aa") -> str:
        name = f"checkpoints/run-{run}/{count}/{file}.safetensors"
        self.writes(name, f"{run} {count} {file}")
        return name

    def uploads_all(self, *, final: bool = False) -> None:
        while self.uploads.upload_next(final=final):
            pass

    def has(self) -> set[str]:
        return {
            m.name.removeprefix("checkpoints/").removesuffix(".safetensors") for m in manifests.read_all(self.store)
        }


@pytest.fixture
def store() -> Store:
    return Flaky(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def machine(tmp_path: Path, store: Store) -> Machine:
    return Machine(tmp_path / "one", store)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return tmp_path / "fresh"


# -- uploading --------------------------------------------------------------------------------------------------


def test_small_results_go_first_then_checkpoints_then_the_model(machine) -> None:
    machine.writes("model.safetensors", bytes(upload.SMALL_NBYTES + 1))
    machine.checkpoint(8)
    machine.writes("result.json", "{}")
    order = []
    while machine.uploads.upload_next():
        order.append(set(machine.store.names("")) - set().union(*order))
    assert [min(names) for names in order] == [
        "result.json",
        "checkpoints/run-aa/8/node0-worker0.safetensors",
        "model.safetensors",
    ]
    assert golden.text("store.is_in") in machine.said[0]


def test_only_the_newest_of_each_worker_goes_and_the_last_two_stay(machine) -> None:
    for count in (8, 16):
        machine.checkpoint(count)
        machine.checkpoint(count, "node0-worker1")
    machine.uploads_all()
    assert machine.has() == {"run-aa/16/node0-worker0", "run-aa/16/node0-worker1"}
    for count in (24, 32):
        machine.checkpoint(count)
        machine.uploads_all()
    machine.checkpoint(4, run="bb")
    machine.uploads_all()
    assert machine.has() == {
        "run-aa/16/node0-worker1",
        *("run-aa/24/node0-worker0", "run-aa/32/node0-worker0"),
        "run-bb/4/node0-worker0",
    }
    assert not any("/16/node0-worker0" in name for name in machine.store.names(""))


def test_a_slow_link_brings_all_files_of_an_islands_checkpoint_before_newer_ones(machine) -> None:
    """The link takes two of three files before there are newer ones; the disk keeps the last two of each process."""
    files = [f"node0-worker0.{rank}-of-3" for rank in range(3)]
    for count in range(8, 81, 8):
        for file in files:
            machine.checkpoint(count, file)
            (machine.folder / f"checkpoints/run-aa/{count - 16}/{file}.safetensors").unlink(missing_ok=True)
        assert machine.uploads.upload_next() and machine.uploads.upload_next()
        there = Counter(name.rpartition("/")[0] for name in machine.has())
        assert 3 in there.values() or count == 8, "at any time, the store has a complete one"
        assert len(there) <= upload.KEPT + 1


def test_a_run_that_has_begun_anew_keeps_its_last_two_however_far_it_was(machine) -> None:
    for count in (80, 88, 8, 16, 24):
        machine.checkpoint(count)
        assert machine.uploads.upload_next() and not machine.uploads.upload_next()
    assert machine.has() == {f"run-aa/{count}/node0-worker0" for count in (80, 88, 16, 24)}


def test_one_that_starts_again_sends_nothing_twice(machine) -> None:
    machine.checkpoint(8)
    machine.uploads_all()
    again = Machine(machine.folder, machine.store)
    again.uploads_all()
    assert again.said == []


def test_nothing_private_leaves_the_machine_and_only_node_0_has_results(machine, tmp_path) -> None:
    private = ("node0.log", "node0.lock", "join.txt", "journal.sqlite", "journal.sqlite-wal", "result.json.tmp")
    keys = ("node0-keys/server.key", "node0-keys/allowed", "node1-keys/certificate.pem", "node1-keys/node2.token")
    others = ("node12-keys/tmpx1", "mine/keys/server.key", "mine/keys/allowed", "certificate.pem", "operator.token")
    for name in (
        *private,
        *keys,
        *others,
        "model-x1.tmp/model.safetensors",
        "tensorboard/events",
        "node-keys/allowed.txt",
        "result.json",
    ):
        machine.writes(name, "x")
    machine.uploads_all()
    assert machine.store.names("") == ["result.json"]
    machine.uploads_all(final=True)
    assert machine.store.names("") == ["node-keys/allowed.txt", "result.json", "tensorboard/events"]
    other = Machine(tmp_path / "two", machine.store, node=1)
    other.writes("result.json", "y")
    other.checkpoint(8, "node1-worker0")
    other.checkpoint(8, "node0-worker0")
    other.uploads_all(final=True)
    assert machine.store.read("result.json") == b"x" and machine.has() == {"run-aa/8/node1-worker0"}


def test_the_keys_of_a_node_that_serves_stay_on_its_machine(machine) -> None:
    _, secret = new_key_pair()
    certificate = run_certificate(secret, "aa")
    ring = KeyRing.adopt(adopted_folder(machine.folder, 0), secret, {"node1": secret}, certificate)
    KeyRing.make(ring.folder, ["node3"])
    assert len(list(ring.folder.iterdir())) == 4
    machine.writes("result.json", "{}")
    machine.uploads_all(final=True)
    assert machine.store.names("") == ["result.json"]


def test_results_that_change_go_now_and_then_and_at_the_end(machine) -> None:
    machine.writes("result.json", "1")
    machine.uploads_all()
    machine.writes("result.json", "2")
    machine.uploads_all()
    assert machine.store.read("result.json") == b"1"
    machine.clock.now += upload.RESULTS_EVERY_S
    machine.uploads_all()
    assert machine.store.read("result.json") == b"2"
    machine.writes("result.json", "3")
    machine.uploads_all(final=True)
    assert machine.store.read("result.json") == b"3"


def test_a_result_that_always_changes_keeps_nothing_waiting(machine) -> None:
    machine.checkpoint(8)
    uploads = 0
    while "run-aa/8/node0-worker0" not in machine.has():
        machine.writes("metrics.jsonl", f"{uploads}")  # a round while the last one is uploaded
        assert machine.uploads.upload_next()
        uploads += 1
    assert uploads == 2


@pytest.mark.parametrize(("change", "arrives"), [(b"{}\n{}\n", True), (b"{", False)])
def test_a_log_may_grow_while_it_is_uploaded_and_nothing_is_lost_on_the_way(
    machine, monkeypatch, change, arrives
) -> None:
    log, put = machine.writes("metrics.jsonl", "{}\n"), machine.store._fs.put_file

    def put_file(file: str, path: str, **options: Any) -> None:
        log.write_bytes(change)
        put(file, path, **options)

    monkeypatch.setattr(machine.store._fs, "put_file", put_file)
    if arrives:
        machine.uploads_all()
        assert machine.store.read("metrics.jsonl") == change
    else:
        with pytest.raises(StoreError, match="1 of 3 bytes arrived"):
            machine.uploads_all()


@pytest.mark.parametrize("final", [False, True])
def test_a_result_that_the_store_does_not_take_holds_up_no_checkpoint(machine, final) -> None:
    machine.writes("metrics.jsonl", "{}\n")
    machine.checkpoint(8)
    machine.store.broken = lambda name: name == "metrics.jsonl" and machine.clock() < 100.0

    def ended() -> bool:
        return final or machine.clock() > 101.0

    serve(machine.uploads, ended, machine.clock.wait, machine.said.append, machine.clock)
    assert "the link is cut" in machine.said[0]
    assert machine.said[1].startswith(golden.text("store.is_in"))
    assert machine.clock.waits[:2] == [1.0, 1.0], "it goes after one pause, and the result is tried again"
    assert machine.store.read("metrics.jsonl") == b"{}\n"


def test_a_file_deleted_before_its_upload_is_no_failure(machine) -> None:
    path = machine.folder / machine.checkpoint(8)
    machine.store.broken = lambda name: bool(path.unlink(missing_ok=True))
    machine.uploads_all()
    assert not path.exists() and machine.has() == set() and machine.said == []


def test_a_file_deleted_during_its_upload_is_in_the_store(machine, monkeypatch) -> None:
    """An upload may take longer than two checkpoints: the worker deletes the file that is on its way."""
    path, put = machine.folder / machine.checkpoint(8), machine.store._fs.put_file

    def slow(*arguments, **options) -> None:
        put(*arguments, **options)
        path.unlink()

    monkeypatch.setattr(machine.store._fs, "put_file", slow)
    machine.uploads_all()
    assert machine.has() == {"run-aa/8/node0-worker0"}


def test_a_checkpoint_that_is_written_anew_is_uploaded_anew(machine) -> None:
    """As of a run that has gone back to an older checkpoint, and comes to the same count again."""
    name = machine.checkpoint(8)
    machine.uploads_all()
    machine.writes(name, "other")
    machine.uploads_all()
    assert machine.store.read(name) == b"other"
    assert [m.nbytes for m in manifests.read_all(machine.store)] == [5]


def test_without_its_manifest_an_object_does_not_count(machine) -> None:
    name = machine.checkpoint(8)
    machine.store.upload(name, machine.folder / name)
    machine.store.write(f"{name}.json", b"{")
    assert manifests.read_all(machine.store) == []
    assert restore(machine.store, machine.folder / "fresh", 0, machine.said.append) is False
    assert machine.said == [golden.text("store.incomplete", name=name, url=machine.store.url)]


def uploads(store: Store, file: Path) -> None:
    store.upload("plan.toml", file)


def writes(store: Store, file: Path) -> None:
    store.write("plan.toml", file.read_bytes())


@pytest.mark.parametrize("puts", [writes, uploads])
def test_an_object_is_there_as_a_whole_or_not_at_all(tmp_path, puts) -> None:
    """On a disk that takes only half of it, as a full one does."""
    store = Store(f"file://{tmp_path}/run")
    old, new, large = tmp_path / "old", tmp_path / "new", tmp_path / "large"
    for file, content in ((old, b"old"), (new, b"new"), (large, bytes(1 << 17))):
        file.write_bytes(content)
    puts(store, old)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, usual[1]))
    try:
        with pytest.raises(StoreError, match=golden.pattern("store.plan_too_large")):
            puts(store, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert store.read("plan.toml") == b"old" and store.names("") == ["plan.toml"]
    puts(store, new)
    assert store.read("plan.toml") == b"new" and store.names("") == ["plan.toml"]


def test_failures_are_tried_again_ever_more_slowly_with_the_newest(machine) -> None:
    machine.checkpoint(8)
    machine.store.broken = lambda name: machine.clock() < 1000.0

    def wait(seconds: float) -> None:
        machine.clock.wait(seconds)
        if machine.clock() > 500.0:
            machine.checkpoint(16)

    serve(machine.uploads, lambda: machine.clock() > 1001.0, wait, machine.said.append, machine.clock)
    assert machine.clock.waits[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert machine.has() == {"run-aa/16/node0-worker0"}
    first, second, done, again = machine.said
    assert golden.text("store.try_again") in first
    assert "the link is cut" in second and "is in memory://" in done and "works again after" in again


def test_it_ends_when_the_run_has_ended_and_everything_is_there(machine) -> None:
    ends = iter([False, False, True, True, True])
    serve(machine.uploads, lambda: next(ends), lambda s: machine.checkpoint(8), machine.said.append, machine.clock)
    assert machine.has() == {"run-aa/8/node0-worker0"}


# -- bringing back ----------------------------------------------------------------------------------------------


def test_the_newest_comes_back_with_its_time_plan_and_rounds(machine, fresh) -> None:
    for count in (8, 16):
        machine.checkpoint(count)
        machine.writes("plan.toml", f"{count}")
        machine.uploads_all(final=True)
    machine.writes("metrics.jsonl", "{}")
    machine.uploads_all(final=True)
    assert restore(machine.store, fresh, 0, machine.said.append)
    (path,) = fresh.glob("checkpoints/*/*/*")
    assert path.read_text() == "aa 16 node0-worker0"
    assert path.stat().st_mtime == (machine.folder / path.relative_to(fresh)).stat().st_mtime
    assert (fresh / "plan.toml").read_text() == "16" and (fresh / "metrics.jsonl").exists()
    assert golden.text("store.restored_16") in machine.said[-1]
    path.write_text("damaged here")
    assert restore(machine.store, fresh, 0, machine.said.append) and path.read_text() == "aa 16 node0-worker0"


def test_a_result_that_came_in_part_comes_again(machine, fresh, monkeypatch) -> None:
    machine.checkpoint(8)
    machine.writes("plan.toml", "period = 8")
    machine.uploads_all()

    def cut(name: str, path: Path) -> None:
        path.write_bytes(b"")
        raise StoreError("the link is cut")

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(machine.store, "download", cut)
        restore(machine.store, fresh, 0, machine.said.append)
    assert restore(machine.store, fresh, 0, machine.said.append)
    assert (fresh / "plan.toml").read_text() == "period = 8"


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path) -> None:
    store = Store(f"file://{tmp_path}/run")
    name = Machine(tmp_path / "one", store).checkpoint(8)
    store.upload(name, tmp_path / "one" / name)
    manifests.write(store, manifest_of(name, tmp_path / "one" / name))
    (tmp_path / "fresh").write_text("a file")
    with pytest.raises(ConfigError, match=golden.pattern("store.unwritable")):
        storing.bring(store.url, tmp_path / "fresh", 0, required=True)


def damage(store: Store, name: str) -> None:
    store.write(name, store.read(name)[:-1] + b"?")


def shorten(store: Store, name: str) -> None:
    store.write(name, store.read(name)[:-1])


@pytest.mark.parametrize(
    ("harm", "why"),
    [(damage, golden.text("store.has_changed")), (shorten, golden.text("store.has_18_bytes")), (Store.remove, "")],
)
def test_a_damaged_newest_one_falls_back_to_the_one_before(machine, fresh, harm, why) -> None:
    for count in (8, 16):
        last = machine.checkpoint(count)
        machine.uploads_all()
    harm(machine.store, last)
    machine.said.clear()
    assert restore(machine.store, fresh, 0, machine.said.append)
    assert [path.parent.name for path in fresh.rglob("*.safetensors")] == ["8"]
    assert not list(fresh.rglob("*.tmp"))
    if why:
        assert golden.text("store.is_in_run") in machine.said[0]
        assert why in machine.said[0] and golden.text("store.one_before") in machine.said[0]


def test_all_processes_of_an_island_or_none(machine, fresh) -> None:
    for count, ranks in ((8, (0, 1)), (16, (1,))):
        for rank in ranks:
            machine.checkpoint(count, f"node0-worker0.{rank}-of-2")
        machine.uploads_all()
    assert restore(machine.store, fresh, 0, machine.said.append)
    assert sorted(path.parent.name for path in fresh.rglob("*.safetensors")) == ["8", "8"]
    assert any(golden.text("store.files_complete") in line for line in machine.said)


def test_each_worker_of_a_node_gets_its_own_and_other_nodes_none(machine, fresh) -> None:
    machine.checkpoint(8)
    machine.checkpoint(16, "node0-worker1")
    machine.uploads_all()
    other = Machine(machine.folder, machine.store, node=1)
    other.checkpoint(99, "node1-worker0")
    other.uploads_all()
    assert restore(machine.store, fresh, 0, machine.said.append)
    assert sorted(p.read_text() for p in fresh.rglob("*.safetensors")) == ["aa 16 node0-worker1", "aa 8 node0-worker0"]
    assert restore(machine.store, fresh, 2, machine.said.append) is False


def test_runs_are_tried_by_their_last_file_and_counts_from_the_highest() -> None:
    def made(run: str, count: int, written: float) -> Manifest:
        return Manifest(f"checkpoints/run-{run}/{count}/node0-worker0.safetensors", written, ())

    found = [made("old", 900, 3.0), made("new", 10, 2.0), made("new", 20, 4.0)]
    assert [(m.run, m.count) for m in by_age(found)] == [("new", 20), ("new", 10), ("old", 900)]


# -- what the disk has ------------------------------------------------------------------------------------------


NUMEL = 3 * CHUNK_NBYTES // 4 + 5
"""Of a tensor of four chunks."""


class Counting(Store):
    """A store that counts what is read from objects in parts, and whose link is cut after so much."""

    read_nbytes, cut_after_nbytes = 0, 1 << 40

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        if start is None or end is None:
            return super().read(name)
        if self.read_nbytes + end - start > self.cut_after_nbytes:
            raise StoreError("the link is cut")
        self.read_nbytes += end - start
        return super().read(name, start, end)


@pytest.fixture
def counting(store: Store) -> Counting:
    return Counting(store.url)


def saves(machine: Machine, count: int, file: str = "node0-worker0", **tensors: float) -> Path:
    """Write a checkpoint whose tensors are full of these numbers, except for one that never changes; upload it."""
    made = {name: torch.arange(NUMEL) + value for name, value in tensors.items()}
    packed = pack({"model": made, "frozen": torch.arange(2.0 * NUMEL)})
    folder = machine.folder / CHECKPOINTS
    path = write(folder, "aa", count, file.replace("-", "/", 1), packed, {})
    machine.uploads_all()
    return path


def brings(counting: Counting, folder: Path) -> int:
    """Restore; return how many bytes came from the store."""
    before = counting.read_nbytes
    assert restore(counting, folder, 0, print)
    return counting.read_nbytes - before


def test_only_chunks_that_no_file_on_the_disk_has_are_downloaded(machine, counting, fresh, capsys) -> None:
    path = saves(machine, 8, c=0.5, v=1.5)
    assert brings(counting, fresh) == path.stat().st_size
    assert brings(counting, fresh) == 0
    path = saves(machine, 16, c=0.5, v=9.5)
    assert 4 * NUMEL < brings(counting, fresh) < 4 * NUMEL + 5000  # v and the header
    assert (fresh / path.relative_to(machine.folder)).read_bytes() == path.read_bytes()
    assert re.search(golden.pattern("store.from_both"), capsys.readouterr().out)


def test_workers_of_a_node_get_what_they_share_once(machine, counting, fresh) -> None:
    one, other = saves(machine, 8, c=0.5, v=1.5), saves(machine, 8, "node0-worker1", c=0.5, v=2.5)
    assert one.stat().st_size + 4 * NUMEL < brings(counting, fresh) < one.stat().st_size + 4 * NUMEL + 5000
    for path in one, other:
        assert (fresh / path.relative_to(machine.folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("part_nbytes", [1, 2 << 20])
def test_a_download_that_is_cut_is_continued(machine, counting, fresh, monkeypatch, part_nbytes) -> None:
    monkeypatch.setattr(restoring, "PART_NBYTES", part_nbytes)
    path = saves(machine, 8, c=0.5)
    counting.cut_after_nbytes = 6 << 20
    with pytest.raises(StoreError, match="the link is cut"):
        restore(counting, fresh, 0, print)
    had = counting.read_nbytes
    assert had > 3 << 20
    counting.cut_after_nbytes = 1 << 40
    assert brings(counting, fresh) == path.stat().st_size - had
    assert [each.read_bytes() for each in fresh.rglob("*node0-*") if each.is_file()] == [path.read_bytes()]


def test_a_long_download_says_how_far_it_is(machine, counting, fresh, monkeypatch) -> None:
    monkeypatch.setattr(restoring, "PART_NBYTES", 1)
    saves(machine, 8, c=0.5)
    said, clock = list[str](), Clock()

    def read(*arguments: Any) -> bytes:
        clock.wait(4.0)
        return Store.read(counting, *arguments)

    monkeypatch.setattr(counting, "read", read)
    assert restore(counting, fresh, 0, said.append, clock)
    came = ("2.1", "5.2", "7.3", "9.4")  # a part takes 4 s, so a third one is due
    assert said[:-1] == [golden.text("store.have_come", mb=mb, url=counting.url) for mb in came]
    assert "checked" in said[-1]


def test_half_a_file_on_the_disk_is_half_a_download(machine, counting, fresh) -> None:
    path = saves(machine, 8, c=0.5, v=1.5)
    brings(counting, fresh)
    torn = fresh / path.relative_to(machine.folder)
    torn.write_bytes(torn.read_bytes()[: path.stat().st_size // 2])
    assert brings(counting, fresh) < path.stat().st_size // 2 + CHUNK_NBYTES
    assert torn.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 9, b"\2\0\0\0\0\0\0\0{}rest", b"\4\0\0\0\0\0\0\0null"])
def test_what_is_no_checkpoint_has_chunks_too(content) -> None:
    assert b"".join(manifests.pieces(io.BytesIO(content))) == content


# -- the launcher's side ----------------------------------------------------------------------------------------


def test_a_new_run_does_not_mix_with_an_earlier_one(machine, fresh, capsys) -> None:
    storing.check(machine.store.url, new=True)
    with pytest.raises(ConfigError, match=golden.pattern("store.no_intact")):
        storing.bring(machine.store.url, fresh, 0, required=True)
    assert storing.bring(machine.store.url, fresh, 1, required=True) is False
    machine.checkpoint(8)
    machine.uploads_all()
    with pytest.raises(ConfigError, match=golden.pattern("store.earlier_run_resume")):
        storing.check(machine.store.url, new=True)
    with pytest.raises(ConfigError, match=golden.pattern("store.earlier_run")):
        storing.check(machine.store.url, new=True, node=0)
    storing.check(machine.store.url, new=True, node=1)  # a node of which there are none begins
    storing.check(machine.store.url, new=False)
    assert storing.bring(machine.store.url, fresh, 0, required=False)
    assert "[store] node0-worker0: 8 iterations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/some/folder", golden.pattern("store.no_store")),
        ("foo://x", "the store foo://x cannot be opened: Protocol not known: foo; known are file, .*s3"),
        ("abfs://x/y", golden.pattern("store.needs_package")),
        ("file:///proc/none", "the store file:///proc/none cannot write lsgd.json: .*; check the URL"),
    ],
)
def test_a_url_that_cannot_work_is_an_error_before_the_run(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        storing.check(url, new=True)


@pytest.mark.parametrize("options", [("--store", "/mnt/run"), ("--resume", "python", "x.py")])
def test_what_is_no_url_is_wrong_use(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["launch", *options, "--", "python", "x.py"])
    assert done.exit_code == 2 and golden.text("store.no_url", url=options[1]) in done.output


@pytest.mark.parametrize(
    ("options", "resumes", "folder", "again"),
    [
        ((), False, "runs/run", "--store URL"),
        (("--resume",), True, "runs/run", "--resume --store URL"),
        (("--resume-if-any", "--run-dir", "here"), True, "here", "--resume-if-any --store URL"),
    ],
)
def test_the_launcher_fetches_first_and_tells_the_other_nodes(
    machine, tmp_path, monkeypatch, options: tuple[str, ...], resumes: bool, folder: str, again: str
) -> None:
    machine.checkpoint(8)
    machine.uploads_all()
    launched: list[LaunchSettings] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "launch", lambda settings: launched.append(settings) or 0)
    url, other = machine.store.url, f"{machine.store.url}-2"
    place = ("--node", "0", "--nodes", "2", "--address", "127.0.0.1", "--device", "cpu")

    def invoke(*given: str) -> str:
        done = CliRunner().invoke(main, ["launch", *place, *given, "--", "python", "x.py"])
        assert done.exit_code == 0, done.output
        return launched[-1].join_line

    assert again.replace("URL", url) in invoke("--store", url, *options)
    (settings,) = launched
    assert (settings.resume, settings.store, settings.run_dir) == (resumes, url, tmp_path / folder)
    assert settings.resume_if_any == ("--resume-if-any" in options)
    assert len(list((tmp_path / folder).rglob("*.safetensors"))) == resumes
    assert f"--resume {url} --store {other}" in invoke("--resume", url, "--store", other)
    assert launched[-1].store == other


def test_a_store_that_is_away_for_a_moment_is_read_all_the_same(monkeypatch, capsys) -> None:
    monkeypatch.setattr(storing, "RESTORE_PAUSES_S", (0.0, 0.0))
    answers: Iterator[Any] = iter([StoreError("away"), StoreError("away"), True] + [StoreError("away")] * 3)

    def read() -> bool:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return bool(answer)

    assert storing._patiently(read)
    assert capsys.readouterr().err.count(golden.text("store.try_now")) == 2
    with pytest.raises(ConfigError, match=golden.pattern("store.check_url")):
        storing._patiently(read)


# -- the final model --------------------------------------------------------------------------------------------


def test_a_model_goes_to_a_store_with_its_index_last(store, tmp_path, monkeypatch) -> None:
    order, real = [], Store.upload

    def watched(self: Store, name: str, path: Path) -> None:
        order.append(name)
        if order.count(name) == 1 and name.endswith(".json"):
            raise StoreError("the link is cut")
        real(self, name, path)

    monkeypatch.setattr(Store, "upload", watched)
    monkeypatch.setattr(model_files, "UPLOAD_PAUSES_S", (0.0,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    urls = model_files.save_to_store(model, f"{store.url}/", 100, Island())
    assert urls[-1] == f"{store.url}/model.safetensors.index.json" and order[-2:] == [order[-1]] * 2
    index = json.loads(store.read("model.safetensors.index.json"))
    for name, file in index["weight_map"].items():
        path = tmp_path / file
        path.write_bytes(store.read(file))
        assert torch.equal(load_file(path)[name], model.state_dict()[name])
    monkeypatch.setattr(Store, "upload", lambda *_: (_ for _ in ()).throw(StoreError("the disk is full")))
    with pytest.raises(StoreError, match="the disk is full"):
        model_files.save_to_store(model, store.url, 1000, Island())


def test_the_watch_ends_a_process_whose_connection_stalls(store, monkeypatch, capsys) -> None:
    class EndedError(Exception):
        pass

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(upload.os, "_exit", end)
    store.moved_s = -1e9
    with pytest.raises(EndedError, match=f"{upload.STALLED_CODE}"):
        upload._watch(store, 0.01)
    assert golden.text("store.no_data_moved", url=store.url) in capsys.readouterr().out


def test_the_end_of_standard_input_is_that_of_the_launcher(monkeypatch) -> None:
    ends, told = list[int](), upload.threading.Event()
    monkeypatch.setattr(upload.os, "_exit", ends.append)
    monkeypatch.setattr(upload.sys, "stdin", io.TextIOWrapper(io.BytesIO(upload.END)))
    upload._listen(told)
    assert told.is_set() and ends == [1]


# -- the wait at the end ----------------------------------------------------------------------------------------


class Ending:
    """A run's end: a store, what it says, and a process in place of its own that ends when a test says so."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = list[str]()
        self._may_end = folder / "may end"
        os.mkfifo(self._may_end)
        self.store = storing.Storing("memory://run", folder, 0, os.environ)
        self.store._arguments = [sys.executable, "-c", f"open({str(self._may_end)!r}).read()"]
        monkeypatch.setattr(storing, "_show", self._hear)
        self.when_waiting: Callable[[], object] = self.let_end

    def let_end(self) -> None:
        self._may_end.open("w").close()

    def _hear(self, line: str) -> None:
        self.told.append(line.removeprefix("[launch] ").partition(" of this run")[0])
        if "waiting" in line:
            self.when_waiting()

    def finish(self) -> list[str]:
        with self.store.noticing():
            self.store.begin(self.told.append)
            self.store.finish(wait_s=300.0)
        self.store.join(scaled(20))
        return self.told


@pytest.fixture
def ending(tmp_path, monkeypatch) -> Ending:
    return Ending(tmp_path, monkeypatch)


HUNG_UP, TERMINATED = (golden.text("store.last_files", name=name) for name in ("SIGHUP", "SIGTERM"))
WAITS = golden.text("store.waits_up_to_300")


def test_a_terminal_that_is_closed_does_not_end_the_wait_for_the_store(ending) -> None:
    def hang_up() -> None:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        ending.let_end()

    ending.when_waiting = hang_up
    told = ending.finish()
    assert told == [WAITS, HUNG_UP, TERMINATED, HUNG_UP, golden.text("store.has_all", url="memory://run")]
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_second_sigterm_ends_the_wait_for_the_store(ending) -> None:
    def terminate() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    ending.when_waiting = terminate
    waits, first, lacks = ending.finish()
    assert (waits, first) == (WAITS, TERMINATED) and lacks == "memory://run lacks files"


def test_after_two_sigterms_nothing_waits_for_the_store(ending) -> None:
    with ending.store.noticing():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        first, hung_up, lacks = ending.finish()
    assert (first, hung_up, lacks) == (TERMINATED, HUNG_UP, "memory://run lacks files")


def test_where_hang_ups_are_ignored_they_stay_so(ending) -> None:
    """As below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ending.when_waiting = lambda: (os.kill(os.getpid(), signal.SIGHUP), ending.let_end())
        assert HUNG_UP not in ending.finish() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
