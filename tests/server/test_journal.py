"""The journal's file: what it keeps, whose it is, and every way in which it can be damaged."""

import os
import random
import resource
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from lsgd.errors import ConfigError
from lsgd.protocol.events import RoundOrdered
from lsgd.protocol.messages import ChangeSettings, Status
from lsgd.server.journal import VERSION, Journal, _digest
from lsgd.server.rounds import MAX_ELECTIONS
from tests import golden

from ..integration.running import Cluster, until
from .helpers import as_a_user_without_rights

STATE = {"count": 7, "text": "é" * 3000, "members": [{"loss": None}]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.journal"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def elections(count: int, first: int = 1) -> list[RoundOrdered]:
    return [RoundOrdered(n, "local", 0, "node0/worker0", n, 0.5, {"a": None}) for n in range(first, first + count)]


def write(path: Path, state: dict = STATE, rounds: int = 3) -> None:
    journal = Journal(path)
    journal.save(state, elections(rounds))
    journal.close()


def test_it_returns_the_last_state_and_the_last_rounds(path) -> None:
    journal = Journal(path)
    assert journal.load() is None and not journal.resumed
    journal.save({"count": 1}, elections(2))
    journal.save(STATE, elections(3))
    journal.close()
    again = Journal(path)
    assert again.load() == (STATE, elections(3))
    assert again.resumed
    again.save(STATE, elections(2, first=3))  # the third is there already
    again.close()
    assert Journal(path).load() == (STATE, elections(4))


def test_it_keeps_as_many_rounds_as_the_coordinator(path) -> None:
    write(path, rounds=MAX_ELECTIONS + 5)
    kept = Journal(path).load()
    assert kept is not None and kept[1] == elections(MAX_ELECTIONS, first=6)


def test_a_run_that_is_over_is_forgotten(path) -> None:
    write(path)
    Journal(path).finish()
    journal = Journal(path)
    assert journal.load() is None
    journal.save({"count": 2}, elections(1))  # of another run: its rounds begin anew
    journal.close()
    assert Journal(path).load() == ({"count": 2}, elections(1))


def test_each_save_outlives_a_kill(path) -> None:
    """A child is killed without warning after its last save."""
    child = os.fork()
    if child == 0:
        try:
            Journal(path).save(STATE, elections(3))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert Journal(path).load() == (STATE, elections(3))


def test_cut_short_anywhere_it_is_whole_or_damaged_or_empty(path) -> None:
    write(path)
    whole = path.read_bytes()
    damaged = 0
    for length in [*range(0, len(whole), 199), len(whole) - 1]:
        path.write_bytes(whole[:length])
        try:
            journal = Journal(path)
        except ConfigError as error:
            damaged += _says_what_to_do(error, path)
            continue
        try:
            assert journal.load() is None and length == 0
        except ConfigError as error:
            damaged += _says_what_to_do(error, path)
        finally:
            journal.close()
    assert damaged > len(whole) // 199 - 2


def test_garbage_in_it_is_never_taken_for_a_state(path) -> None:
    write(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    damaged = 0
    for _ in range(150):
        content = bytearray(whole)
        at = rng.randrange(len(content) - 8)
        content[at : at + 8] = rng.randbytes(8)
        path.write_bytes(content)
        journal = None
        try:
            journal = Journal(path)
            loaded = journal.load()
            assert loaded is None or loaded[0] == STATE
        except ConfigError as error:
            damaged += _says_what_to_do(error, path)
        finally:
            if journal is not None:
                journal.close()
    assert damaged > 20


@pytest.mark.parametrize("keep", [0, 1, 5, 10])
@pytest.mark.parametrize("flip", [False, True])
def test_a_damaged_end_is_refused_with_how_much_is_missing(path, keep, flip) -> None:
    """The log of a server that was killed loses its end, or a bit in it; SQLite goes on with what is before that."""
    journal = Journal(path)
    journal.save({"changes": 1, "count": 0}, [])
    begin = path.with_name("run.journal-wal").stat().st_size
    for number in range(2, 13):
        journal.save({"changes": number, "count": 10 * number}, elections(1, first=number))
    step = (path.with_name("run.journal-wal").stat().st_size - begin) // 11
    copies = {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}
    journal.close()
    log = bytearray(copies["run.journal-wal"])
    at = begin + keep * step
    log[at + 100] ^= 1
    copies["run.journal-wal"] = bytes(log if flip else log[:at])
    elsewhere = path.parent / "again"
    elsewhere.mkdir()
    for name, content in copies.items():
        (elsewhere / name).write_bytes(content)
    damaged = Journal(elsewhere / path.name)
    with pytest.raises(ConfigError, match=golden.pattern("journal.wal_missing")) as error:
        damaged.load()
    damaged.close()
    assert _says_what_to_do(error.value, elsewhere / path.name)
    assert golden.text("journal.had_more", changes=11 - keep, iterations=10 * (keep + 1) * bool(keep)) in str(
        error.value
    )


@pytest.mark.parametrize("mark", ["", "{", "[" * 3000, "[1]", '["a", 2]', "7", "[-5, 3]"])
def test_a_damaged_mark_refuses_nothing(path, mark) -> None:
    write(path)
    path.with_name("run.journal-last").write_text(mark)
    assert Journal(path).load() == (STATE, elections(3))


def test_a_state_that_fits_its_digest_and_is_none_is_refused(path) -> None:
    journal = Journal(path)
    nested = "[" * 3000
    journal._connection.execute("INSERT INTO state VALUES (1, ?, ?)", (nested, _digest(nested)))
    with pytest.raises(ConfigError, match=golden.pattern("journal.too_deep")):
        journal.load()


def _says_what_to_do(error: ConfigError, path: Path) -> bool:
    assert "\n" not in str(error) and str(path) in str(error)
    assert golden.text("journal.delete", name=path.name) in str(error) or "give another --journal" in str(error)
    return True


def test_another_file_in_its_place(path) -> None:
    path.write_text("[algorithm]\nname = 'leader'\n" * 50)
    with pytest.raises(ConfigError, match=golden.pattern("journal.no_database")):
        Journal(path)
    with pytest.raises(ConfigError, match=golden.pattern("journal.unopened")):
        Journal(path.parent / "nowhere" / "run.journal")


def test_a_file_that_may_only_be_read(path) -> None:
    write(path)
    path.chmod(0o444)
    with as_a_user_without_rights(path.parent):
        with pytest.raises(ConfigError, match=golden.pattern("journal.unwritable")):
            Journal(path)
    path.chmod(0o644)
    assert Journal(path).load() == (STATE, elections(3))


def test_it_is_one_servers_at_a_time(path, monkeypatch) -> None:
    monkeypatch.setattr("lsgd.server.journal.LOCK_WAIT_S", 0.1)
    first = Journal(path)
    with pytest.raises(ConfigError, match=golden.pattern("journal.other_server_or")):
        Journal(path)
    first.save(STATE, [])
    first.close()
    assert Journal(path).load() == (STATE, [])


@pytest.mark.parametrize("all_files", [True, False])
def test_deleted_while_it_is_in_use_it_is_made_anew(path, all_files) -> None:
    journal = Journal(path)
    journal.save({"count": 1}, elections(3))
    for file in path.parent.iterdir():
        if all_files or file == path:
            file.unlink()
    assert not path.exists()
    journal.save(STATE, elections(4))
    journal.close()
    assert Journal(path).load() == (STATE, elections(4))


def test_a_full_disk_is_told_and_leaves_the_last_state(path) -> None:
    journal = Journal(path)
    journal.save(STATE, elections(3))
    journal._connection.execute("PRAGMA max_page_count = 8")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.save({"text": "x" * 100_000}, elections(4))
    journal.close()
    assert Journal(path).load() == (STATE, elections(3))


def test_old_rounds_are_not_kept_for_ever(path) -> None:
    journal = Journal(path)
    for last in range(500, 3 * MAX_ELECTIONS, 500):
        journal.save(STATE, elections(last)[-MAX_ELECTIONS:])
    (kept,) = journal._connection.execute("SELECT COUNT(*) FROM rounds").fetchone()
    assert kept == MAX_ELECTIONS
    journal.close()
    loaded = Journal(path).load()
    assert loaded is not None and loaded[1] == elections(last)[-MAX_ELECTIONS:]


def test_removed_it_leaves_no_file(path) -> None:
    journal = Journal(path)
    journal.save(STATE, elections(3))
    journal.remove()
    assert list(path.parent.iterdir()) == []


# -- in a global server ----------------------------------------------------------------------------------------


def test_two_global_servers_do_not_share_one(cluster, path) -> None:
    first = cluster.start_global("--journal", str(path))
    second = cluster.server("second", "--global", "--listen", "tcp://127.0.0.1:0", "--journal", str(path))
    assert second.wait() == 2
    assert golden.text("journal.other_server", path=path) in second.output
    assert first.poll() is None


def test_a_server_goes_on_with_an_unfinished_run_and_not_with_a_finished_one(cluster, path) -> None:
    first = cluster.start_global("--journal", str(path), "--workers", "3")
    run = cluster.status()["run"]
    first.send(signal.SIGKILL)
    first.wait()
    second = cluster.start_global("--journal", str(path))
    assert golden.text("journal.continues", run=run, path=path) in second.output
    assert cluster.status()["run"] == run and "waits for 3 workers" in second.output
    second.send(signal.SIGTERM)
    second.succeeds()
    third = cluster.start_global("--journal", str(path))
    assert cluster.status()["run"] != run and "continues run" not in third.output


def test_a_journal_of_another_version_is_refused_with_what_to_do(cluster, path) -> None:
    write(path, {"version": 99}, rounds=0)
    server = cluster.server("global", "--global", "--listen", "tcp://127.0.0.1:0", "--journal", str(path))
    assert server.wait() == 2
    assert (golden.text("journal.other_version", path=path, ours=VERSION)) in " ".join(server.output.split())


def test_a_journal_that_cannot_be_written_is_made_anew_when_the_disk_has_space_again(cluster, path) -> None:
    """A limit on the size of files does to the server's writes what a full disk does."""
    server = cluster.start_global("--journal", str(path), "--workers", "2")
    assert path.exists()
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    written = max(file.stat().st_size for file in path.parent.glob("run.journal*"))
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (written, hard))
    assert isinstance(cluster.ask(ChangeSettings({"iterations": "500"})), Status)
    server.says(golden.pattern("journal.removed"))
    until(lambda: not list(path.parent.glob("run.journal*")), "the journal is gone")
    assert cluster.status()["iterations"] == 500
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (hard, hard))
    server.says(r"the journal \S+ is written again")
    run = cluster.status()["run"]
    server.send(signal.SIGKILL)
    server.wait()
    again = cluster.start_global("--journal", str(path))
    again.says(golden.pattern("crashes.continues", run=run))
    assert cluster.status()["iterations"] == 500
