"""What the one worker that saves for all has written: its file in the run folder tells the other workers' callbacks."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lsgd.output import write_whole

NAME = "saved.json"
"""Name of the file in the run folder. It has null while its worker may save more."""

WITHIN_S, POLL_S = 120.0, 0.2
"""How long the others wait, at the end, for a worker that has begun to save."""


class Saved:
    """The paths that the worker that saves leaves to the others, which see them if they see its run folder.

    Args:
        folder: run folder of this worker; None: there is none, so nobody is told anything.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / NAME

    def forget(self) -> None:
        """Remove what an earlier training has left."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def tell(self, paths: Any) -> None:
        """Tell the others these paths, the last ones; None: that this worker saves, so that they wait for them."""
        if self._path is not None:
            with suppress(OSError):  # then they claim nothing
                write_whole(self._path, json.dumps(paths))

    def hear(self) -> Any:
        """Return the paths, once they are there; None: nobody has told them."""
        deadline_s = time.monotonic() + WITHIN_S
        while self._path is not None and time.monotonic() < deadline_s:
            try:
                paths = json.loads(self._path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            if paths is not None:
                return paths
            time.sleep(POLL_S)
        return None
