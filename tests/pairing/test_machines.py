"""What a machine says of itself, what it keeps of others, and of its runs."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from lsgd.errors import ConfigError, ProtocolError
from lsgd.pairing.about import About, differences, digest_of, of_this_machine
from lsgd.pairing.peers import Peer, Peers
from lsgd.pairing.record import Run, checked_name, died
from lsgd.pairing.up import DOOR_PORT, parse_place
from lsgd.pairing.visit import Grant
from lsgd.run_folder import JOURNAL, RESULT
from tests import golden

ABOUT = About("alpha", 0, 2, "0.1.0", "2.13.0+cpu", "/home/a/train.py", "python train.py", "aa")


def test_the_digest_is_of_the_script_and_what_it_imports_wherever_they_lie(tmp_path: Path) -> None:
    def folder(name: str, **files: str) -> Path:
        path = tmp_path / name
        (path / "parts").mkdir(parents=True)
        for stem, text in {
            "train": "import model\nfrom parts import layer",
            "model": "a = 1",
            "other": "1",
            **files,
        }.items():
            (path / f"{stem.replace('_', '/')}.py").write_text(text)
        return path / "train.py"

    base = digest_of(folder("a", parts_layer="b = 1"))
    assert digest_of(folder("b", parts_layer="b = 1", other="2")) == base
    assert digest_of(folder("c", parts_layer="b = 2")) != base
    assert digest_of(folder("d", parts_layer="b = 1", model="a = 2")) != base
    assert digest_of(folder("e", parts_layer="b = 1", train="import model")) != base


def test_differences_are_said_with_what_to_type() -> None:
    assert differences(ABOUT, ABOUT) == ([], [])
    wrong, noted = differences(replace(ABOUT, digest="bb", torch="2.13.1"), ABOUT)
    assert wrong == [golden.text("pairing.other_script")]
    assert noted == [golden.text("pairing.other_torch")]
    wrong, noted = differences(replace(ABOUT, lsgd="0.2.0", torch="2.6.0", command="python train.py --lr 1"), ABOUT)
    assert (len(wrong), len(noted)) == (2, 1)


def test_what_a_machine_says_of_itself_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("1")
    about = of_this_machine(["python", str(script)], ["cpu", "cpu"])
    assert About.read(about.message()) == about and (about.gpus, about.workers) == (0, 2)
    assert "\x1b" not in About.read({**about.message(), "name": "\x1b[2J" * 100}).name
    for message in (None, [], {}, {**about.message(), "gpus": True}, {**about.message(), "torch": None}):
        with pytest.raises(ProtocolError):
            About.read(message)


def test_peers_are_kept_for_this_user_alone(tmp_path: Path) -> None:
    peers = Peers(tmp_path / "peers")
    peers.keep(Peer("abcd", "beta", b"k" * 32))
    again = Peers(tmp_path / "peers")
    assert again.identity == peers.identity and again.secret_of("abcd") == b"k" * 32
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "peers").iterdir()} == {0o600}
    (path,) = (tmp_path / "peers").glob("*.peer")
    path.write_text("{")
    assert again.secret_of("abcd") == b""  # a code mends it
    peers.keep(Peer("abcd", "beta", b"l" * 32))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        again.known()
    for identity in ("../../x", "", "a/b"):
        with pytest.raises(ConfigError):
            peers.keep(Peer(identity, "beta", b"k" * 32))


RUN = Run("mine", ("python", "train.py"), 2, "192.0.2.1", 27400)


def test_each_machine_of_a_run_keeps_its_index() -> None:
    run = RUN.with_member("b").with_member("c").with_member("b")
    assert run.members == {"b": 1, "c": 2}


def test_only_a_run_of_this_command_that_died_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert died(tmp_path, RUN.command) is None
    RUN.write(folder)
    assert Run.read(folder) == RUN
    assert died(tmp_path, RUN.command) is None  # it has nothing to go on from
    checkpoint = folder / "checkpoints/run-1/10/node0-worker0.safetensors"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert died(tmp_path, RUN.command) == folder
    assert died(tmp_path, ("python", "other.py")) is None
    assert died(tmp_path, RUN.command, "another") is None
    for state, is_dead in (
        ("finished", False),
        ("stopped", False),
        ("over", False),
        ("failed", True),
        ("running", True),
    ):
        (folder / RESULT).write_text(json.dumps({"state": state}))
        assert (died(tmp_path, RUN.command) == folder) is is_dead, state
    (folder / JOURNAL).write_bytes(b"no database")
    os.remove(checkpoint)
    assert died(tmp_path, RUN.command) is None


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "-a", ".a", "a" * 65, "a\n"])
def test_a_strangers_name_of_a_run_names_no_other_folder(name: str) -> None:
    with pytest.raises(ConfigError):
        checked_name(name)


def test_a_grant_is_checked() -> None:
    about = ABOUT.message()
    good = {"is": "grants", "node": 1, "nodes": 2, "token": "", "about": about, "name": "mine"}
    good |= {"address": "192.0.2.1", "port": 27400, "workers": 0, "resumed": False}
    assert Grant.read(good).node == 1
    for change in ({"node": 0}, {"node": 2}, {"port": 1 << 16}, {"name": "../x"}, {"token": 1}, {"is": "x"}):
        with pytest.raises((ConfigError, ProtocolError)):
            Grant.read({**good, **change})
    with pytest.raises(ConfigError, match="because"):
        Grant.read({"is": "refused", "why": "because"})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("192.0.2.1", ("192.0.2.1", DOOR_PORT)),
        ("host:1234", ("host", 1234)),
        ("[2001:db8::1]:1234", ("2001:db8::1", 1234)),
        ("2001:db8::1", ("2001:db8::1", DOOR_PORT)),
    ],
)
def test_places(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text) == place
