"""The Python environments that baselines run in: torchft and hivemind may have one each."""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option that names the environments of baselines."""
    parser.add_argument(
        "--baseline-python",
        nargs="+",
        default=[],
        metavar="LIBRARY=PYTHON",
        help="the interpreter of an environment that has torchft or hivemind, with torch and scikit-learn",
    )


def interpreters_of(methods: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the Python that each method runs in, without the baselines whose library is not installed.

    Args:
        methods: their names.
        given: ``torchft=/path/to/python``, for libraries that have environments of their own.
    """
    found = {method: _interpreter_of(method, given) for method in methods}
    return {method: python for method, python in found.items() if python is not None}


def _interpreter_of(method: str, given: Sequence[str]) -> str | None:
    library = next((name for name in ("torchft", "hivemind") if method.startswith(name)), None)
    if library is None:
        return sys.executable
    for pair in given:
        name, _, path = pair.partition("=")
        if name == library:
            found = subprocess.run([path, "-c", f"import {library}"], capture_output=True, check=False)
            return path if found.returncode == 0 else None
    return sys.executable if importlib.util.find_spec(library) else None
