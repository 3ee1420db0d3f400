"""What the launcher and its workers tell each other without a server: empty files beside the local server's socket."""

import enum
from contextlib import suppress
from pathlib import Path

_IPC = "ipc://"


class Notice(enum.Enum):
    """A file's ending, and what it says."""

    OVER = "over"
    """This node's servers have ended as they should, for good."""

    GIVEN_UP = "given-up"
    """The launcher ends this node, and no server can say so: workers must save what they have, and leave."""

    JOINED = "joined"
    """A worker has asked to join."""

    ENDED = "ended"
    """A worker has heard that the run ends, or has left it in order."""


def give(address: str, notice: Notice, worker: str = "") -> None:
    """Tell the workers of the local server at ``address``, which look while they wait; as ``worker``, the launcher."""
    if address.startswith(_IPC):
        with suppress(OSError):
            _path(address, notice, worker).touch()


def is_given(address: str, notice: Notice, worker: str = "") -> bool:
    """Whether the launcher has told the workers of the local server at ``address``; or ``worker`` the launcher."""
    return address.startswith(_IPC) and _path(address, notice, worker).exists()


def _path(address: str, notice: Notice, worker: str) -> Path:
    return Path(f"{address.removeprefix(_IPC)}{worker.replace('/', '-')}.{notice.value}")
