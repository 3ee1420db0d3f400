"""Both servers of a script that runs alone: ``python -m lsgd.client.control.servers FOLDER PID``.

They must not outlive the script, even if it is killed. So this process stands between: it ends when its parent is gone,
and however it ends, the kernel kills the servers (``PR_SET_PDEATHSIG``).
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from lsgd.client.control.notices import Notice, give
from lsgd.protocol.socket_folder import GLOBAL_SOCKET_NAME, SOCKET_NAME

LOOK_EVERY_S = 0.2
"""How often this process checks that its parent is alive, in seconds."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_WAKING = (signal.SIGTERM, signal.SIGCHLD)
_LIBC = ctypes.CDLL(None)


def serve(folder: Path, parent: int) -> None:
    """Run the servers until SIGTERM or the end of ``parent``; then delete ``folder``, which has their sockets."""
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
    """Tell the worker that no more answers will come, as the launcher does."""
    if any(codes):
        give(address, Notice.GIVEN_UP)
    elif 0 in codes:
        give(address, Notice.OVER)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
