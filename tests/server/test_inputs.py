"""The last inputs of a run, and the same decisions again from them."""

import pickle
import re
import zlib
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner

from lsgd.cli.commands import main
from lsgd.errors import ConfigError
from lsgd.run_folder import INPUTS
from lsgd.server import inputs
from lsgd.server.inputs import Inputs, Kind, replay
from lsgd.server.reasons import Why
from lsgd.server.tenure import Access
from tests import golden

from .helpers import make_plan
from .served_run import ServedRun
from .simulated_run import Faults


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    """Print no lines: a thread does that, and after the test perhaps."""
    monkeypatch.setattr("lsgd.server.global_daemon.say", lambda text: None)


class NotedRun(ServedRun):
    """Keeps its inputs in a folder, and what was decided on each."""

    def __init__(self, folder: Any, *args: Any) -> None:
        self.folder, self.decided = folder, list[Any]()
        super().__init__(*args)

    def _serve(self, coordinator: Any) -> None:
        super()._serve(coordinator)
        self.server._inputs = Inputs(self.folder)
        decide = self.server._act

        def act(decision: Any) -> None:
            self.decided.append(([*decision.notes], [*decision.answers]))
            decide(decision)

        self.server._act = act


def train(folder: Any, seconds: float) -> NotedRun:
    run = NotedRun(folder, make_plan(period=8, local_period=4, workers=4, lookahead=1), [2, 2], 3, Faults(pause=0.05))
    run._tick()
    run.until(lambda: run.now > seconds)
    run.server._inputs.close()
    return run


def test_the_same_inputs_lead_to_the_same_decisions(tmp_path) -> None:
    run = train(tmp_path, 30.0)
    again = [([*d.notes], [*d.answers]) for _, what, d, _ in replay(tmp_path) if not isinstance(what, dict)]
    assert len(again) > 300 and again == run.decided


def test_only_the_last_inputs_are_kept_and_decisions_go_on_in_the_middle(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "MOST_NBYTES", 20_000)
    run = train(tmp_path, 60.0)
    again = [([*d.notes], [*d.answers]) for _, _, d, _ in replay(tmp_path)]
    assert 0 < len(again) < len(run.decided) and again == run.decided[-len(again) :]
    assert all((tmp_path / name).stat().st_size < 100_000 for name in INPUTS)


def test_no_key_and_no_certificate_is_in_the_files(tmp_path) -> None:
    run = NotedRun(tmp_path, make_plan(workers=1), [1])
    run.state.tenure.access = Access(b"a certificate", "", b"a secret")
    run._tick()
    run.until(lambda: run.now > 3.0)
    run.server._inputs.close()
    (state, *_) = inputs._records(tmp_path / INPUTS[0])
    text = zlib.decompress(state[3])
    assert b"a certificate" not in text and b"a secret" not in text and b"node0/worker0" not in text


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("it has run",))


@pytest.mark.parametrize("what", [Evil(), {"a": 1}])
def test_a_file_from_a_stranger_runs_nothing(tmp_path, capsys, what) -> None:
    record = (int(Kind.STATE), 0.0, False, zlib.compress(pickle.dumps(what)))
    (tmp_path / INPUTS[0]).write_bytes(msgpack.packb(record))
    with pytest.raises(ConfigError, match=golden.pattern("inputs.no_replay")):
        list(replay(tmp_path))
    assert "it has run" not in capsys.readouterr().out


def test_a_folder_without_inputs_says_which_one_has_them(tmp_path) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("inputs.no_inputs")):
        list(replay(tmp_path))


def test_a_file_that_ends_in_the_middle_of_a_record_is_replayed_up_to_there(tmp_path) -> None:
    run = train(tmp_path, 5.0)
    path = tmp_path / INPUTS[0]
    path.write_bytes(path.read_bytes()[:-3])
    assert len(list(replay(tmp_path))) == len(run.decided) - 1


def test_the_command_shows_what_was_said_decided_and_waited_for(tmp_path) -> None:
    train(tmp_path, 30.0)
    told = CliRunner().invoke(main, ["replay", str(tmp_path), "--last", "100000"])
    assert told.exit_code == 0, told.output
    assert re.search(golden.pattern("inputs.asks"), told.output)
    assert re.search(golden.pattern("inputs.go"), told.output)
    assert (
        golden.text("inputs.round") in told.output
        and f"\n    waits: {Why.JOINING(here=0, wanted=4, missing='')}" in told.output
    )
    one = CliRunner().invoke(main, ["replay", str(tmp_path), "--worker", "node0/worker1"])
    assert "    to node0/worker1" in one.output and "    to node1/worker0" not in one.output


def test_a_folder_without_inputs_is_an_error_of_one_line(tmp_path) -> None:
    told = CliRunner().invoke(main, ["replay", str(tmp_path)])
    assert told.exit_code == 1 and "has no inputs.bin" in told.output and "Traceback" not in told.output
