"""Keys and tokens: who may connect to the global server, and where keys are needed.

The global server has a *key ring*, a folder that only its user can read, and nobody else can write::

    server.key     the server's secret key
    allowed        one line for each key that may connect: its name (``node1``, ``operator``) and the public key
    node1.token    what node 1 needs: the server's public key, and a secret key of its own

A token is one word, ``lsgd1:node1:...``, given as a file or in the variable ``LSGD_TOKEN``. Addresses that only this
machine can reach (ipc, loopback) need no keys; all others do.
"""

import base64
import contextlib
import fcntl
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath

from lsgd.errors import ConfigError
from lsgd.protocol.routes import addresses_of
from lsgd.protocol.sockets import KEY_NBYTES, ConnectorKeys, new_key_pair, public_key

TOKEN_VARIABLE = "LSGD_TOKEN"
KEYS_VARIABLE = "LSGD_KEYS"
OPERATOR = "operator"
"""Name of the key for ``lsgd status``, ``set`` and ``stop``; a node's key works as well."""

SERVER_KEY, ALLOWED, CERTIFICATE, TOKEN_SUFFIX = "server.key", "allowed", "certificate.pem", ".token"
"""Files of a key ring: the secret key, the list, and tokens, by their ending. The run's certificate, with its key, is
in the ring of a node that serves instead of another."""

_PREFIX = "lsgd1"
_NAME = re.compile(r"[a-z][a-z0-9]*")
_RING = "-keys"
_JOINED = f"-joined{TOKEN_SUFFIX}"  # no name of a ring's token: a ring may lie in the run folder
_ADOPTED = re.compile(rf"node\d+{_RING}")


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default place of the key ring: ``LSGD_KEYS``, else lsgd/keys in the user's configuration."""
    if given := environ.get(KEYS_VARIABLE):
        return Path(given)
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home(), ".config")
    return Path(base, "lsgd", "keys")


def node_name(node: int) -> str:
    """Return the name of a node's key."""
    return f"node{node}"


def token_path(name: str, folder: Path | None = None) -> Path:
    """Return the file of a token in a key ring, or in the default one."""
    return (folder or default_folder()) / f"{name}{TOKEN_SUFFIX}"


def adopted_folder(run_folder: Path, node: int) -> Path:
    """Return the place of the key ring with which a node serves instead of another."""
    return run_folder / f"node{node}{_RING}"


def is_secret(path: PurePath) -> bool:
    """Return whether a file in a run folder belongs to a key ring, by the names on its path from there."""
    ring = any(_ADOPTED.fullmatch(part) for part in path.parts)
    return ring or path.name in (SERVER_KEY, ALLOWED, CERTIFICATE) or path.name.endswith(TOKEN_SUFFIX)


class KeyRing:
    """The keys of a global server, in a folder.

    Raises:
        ConfigError: there is no key ring, it is damaged, or others can read or write it.

    Attributes:
        trouble: reason why the file ``allowed`` cannot be used, so that an older list is in use; empty if it can.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._allowed_path = folder / ALLOWED
        self._names: dict[bytes, str] = {}
        self._read_at = (-1, -1, -1)
        self.trouble = ""
        key = folder / SERVER_KEY
        self.secret = _key(read_private(key), key)
        self.public = public_key(self.secret)
        self._read()

    @classmethod
    def make(cls, folder: Path, names: Iterable[str]) -> "KeyRing":
        """Return the ring in ``folder``, created if needed, with a token for each of ``names``; existing ones stay.

        Raises:
            ConfigError: the folder cannot be written, or its contents are damaged.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_writable(folder, "700")
            if not (folder / SERVER_KEY).exists():
                _, secret = new_key_pair()
                write_private(folder / ALLOWED, "", replace=False)  # before the key, for whoever finds that
                write_private(folder / SERVER_KEY, _text(secret), replace=False)
            ring, names = cls(folder), list(names)
            if not all(map(ring._has, names)):
                with _alone(folder / SERVER_KEY):
                    ring._read()
                    for name in names:
                        ring._add(name)
        except OSError as error:
            raise ConfigError(f"the keys in {folder} cannot be written: {error.strerror}") from None
        return ring

    @classmethod
    def adopt(cls, folder: Path, secret: bytes, allowed: Mapping[str, bytes], certificate: bytes) -> "KeyRing":
        """Return the ring of a node that serves instead of another: with its own key, and the other one's list.

        ``certificate``: that of the run, which its members have already.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(folder / SERVER_KEY, _text(secret))
            write_private(folder / ALLOWED, "".join(f"{name} {_text(public)}\n" for name, public in allowed.items()))
            write_private(folder / CERTIFICATE, certificate.decode())
        except OSError as error:
            raise ConfigError(f"the keys in {folder} cannot be written: {error.strerror}") from None
        return cls(folder)

    @property
    def certificate(self) -> bytes:
        """The certificate of the run that an adopted ring serves; empty for any other, which derives it."""
        path = self.folder / CERTIFICATE
        return f"{read_private(path)}\n".encode() if path.exists() else b""

    def _has(self, name: str) -> bool:
        there = token_path(name, self.folder).exists() or self.certificate  # an adopted ring has no tokens
        return name in self._names.values() and bool(there)

    def _add(self, name: str) -> None:
        if self._has(name):
            return
        path = token_path(name, self.folder)
        public, secret = new_key_pair()
        lines = [f"{n} {_text(p)}\n" for p, n in self._names.items() if n != name]
        write_private(path, f"{_PREFIX}:{name}:{_text(self.public + secret)}")
        write_private(self._allowed_path, "".join([*lines, f"{name} {_text(public)}\n"]))
        self._read()

    def token(self, name: str) -> str:
        """Return a token as text.

        Raises:
            ConfigError: there is no token of this name.
        """
        return read_private(token_path(name, self.folder))

    def listed(self) -> dict[str, bytes]:
        """Return the names and public keys in the file ``allowed``, as of the last look at it."""
        return {name: public for public, name in self._names.items()}

    def allowed(self, public: bytes) -> str:
        """Return the name of a key that may connect according to the file ``allowed``; empty for any other key.

        A file that cannot be used (with a half-written line, for example) changes nothing; :attr:`trouble` says why.
        """
        try:
            self._read()
            self.trouble = ""
        except ConfigError as error:
            self.trouble = f"{error}; until then only the keys from before may connect"
        return self._names.get(public, "")

    def _read(self) -> None:
        try:
            _refuse_writable(self.folder, "700")
            _refuse_writable(self._allowed_path, "600")
            status = self._allowed_path.stat()
            if (stamp := (status.st_mtime_ns, status.st_ino, status.st_size)) == self._read_at:
                return
            lines = self._allowed_path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the list of keys {self._allowed_path} cannot be read: {error}") from None
        names = {}
        for number, line in enumerate(lines, start=1):
            name, _, key = line.partition("#")[0].strip().partition(" ")
            if not name:
                continue
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{self._allowed_path}:{number}: {name!r} is not a name such as node1")
            names[_key(key, self._allowed_path)] = name
        self._names, self._read_at = names, stamp


def parse_token(text: str, origin: str) -> ConnectorKeys:
    """Return the keys in a token.

    Raises:
        ConfigError: it is not a token; the message names ``origin``, and does not show the text.
    """
    prefix, _, rest = text.strip().partition(":")
    name, _, body = rest.partition(":")
    try:
        keys = base64.urlsafe_b64decode(body + "==")
    except ValueError:
        keys = b""
    if prefix != _PREFIX or not _NAME.fullmatch(name) or len(keys) != 2 * KEY_NBYTES:
        raise ConfigError(
            f"{origin} does not contain a token; `lsgd keygen` makes one, a line that begins {_PREFIX}:node1:..."
        )
    secret = keys[KEY_NBYTES:]
    return ConnectorKeys(name, keys[:KEY_NBYTES], public_key(secret), secret)


def listener_keys(address: str, folder: Path | None, *, insecure: bool) -> KeyRing | None:
    """Return the keys that a listener on ``address`` needs; None if it needs none, or with ``insecure``.

    ``folder``: of a key ring to use for any address; None: the default one, if keys are needed.

    Raises:
        ConfigError: others can reach the address and there are no keys; the message has the line to type.
    """
    if folder is None:
        if is_local(address) or insecure:
            return None
        folder = default_folder()
        if not is_there(folder / SERVER_KEY):
            raise ConfigError(
                f"other machines can reach {address}, and without keys any of them can join the run or end it; make "
                f"keys with `lsgd keygen --nodes N`, or give --insecure if you trust everybody on the network"
            )
    return KeyRing(folder)


def connector_keys(
    address: str, path: Path | None, name: str, *, insecure: bool, run_folder: Path | None = None
) -> ConnectorKeys | None:
    """Return the keys that a connection to ``address`` needs; None if it needs none, or with ``insecure``.

    ``path``: of a token to use for any address; None: ``LSGD_TOKEN``, else the file in the default key ring, else the
    key with which a node serves the run in ``run_folder``, or the token with which one has joined it
    (:func:`kept_token`), if keys are needed. ``name``: of the node or operator that connects.

    Raises:
        ConfigError: the address is another machine's and there is no token, or the token is another node's.
    """
    if path is None:
        if is_local(address) or insecure:
            return None
        if text := os.environ.get(TOKEN_VARIABLE):
            return _of(parse_token(text, f"the variable {TOKEN_VARIABLE}"), name)
        path = token_path(name)
        if not is_there(path):
            if run_folder is not None and (ring := _adopted_ring(run_folder)):
                return ConnectorKeys(ring.folder.name.removesuffix(_RING), ring.public, ring.public, ring.secret)
            if run_folder is not None and (kept := [*run_folder.glob(f"node*{_JOINED}")]):
                return connector_keys(address, max(kept, key=_written_ns), name, insecure=False)
            there = "type this on node 0, which has one, or " if name == OPERATOR else ""
            raise ConfigError(
                f"{address} is on the network, so a token is needed: {there}make it on node 0 with `lsgd keygen`, copy "
                f"the file {name}.token here and give --token FILE, or put its text into {TOKEN_VARIABLE} (or give "
                f"--insecure, here and to the server)"
            )
    return _of(parse_token(read_private(path), f"the token {path}"), name)


@contextlib.contextmanager
def kept_token(node: int, run_folder: Path, *, joins: bool) -> Iterator[None]:
    """Keep the token with which a node joins in its run folder inside the context.

    ``lsgd status`` is typed where the variable is not. One that a killed launcher has left goes, also where none is
    needed (``joins`` is false).
    """
    path = run_folder / f"{node_name(node)}{_JOINED}"
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    try:
        if joins:
            text = os.environ.get(TOKEN_VARIABLE) or read_private(token_path(node_name(node)))
            with contextlib.suppress(OSError):  # a full disk
                write_private(path, text)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _written_ns(path: Path) -> int:
    with contextlib.suppress(OSError):  # its launcher has just ended
        return path.stat().st_mtime_ns
    return 0


def _adopted_ring(run_folder: Path) -> KeyRing | None:
    """Return the ring with which a node of this machine serves the run in a folder, or did; None: none has."""
    folders = [folder for folder in run_folder.glob(f"node*{_RING}") if is_there(folder / SERVER_KEY)]
    return KeyRing(folders[0]) if folders else None


def _of(keys: ConnectorKeys, name: str) -> ConnectorKeys:
    if keys.name != name and name != OPERATOR:
        raise ConfigError(f"this is {name}, but the token is that of {keys.name}; use {name}'s")
    return keys


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address: ipc, or a loopback one."""
    if not address.startswith("tcp://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host in ("*", ""):
        return False
    try:
        found = addresses_of(host)
    except OSError:
        return False  # binding or connecting reports it with more detail
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)


def is_there(path: Path) -> bool:
    """Return whether a file exists, or may: where this user may not look, reading it says so."""
    try:
        path.stat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)
    return True


def _text(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


def _key(text: str, path: Path) -> bytes:
    with contextlib.suppress(ValueError):
        if len(key := base64.urlsafe_b64decode(text.strip() + "=")) == KEY_NBYTES:
            return key
    raise ConfigError(f"{path} is damaged: {text.strip()[:8]!r}... is not a key")


def read_private(path: Path) -> str:
    """Return the text of a file that nobody else may read."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `lsgd keygen --keys {path.parent}` makes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if mode & 0o077:
        raise ConfigError(f"others can read {path}; make it private: chmod 600 {path}")
    return text


def _refuse_writable(path: Path, mode: str) -> None:
    """Refuse a path that others can write, because they could let anybody in."""
    if path.stat().st_mode & 0o022:
        raise ConfigError(
            f"others can write {path}, and so let anybody into the run; make it private: chmod {mode} {path}"
        )


@contextlib.contextmanager
def _alone(key: Path) -> Iterator[None]:
    """Let one process at a time change the ring of this key: of two, each would drop the names that the other adds."""
    with key.open("r+b") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_private(path: Path, text: str, *, replace: bool = True) -> None:
    """Write a private file, whole or not at all; an existing one stays unless ``replace``."""
    number, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(number, "w") as stream:
            stream.write(f"{text}\n" if text and not text.endswith("\n") else text)
        if replace:
            os.replace(name, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
