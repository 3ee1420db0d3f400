"""What is told of a worker's doings: nobody, unless ``lsgd check`` has started the script, and its recorder listens."""

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

FOLDER_VARIABLE = "LSGD_CHECK"
"""Folder into which the recorder of ``lsgd check`` writes; without it nobody listens."""

P = ParamSpec("P")
R = TypeVar("R")


class Observer:
    """Listens to a worker. This one does nothing."""

    def joined(self, worker: Any, model: Any, optimizers: Any) -> None:
        """Hear that a worker has joined a run with this model and these optimizers."""

    def calling(self, name: str) -> AbstractContextManager[None]:
        """Hear that the block carries out a call of the script, such as ``mean``."""
        return nullcontext()

    def reads(self, name: str) -> None:
        """Hear that the script, or lsgd, reads a property of the worker."""

    def exchanging(self) -> AbstractContextManager[None]:
        """Hear that the block is a part of a round, which may change the model."""
        return nullcontext()


_listening = Observer()


def observer() -> Observer:
    """Return who listens."""
    return _listening


def listen_if_asked() -> None:
    """Let the recorder listen from now on, if ``lsgd check`` has started this process."""
    global _listening
    if (folder := os.environ.get(FOLDER_VARIABLE)) and type(_listening) is Observer:
        _listening = importlib.import_module("lsgd.check.recorder").start(folder)


def observed(call: Callable[P, R]) -> Callable[P, R]:
    """Return a method of the worker that tells who listens of each call."""

    @functools.wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        with _listening.calling(call.__name__):
            return call(*args, **kwargs)

    return told
