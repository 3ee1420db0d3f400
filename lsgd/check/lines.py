"""Which line of the script is at work: the recorder names it with all that it notes."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lsgd.script_lines import path_of


def line_of(frame: FrameType) -> str:
    """Return ``path:line`` of a frame of the script; empty if it is another's."""
    path = path_of(frame.f_code.co_filename)
    return f"{path}:{frame.f_lineno}" if path else ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if path_of(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def here(frame: FrameType | None = None) -> str:
    """Return ``path:line`` of the innermost line of the script in this thread, or below a frame; empty: none is."""
    return next(map(line_of, _frames(frame or sys._getframe(1))), "")


class Tracer:
    """Calls a function after each line of the script, with the line that was just carried out.

    Args:
        after: takes ``path:line``.
    """

    def __init__(self, after: Callable[[str], None]) -> None:
        self._after = after
        self._last = ""

    def start(self) -> None:
        """Begin, in the frames that are under way, too."""
        frame = sys._getframe(1)
        sys.settrace(self._called)
        for each in _frames(frame):
            each.f_trace = self._stepped
        self._last = here(frame)
        os.register_at_fork(after_in_child=functools.partial(sys.settrace, None))

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._stepped if path_of(frame.f_code.co_filename) else None

    def _stepped(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            if self._last:
                self._after(self._last)
            caller = frame.f_back
            self._last = line_of(frame) if event == "line" else line_of(caller) if caller is not None else ""
        return self._stepped
