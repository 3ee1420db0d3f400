"""Starts and ends the processes of one worker: ``python -m lsgd.node.island DEVICES -- COMMAND``.

Each process gets torchrun's variables: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``,
``MASTER_ADDR`` and ``MASTER_PORT``. It inherits the variables that say which worker it is. If one process fails, the
others cannot continue: they are ended, and this process ends with the same status.
"""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from lsgd.errors import EvictedError
from lsgd.node.process import cannot_start
from lsgd.protocol.ports import everywhere, hold, port_of
from lsgd.server.daemon import Signals

OTHERS_WITHIN_S = 15.0
"""How long the others have to end after one has failed: they save what they have, or notice its end."""

LOOK_EVERY_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Run a command once for each device; return the exit code, or die of the signal that killed one."""
    devices, _, *command = arguments
    with hold(everywhere()) as held:  # until all have ended; the store of the first one listens there
        return _run(devices, command, port_of(held))


def _run(devices: str, command: Sequence[str], port: int) -> int:
    names = devices.split(",")
    shared = {
        "WORLD_SIZE": str(len(names)),
        "LOCAL_WORLD_SIZE": str(len(names)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LSGD_ISLAND": str(len(names)),
    }
    try:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LSGD_DEVICE": device},
            )
            for rank, device in enumerate(names)
        ]
    except OSError as error:  # the launcher ends those that were started: they are of this process's group
        print(cannot_start(command[0], error), file=sys.stderr)
        return 1
    signals = Signals(signal.SIGHUP, signal.SIGCHLD)  # only now: the processes inherit which signals are ignored
    status = _wait(processes, signals)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _wait(processes: Sequence[subprocess.Popen[bytes]], signals: Signals) -> int:
    """Wait for all processes; return the status of the first that fails, or 0.

    If one is killed, the others may notice and end as evicted before its status is known: its own counts.
    """
    failed, ended = 0, set[subprocess.Popen[bytes]]()
    deadline_s = float("inf")
    while running := [process for process in processes if process.poll() is None]:
        if not failed and (failed := next((p.returncode for p in processes if p.returncode), 0)):
            # A process that was killed or evicted saves nothing, and without it neither can the others.
            saves = failed > 0 and failed != EvictedError.exit_code
            deadline_s = time.monotonic() + (OTHERS_WITHIN_S if saves else 0.0)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            ended |= {*running}
            for process in running:
                with suppress(ProcessLookupError):
                    process.kill()
            left_s = 1.0
        select.select([signals.wakeup], [], [], min(left_s, LOOK_EVERY_S))
        signals.wakeup.clear()
        received, signals.received = signals.received, []
        if set(received) - {"SIGCHLD"}:
            deadline_s = float("inf")  # the launcher ends the whole group, in its own time
    statuses = [p.returncode for p in processes if p not in ended or p.returncode != -signal.SIGKILL]
    failed = failed or next(filter(None, statuses), 0)
    return next((s for s in statuses if s < 0), failed) if failed == EvictedError.exit_code else failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
