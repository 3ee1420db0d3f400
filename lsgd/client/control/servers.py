"""Both servers of one worker's run, which end with it: ``python -m lsgd.client.control.servers FOLDER PID``.

A process that is killed takes nothing with it by itself, so this one stands between: it sees that its parent is gone,
and the servers are killed with it (``PR_SET_PDEATHSIG``), however it ends.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from lsgd.client.control.folder import GLOBAL_SOCKET_NAME, SOCKET_NAME
from lsgd.client.control.notices import Notice, give

LOOK_EVERY_S = 0.2
"""How often this process looks whether its parent is alive."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_WAKING = (signal.SIGTERM, signal.SIGCHLD)
_LIBC = ctypes.CDLL(None)


def serve(folder: Path, parent: int) -> None:
    """Run the servers until SIGTERM or the end of ``parent``; then delete ``folder``, where their sockets are."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_WAKING, signal.SIGINT))
    above, address = f"ipc://{folder / GLOBAL_SOCKET_NAME}", f"ipc://{folder / SOCKET_NAME}"
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in (
            ("--global", "--listen", above, "--workers", "1"),
            ("--local", "--listen", address, "--connect", above),
        ):
            command = [sys.executable, "-P", "-m", "lsgd.server", *arguments]
            servers.append(subprocess.Popen(command, preexec_fn=_end_with_parent))
        while os.getppid() == parent:
            woken = signal.sigtimedwait(_WAKING, LOOK_EVERY_S)
            if woken and woken.si_signo == signal.SIGTERM:
                return
            _tell(address, [server.poll() for server in servers])
    finally:
        for server in servers:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _tell(address: str, codes: list[int | None]) -> None:
    """Tell the worker that no answer will come any more, as the launcher does."""
    if any(codes):
        give(address, Notice.GIVEN_UP)
    elif 0 in codes:
        give(address, Notice.OVER)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
