"""Watching a run: a reader of its stream of events, and the view of the run that follows from them."""

import importlib.util
import sys

from lsgd.errors import ConfigError


def require(what: str, extra: str, *modules: str) -> None:
    """Check that the modules that ``what`` needs, and that an extra installs, are there.

    Raises:
        ConfigError: one is missing; the message has the command to type.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}: {sys.executable} -m pip install 'lsgd[{extra}]'",
        )
