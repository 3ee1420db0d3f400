"""What the launcher tells its workers where no server can: empty files beside the local server's socket."""

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


def give(address: str, notice: Notice) -> None:
    """Tell the workers of the local server at ``address``; they look at it while they wait for an answer."""
    if address.startswith(_IPC):
        with suppress(OSError):
            _path(address, notice).touch()


def is_given(address: str, notice: Notice) -> bool:
    """Whether the launcher has said so to the workers of the local server at ``address``."""
    return address.startswith(_IPC) and _path(address, notice).exists()


def _path(address: str, notice: Notice) -> Path:
    return Path(f"{address.removeprefix(_IPC)}.{notice.value}")
