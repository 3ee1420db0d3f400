"""What the launcher and its workers tell each other where no server can: empty files beside the local one's socket."""

import enum
from contextlib import suppress
from pathlib import Path

_IPC = "ipc://"


class Notice(enum.Enum):
    """A file's ending, and what it says."""

    OVER = "over"
    """The servers of this node have ended as they should, for good."""

    GIVEN_UP = "given-up"
    """The launcher ends this node, and no server can say so: workers are to save what they have, and to leave."""

    JOINED = "joined"
    """A worker has asked to join."""

    ENDED = "ended"
    """A worker has heard that the run ends, or has left it as it should."""


def give(address: str, notice: Notice, worker: str = "") -> None:
    """Tell the workers of the local server at ``address``, who look while they wait; or as ``worker`` the launcher."""
    if address.startswith(_IPC):
        with suppress(OSError):
            _path(address, notice, worker).touch()


def is_given(address: str, notice: Notice, worker: str = "") -> bool:
    """Whether the launcher has said so to the workers of the local server at ``address``, or ``worker`` to it."""
    return address.startswith(_IPC) and _path(address, notice, worker).exists()


def _path(address: str, notice: Notice, worker: str) -> Path:
    return Path(f"{address.removeprefix(_IPC)}{worker.replace('/', '-')}.{notice.value}")
