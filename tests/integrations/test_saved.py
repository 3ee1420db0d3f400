"""What the worker that saves leaves to the others: paths in a file of the run folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lsgd.integrations import saved
from lsgd.integrations.saved import Saved


def test_the_others_wait_for_the_last_paths_of_one_that_has_begun_to_save(tmp_path: Path, monkeypatch) -> None:
    one, other = Saved(tmp_path), Saved(tmp_path)
    assert other.hear() is None, "nobody saves where this worker looks"
    one.tell(None)
    looked = []
    monkeypatch.setattr(saved.time, "sleep", lambda seconds: one.tell(["a", "b"]) if looked else looked.append(1))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other.hear).result(30) == ["a", "b"]
    one.forget()
    assert other.hear() is None


def test_one_that_dies_while_it_saves_is_not_waited_for_without_end(tmp_path: Path, monkeypatch) -> None:
    Saved(tmp_path).tell(None)
    monkeypatch.setattr(saved, "WITHIN_S", 0.3)
    assert Saved(tmp_path).hear() is None


def test_without_a_run_folder_nobody_is_told() -> None:
    alone = Saved(None)
    alone.forget()
    alone.tell(["a"])
    assert alone.hear() is None
