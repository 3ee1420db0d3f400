"""What is kept of machines that have paired: in ``peers``, beside the folder of keys, for this user only.

``me-HOST`` has this machine's identity; each other file is a machine's: its name, and the secret that the two share.
"""

import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from lsgd.errors import ConfigError
from lsgd.protocol.keys import default_folder, read_private, write_private

_OWN = "me-"
_IDENTITY_NBYTES = 8


@dataclass(frozen=True)
class Peer:
    """A machine that has paired with this one."""

    identity: str
    name: str
    secret: bytes


class Peers:
    """The machines that have paired with this one.

    Raises:
        ConfigError: the folder cannot be read or written, or others can read it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder().parent / "peers"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"{_OWN}{socket.gethostname()}"
            if not path.exists():
                write_private(path, secrets.token_hex(_IDENTITY_NBYTES), replace=False)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}; set XDG_CONFIG_HOME") from None
        self.identity = read_private(path)

    def secret_of(self, identity: str) -> bytes:
        """Return what this machine shares with another one; empty: they have not paired."""
        found = self.known().get(identity)
        return found.secret if found else b""

    def keep(self, peer: Peer) -> None:
        """Keep a machine that has just paired."""
        text = json.dumps({"name": peer.name, "secret": peer.secret.hex()})
        try:
            write_private(self._path(peer.identity), text)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}") from None

    def forget(self, peer: Peer) -> None:
        """Forget a machine: it needs a code again."""
        self._path(peer.identity).unlink(missing_ok=True)

    def known(self) -> dict[str, Peer]:
        """Return the machines by identity; a damaged file counts as none, so that a code mends it."""
        found = {}
        for path in self.folder.glob("*.peer"):
            try:
                kept = json.loads(read_private(path))
                found[path.stem] = Peer(path.stem, str(kept["name"]), bytes.fromhex(kept["secret"]))
            except (ValueError, LookupError, TypeError):
                continue
        return found

    def _path(self, identity: str) -> Path:
        if not (identity.isalnum() and identity.isascii()):
            raise ConfigError(f"{identity!r} is no identity of a machine")
        return self.folder / f"{identity}.peer"
