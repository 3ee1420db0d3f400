"""The folder of a node's sockets."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from lsgd.errors import ConfigError

SOCKET_NAME, ISLAND_NAME = "local", "island"
"""Names of sockets in the folder: the local server's, and that of an island's head."""

MAX_SOCKET_PATH_NBYTES = 107
"""The longest path of a socket, on Linux."""

_PREFIX = "lsgd."


def socket_folder(name: str = "") -> Path:
    """Return a folder that only this user can enter, with a name short enough for a socket in it.

    It is locked until this process ends. Those of processes that were killed are deleted.

    Args:
        name: eight characters by which a process finds the folder of the one whose place it takes; empty: a new one.

    Raises:
        ConfigError: the folder cannot be created, or is another user's.
    """
    base = tempfile.gettempdir()
    if len(os.fsencode(f"{base}/{_PREFIX}12345678/{ISLAND_NAME}")) > MAX_SOCKET_PATH_NBYTES:
        base = "/tmp"
    _sweep(Path(base))
    try:
        folder = Path(base, f"{_PREFIX}{name}") if name else Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create a folder for this node's sockets in {base}: {error.strerror}; free space there, or "
            f"choose another folder with TMPDIR"
        ) from None
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(f"{folder} is another user's; choose another folder for sockets with TMPDIR")
    _lock(folder)
    return folder


def _sweep(base: Path) -> None:
    """Delete the folders with sockets that nobody holds the lock of."""
    for folder in base.glob(f"{_PREFIX}????????"):
        with suppress(OSError):  # another user's
            if folder.lstat().st_uid != os.getuid() or not any(path.is_socket() for path in folder.iterdir()):
                continue
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Return a descriptor with the folder's lock; None if somebody else has it, or there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
