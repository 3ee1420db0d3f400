"""The folder of a node's sockets."""

import os
import tempfile
from pathlib import Path

from lsgd.errors import ConfigError

SOCKET_NAME = "local"
"""Name of the local server's socket in the folder."""

GLOBAL_SOCKET_NAME = "global"
"""Name of the global server's socket, if it serves only this machine."""

_MAX_SOCKET_PATH_NBYTES = 107


def socket_folder() -> Path:
    """Return a new folder that only this user can enter, with a name short enough for a socket in it.

    Raises:
        ConfigError: the folder cannot be created.
    """
    base = tempfile.gettempdir()
    if len(os.fsencode(f"{base}/lsgd-12345678/{SOCKET_NAME}")) > _MAX_SOCKET_PATH_NBYTES:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="lsgd-", dir=base))
    except OSError as error:
        raise ConfigError(
            f"cannot create a folder for this node's sockets in {base}: {error.strerror}; free space there, or "
            f"choose another folder with TMPDIR"
        ) from None
