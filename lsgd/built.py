"""What this lsgd was built from, and what it runs with."""

import platform
from importlib.metadata import PackageNotFoundError, version

from lsgd import __version__

COMMIT = "$Format:%h of %cs$"
"""The commit that a release was built from, and its day; git archive writes it here."""


def described() -> str:
    """Return the version, the commit that it was built from, and what it runs with."""
    origin = "a checkout" if COMMIT.startswith("$") else f"commit {COMMIT}"
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    return f"{__version__} ({origin}), Python {platform.python_version()}, {torch}"
