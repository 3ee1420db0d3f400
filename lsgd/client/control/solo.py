"""A script that was started without servers runs alone, as one worker, with its own servers."""

import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lsgd.client.control.closing import on_error
from lsgd.client.control.identity import INDEX_VARIABLES
from lsgd.client.control.notices import Notice, is_given
from lsgd.errors import ConfigError, JoinError
from lsgd.plan.plan import read
from lsgd.plan.run import RunSettings
from lsgd.protocol.socket_folder import GLOBAL_SOCKET_NAME, SOCKET_NAME, socket_folder
from lsgd.protocol.sockets import default_local_address

logger = logging.getLogger("lsgd")

START_WITHIN_S = 60.0
"""How long the servers may take to start, in seconds."""

END_WITHIN_S = 10.0
"""How long the servers may take to end, in seconds."""

_LOOK_EVERY_S = 0.01


class Solo:
    """This process's own two servers, until :meth:`close` or the end of the process, however it ends.

    Args:
        environ: this process's variables, which may also set the plan.

    Attributes:
        address: of the local server.

    Raises:
        ConfigError: a setting of the plan is wrong.
        JoinError: the servers cannot be started.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("LSGD_PLAN")
        _say(read(Path(path) if path else None, environ, {}).plan.run)
        folder = self._folder = socket_folder()
        self.address = f"ipc://{folder / SOCKET_NAME}"
        log = folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lsgd.client.control.servers", str(folder), str(os.getpid())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C at the terminal reaches the script alone
            )
        with on_error(self.close):
            self._wait(log)

    def _wait(self, log: Path) -> None:
        deadline_s = time.monotonic() + START_WITHIN_S
        while not all((self._folder / name).exists() for name in (SOCKET_NAME, GLOBAL_SOCKET_NAME)):
            failed = self._process.poll() is not None or is_given(self.address, Notice.GIVEN_UP)
            if failed or time.monotonic() > deadline_s:
                lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
                raise JoinError(
                    f"this script's own servers do not start: {' '.join(lines[-3:]) or 'no output'}; "
                    f"start it with: {launch_line()}"
                )
            time.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """End the servers."""
        self._process.terminate()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_alone(environ: Mapping[str, str]) -> bool:
    """Whether this process should run alone: no variable or socket shows a server or other processes.

    Raises:
        ConfigError: the variable ``LSGD_SOLO`` is wrong.
    """
    solo = environ.get("LSGD_SOLO", "")
    if solo not in ("", "0", "1"):
        raise ConfigError(f"the variable LSGD_SOLO = {solo!r} is neither 1 (run alone) nor 0 (never do)")
    if solo == "0" or environ.get("LSGD_LOCAL"):
        return False
    return bool(solo) or not (any(name in environ for name in INDEX_VARIABLES) or _listens(default_local_address()))


def launch_line() -> str:
    """Return the command that starts this script with servers."""
    script = sys.argv if sys.argv[0].endswith(".py") else ["my_script.py"]
    return f"lsgd launch -- python {shlex.join(script)}"


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(address.removeprefix("ipc://"))
        return True
    return False


def _say(run: RunSettings) -> None:
    number = f" (its plan's workers = {run.workers} is ignored)" if run.workers > 1 else ""
    end = "; its plan has no iterations or seconds, so it ends with its loop or Ctrl-C: LSGD_ITERATIONS=N sets an end"
    logger.warning(
        "no server found: this script runs alone, as one worker%s; to run with others: %s%s",
        *(number, launch_line(), "" if run.iterations or run.seconds else end),
    )
