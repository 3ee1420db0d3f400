"""How a worker ends: undo what a failed join has done, and leave the run however the script ends."""

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NoReturn, Protocol

from lsgd.errors import JoinError, NoConsensusError, NonFiniteError, NotTrainedError, OutlierError, ServerLostError

logger = logging.getLogger("lsgd")

CodedError = ServerLostError | JoinError | NoConsensusError | NotTrainedError | NonFiniteError | OutlierError
"""The errors with an exit code of their own, which tells the launcher what to do, and need no traceback."""


def in_words(error: BaseException) -> str:
    """Return an error's text, and the notes that were added to it."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


@contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block raises anything."""
    try:
        yield
    except BaseException:
        undo()
        raise


class Leaver(Protocol):
    """What :func:`leave_on_errors` ends: a worker."""

    def fails(self, error: BaseException) -> None:
        """Leave the run, because of an error that nothing handles."""

    def at_exit(self) -> None:
        """Leave the run, because the script has ended."""

    def gives_way(self) -> None:
        """Leave the run if it has ended, because the script joins again."""


_leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()


def leave_on_errors(leaver: Leaver) -> None:
    """From now on, an error that nothing handles makes this worker leave, and sets the process's exit code."""
    _leavers.add(leaver)
    set_exit_codes()


def set_exit_codes() -> None:
    """From now on, an error that nothing handles, and that has an exit code, ends the process with it."""
    if not getattr(sys.excepthook, "leaves_run", False):
        sys.excepthook = _hook(sys.excepthook)


def _hook(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CodedError):
            show(kind, error, trace)
        end_script(error)
        if isinstance(error, CodedError):
            exit_for(error, "this process")

    hook.leaves_run = True  # type: ignore[attr-defined]
    return hook


def leave_ended() -> None:
    """Make workers of this process leave whose run has ended: their script joins again."""
    for leaver in list(_leavers):
        leaver.gives_way()


def end_script(error: BaseException | None) -> None:
    """Make this process's workers leave, because their script has ended, perhaps with an error."""
    for leaver in list(_leavers):
        with suppress(Exception):
            if error is None:
                leaver.at_exit()
            else:
                leaver.fails(error)


def exit_for(error: CodedError, who: str) -> NoReturn:
    """End the process with the exit code of an error; ``who`` is its worker."""
    logger.error("%s ends with exit code %d: %s", who, error.exit_code, in_words(error))
    raise SystemExit(error.exit_code) from error


def exit_at_once(error: CodedError, who: str) -> NoReturn:
    """End an interpreter that is already ending, and so can no longer choose its exit code."""
    logger.error("%s ends with exit code %d: %s", who, error.exit_code, in_words(error))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(error.exit_code)
