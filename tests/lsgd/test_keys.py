"""Keys and tokens: what is made, what is refused, and where none are needed."""

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsgd.errors import ConfigError
from lsgd.protocol.keys import (
    SERVER_KEY,
    KeyRing,
    adopted_folder,
    connector_keys,
    default_folder,
    is_local,
    is_secret,
    kept_token,
    listener_keys,
    parse_token,
    token_path,
    write_private,
)
from lsgd.protocol.sockets import new_key_pair, public_key
from tests import golden

from ..speed import scaled

NETWORK = "tcp://10.0.0.1:27400"


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing.make(tmp_path / "keys", ["node0", "node1", "operator"])


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSGD_KEYS", str(tmp_path / "keys"))
    monkeypatch.delenv("LSGD_TOKEN", raising=False)


def test_a_token_holds_the_servers_public_key_and_a_pair_that_is_allowed(ring) -> None:
    for name in ("node0", "node1", "operator"):
        keys = parse_token(ring.token(name), "the token")
        assert keys.name == name
        assert keys.server == ring.public == public_key(ring.secret)
        assert keys.public == public_key(keys.secret)
        assert ring.allowed(keys.public) == name
    assert ring.allowed(new_key_pair()[0]) == ""


def test_launchers_that_begin_together_make_one_ring(tmp_path) -> None:
    names, together = [f"node{number}" for number in range(8)], Barrier(8)

    def make(number: int) -> None:
        together.wait(scaled(60))
        KeyRing.make(tmp_path / "new", names[number:] + names[:number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    ring = KeyRing(tmp_path / "new")
    for name in names:
        keys = parse_token(ring.token(name), "the token")
        assert (ring.allowed(keys.public), keys.server) == (name, ring.public)


def test_only_the_user_can_read_what_is_made(ring) -> None:
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in ring.folder.iterdir()} == {0o600}
    (ring.folder / "server.key").chmod(0o640)
    with pytest.raises(ConfigError, match=golden.pattern("keys.others_read")):
        KeyRing(ring.folder)


@pytest.mark.parametrize(("name", "mode"), [("allowed", 0o666), ("allowed", 0o620), (".", 0o730), (".", 0o1777)])
def test_keys_that_others_can_write_are_refused_with_the_line_to_type(ring, name, mode) -> None:
    path = ring.folder / name
    mended = "700" if name == "." else "600"
    path.chmod(mode)
    for use in (lambda: KeyRing(ring.folder), lambda: KeyRing.make(ring.folder, ["node2"])):
        with pytest.raises(ConfigError, match=golden.pattern("keys.others_write", path=path, mended=mended)):
            use()
    path.chmod(int(mended, 8))
    KeyRing(ring.folder)


def test_a_list_that_others_can_write_lets_nobody_else_in_while_the_ring_is_used(ring) -> None:
    known, stranger = parse_token(ring.token("node1"), "").public, new_key_pair()[0]
    allowed = ring.folder / "allowed"
    line = f"node1 {base64.urlsafe_b64encode(stranger).decode().rstrip('=')}\n"
    allowed.chmod(0o666)
    allowed.write_text(line)
    assert (ring.allowed(stranger), ring.allowed(known)) == ("", "node1")
    assert "chmod 600" in ring.trouble and ring.trouble.endswith(golden.text("keys.earlier_keys"))
    allowed.chmod(0o600)
    assert (ring.allowed(stranger), ring.allowed(known), ring.trouble) == ("node1", "", "")


def test_making_it_again_keeps_what_is_there_and_adds_nodes(ring) -> None:
    before = {path.name: path.read_text() for path in ring.folder.glob("*.[kt]*")}
    again = KeyRing.make(ring.folder, ["node0", "node1", "node2"])
    after = {path.name: path.read_text() for path in ring.folder.glob("*.[kt]*")}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"node2.token"}
    public = parse_token(again.token("node2"), "").public
    assert ring.allowed(public) == "node2"  # a ring in use sees it too


def test_a_node_that_serves_instead_uses_its_own_key_and_shuts_nobody_out(ring, tmp_path) -> None:
    node1 = parse_token(ring.token("node1"), "")
    adopted = KeyRing.adopt(tmp_path / "node1-keys", node1.secret, ring.listed(), b"-----CERTIFICATE-----\n")
    assert adopted.public == node1.public and adopted.listed() == ring.listed()
    assert (adopted.certificate, ring.certificate) == (b"-----CERTIFICATE-----\n", b"")
    again = KeyRing.make(adopted.folder, ["node0", "node1", "node2"])
    assert {name: again.listed()[name] for name in ring.listed()} == ring.listed()
    new = parse_token(again.token("node2"), "")
    assert new.server == node1.public and again.allowed(new.public) == "node2"


def test_a_line_that_is_deleted_shuts_a_node_out_and_a_new_token_lets_it_in(ring) -> None:
    old = parse_token(ring.token("node1"), "")
    allowed = ring.folder / "allowed"
    lines = [line for line in allowed.read_text().splitlines() if not line.startswith("node1")]
    allowed.write_text("\n".join(["# by hand", *lines]))
    assert ring.allowed(old.public) == ""
    assert ring.allowed(parse_token(ring.token("node0"), "").public) == "node0"
    KeyRing.make(ring.folder, ["node1"])
    new = parse_token(ring.token("node1"), "")
    assert (ring.allowed(old.public), ring.allowed(new.public)) == ("", "node1")


def test_a_list_that_is_damaged_is_an_error_at_the_start_and_changes_nothing_later(ring) -> None:
    public = parse_token(ring.token("node1"), "").public
    (ring.folder / "allowed").write_text("node1 abc\n")
    assert ring.allowed(public) == "node1"
    with pytest.raises(ConfigError, match=golden.pattern("keys.damaged")):
        KeyRing(ring.folder)
    (ring.folder / "allowed").write_text("Node 1\n")
    with pytest.raises(ConfigError, match=golden.pattern("keys.bad_name")):
        KeyRing(ring.folder)
    (ring.folder / "server.key").write_text("short\n")
    with pytest.raises(ConfigError, match=r"server\.key is damaged"):
        KeyRing(ring.folder)


def test_no_keys_are_an_error_that_says_how_to_make_them(tmp_path) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("keys.no_server_key")):
        KeyRing(tmp_path)


@given(st.text(max_size=200))
def test_no_text_is_a_token_by_chance_nor_shown_in_the_error(text) -> None:
    with pytest.raises(ConfigError, match=golden.pattern("keys.no_token_in", name="X")) as error:
        parse_token(text, "the variable X")
    assert len(text) < 20 or text not in str(error.value)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///tmp/x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://no.such.host.invalid:1", False),
        ("tcp://10.0.0..1:1", False),
    ],
)
def test_which_addresses_other_machines_can_reach(address, local) -> None:
    assert is_local(address) is local


class TestWhereKeysAreNeeded:
    def test_not_on_this_machine_unless_they_are_given(self, ring) -> None:
        assert listener_keys("tcp://127.0.0.1:1", None, insecure=False) is None
        assert connector_keys("ipc://x", None, "node0", insecure=False) is None
        given_ring = listener_keys("tcp://127.0.0.1:1", ring.folder, insecure=False)
        given_link = connector_keys("tcp://127.0.0.1:1", token_path("node1", ring.folder), "node1", insecure=False)
        assert given_ring and given_link and given_link.server == given_ring.public

    def test_on_the_network_always_unless_it_is_trusted(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match=golden.pattern("keys.without_keys")):
            listener_keys(NETWORK, None, insecure=False)
        with pytest.raises(ConfigError, match=golden.pattern("keys.token_needed")):
            connector_keys(NETWORK, None, "node1", insecure=False)
        assert listener_keys(NETWORK, None, insecure=True) is None
        assert connector_keys(NETWORK, None, "node1", insecure=True) is None
        ring = KeyRing.make(default_folder(), ["node1"])
        made, own = (
            listener_keys(NETWORK, None, insecure=False),
            connector_keys(NETWORK, None, "node1", insecure=False),
        )
        assert made and own and made.secret == ring.secret and made.allowed(own.public) == "node1"

    def test_what_cannot_be_looked_at_is_an_error_in_words(self) -> None:
        """It may be there: in a folder of another user, say."""
        ring = KeyRing.make(default_folder(), ["node1"])
        for path in (token_path("node1"), ring.folder / SERVER_KEY):
            path.unlink()
            path.symlink_to(path)
        with pytest.raises(ConfigError, match=golden.pattern("keys.unreadable_node1")):
            connector_keys(NETWORK, None, "node1", insecure=False)
        with pytest.raises(ConfigError, match=golden.pattern("keys.unreadable")):
            listener_keys(NETWORK, None, insecure=False)

    def test_the_variable_comes_before_the_folder(self, ring, monkeypatch) -> None:
        monkeypatch.setenv("LSGD_TOKEN", ring.token("node1"))
        keys = connector_keys(NETWORK, None, "operator", insecure=False)  # a node's token serves an operator too
        assert keys and keys.name == "node1"
        with pytest.raises(ConfigError, match=golden.pattern("keys.other_node")):
            connector_keys(NETWORK, None, "node0", insecure=False)
        monkeypatch.setenv("LSGD_TOKEN", "lsgd1:node1:abc")
        with pytest.raises(ConfigError, match=golden.pattern("keys.no_token_in", name="LSGD_TOKEN")):
            connector_keys(NETWORK, None, "node1", insecure=False)

    @pytest.mark.parametrize("by_variable", [True, False])
    def test_on_a_node_that_has_joined_an_operator_has_its_token(
        self, ring, tmp_path, monkeypatch, by_variable
    ) -> None:
        run_folder = tmp_path / "run"
        run_folder.mkdir()
        if by_variable:
            monkeypatch.setenv("LSGD_TOKEN", ring.token("node1"))
        old, older = (
            run_folder / "node1-joined.token",
            run_folder / "node0-joined.token",
        )  # of launchers that were killed
        for path in (old, older):
            write_private(path, ring.token("node0"))
            os.utime(path, (1, 1))
        with kept_token(1, run_folder, joins=True):
            monkeypatch.delenv("LSGD_TOKEN", raising=False)
            monkeypatch.setenv("LSGD_KEYS", str(tmp_path / "none"))
            (kept,) = {*run_folder.iterdir()} - {older}
            assert kept.stat().st_mode & 0o777 == 0o600 and is_secret(kept)
            keys = connector_keys(NETWORK, None, "operator", insecure=False, run_folder=run_folder)
            assert keys == parse_token(kept.read_text().strip(), "token") and keys.name == "node1"
        assert [*run_folder.iterdir()] == [older]
        with kept_token(0, run_folder, joins=False), pytest.raises(ConfigError):
            connector_keys(NETWORK, None, "operator", insecure=False, run_folder=run_folder)

    def test_a_key_ring_in_the_run_folder_stays(self, ring, monkeypatch) -> None:
        before = {*ring.folder.iterdir()}
        with pytest.raises(KeyboardInterrupt), kept_token(1, ring.folder, joins=True):
            assert len({*ring.folder.iterdir()} - before) == 1
            raise KeyboardInterrupt
        assert {*ring.folder.iterdir()} == before

    def test_on_a_node_that_serves_an_operator_has_the_key_with_which_it_does(self, tmp_path) -> None:
        ring = KeyRing.make(tmp_path / "keys of node 0", ["node1"])
        node1 = parse_token(ring.token("node1"), "token")
        run_folder = tmp_path / "run"
        with pytest.raises(ConfigError, match=golden.pattern("operate.token_needed")):
            connector_keys(NETWORK, None, "operator", insecure=False, run_folder=run_folder)
        serving = KeyRing.adopt(adopted_folder(run_folder, 1), node1.secret, ring.listed(), b"-----CERTIFICATE-----\n")
        keys = connector_keys(NETWORK, None, "operator", insecure=False, run_folder=run_folder)
        assert keys and (keys.name, keys.server, keys.secret) == ("node1", serving.public, node1.secret)
        assert serving.allowed(keys.public) == "node1"


def test_the_default_folder_is_among_the_users_settings() -> None:
    assert default_folder({"HOME": "/home/a"}) == Path("/home/a/.config/lsgd/keys")
    assert default_folder({"HOME": "/home/a", "XDG_CONFIG_HOME": "/c"}) == Path("/c/lsgd/keys")
    assert default_folder({"HOME": "/home/a", "LSGD_KEYS": "/k"}) == Path("/k")
