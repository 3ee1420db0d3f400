"""The folder of a node's sockets."""

import os
import tempfile
from pathlib import Path

from lsgd.errors import ConfigError

SOCKET_NAME = "local"
"""Of the local server's, in the folder."""

GLOBAL_SOCKET_NAME = "global"
"""Of the global server's, where it serves this machine alone."""

_MAX_SOCKET_PATH_NBYTES = 107


def socket_folder() -> Path:
    """Return a new folder that only this user can enter, with a name short enough for a socket in it.

    Raises:
        ConfigError: it cannot be made.
    """
    base = tempfile.gettempdir()
    if len(os.fsencode(f"{base}/lsgd-12345678/{SOCKET_NAME}")) > _MAX_SOCKET_PATH_NBYTES:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="lsgd-", dir=base))
    except OSError as error:
        raise ConfigError(
            f"no folder for the sockets of this node can be made in {base}: {error.strerror}; free space there, or "
            f"name another folder with TMPDIR"
        ) from None
