"""Which files are the user's script, and which of its lines a traceback ends in."""

import functools
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_OTHERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
    if folder
)
"""Folders whose files are no part of a script: Python's, those of installed packages, and lsgd's."""


@functools.cache
def path_of(filename: str) -> str:
    """Return the path of a file of the script; empty if it is another's."""
    if filename.startswith("<"):
        return ""
    path = os.path.realpath(filename)
    return "" if path.startswith(_OTHERS) or not path.endswith(".py") else path


def innermost(calls: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Return path and line of the script's innermost call among these, the outermost first; None: none is its own."""
    of_script = [(path_of(file), line) for file, line in calls if path_of(file)]
    return of_script[-1] if of_script else None


def in_words(calls: Iterable[tuple[str, int]]) -> str:
    """Return the same as the end of a sentence: ``, in line 20 of train.py``; empty: none is."""
    found = innermost(calls)
    return f", in line {found[1]} of {os.path.basename(found[0])}" if found else ""
