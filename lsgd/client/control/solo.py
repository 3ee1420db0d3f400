"""A script that was started without servers runs alone, as one worker. Threads of its process serve the run."""

import errno
import logging
import secrets
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from lsgd.client.control.identity import INDEX_VARIABLES, Identity
from lsgd.errors import ConfigError
from lsgd.plan.plan import read
from lsgd.plan.run import RunSettings
from lsgd.protocol.sockets import Connector, Listener, default_local_address
from lsgd.run_folder import runs, stage_name, stage_of

logger = logging.getLogger("lsgd")

END_WITHIN_S = 10.0
"""How long the servers may take to end, in seconds."""


class Solo:
    """This process's own two servers, as threads, until :meth:`close`. No other process can reach them.

    Args:
        environ: this process's variables, which may also set the plan.
        identity: the worker's.

    Raises:
        ConfigError: a setting of the plan is wrong.
    """

    def __init__(self, environ: Mapping[str, str], identity: Identity) -> None:
        from lsgd.node.candidates import Candidates, Knock, dial  # only where a script runs alone
        from lsgd.node.local_server import LocalServer
        from lsgd.server.coordinator import Coordinator
        from lsgd.server.daemon import Ending, silence
        from lsgd.server.global_daemon import GlobalDaemon
        from lsgd.server.journal import new_run, open_run

        path = environ.get("LSGD_PLAN")
        plan = read(Path(path) if path else None, environ, {}).plan
        _say(plan.run)
        token = secrets.token_hex(8)
        above, self.address = f"inproc://lsgd-global-{token}", f"inproc://lsgd-local-{token}"
        self._open = ExitStack()
        listener = self._open.enter_context(Listener(above))
        workers = self._open.enter_context(Listener(self.address))
        link = self._open.enter_context(Connector(above, b"node0#1"))
        saved = runs(identity.resume)[:1] if identity.resume else []
        run = stage_name(new_run(), max([identity.stage, *map(stage_of, saved)]))
        coordinator = Coordinator(open_run(replace(plan, run=replace(plan.run, workers=1)), None, run=run))
        self._endings = Ending(), Ending()
        candidates = Candidates(0, partial(dial, b"node0#1", None), Knock())  # nowhere: the servers end with the script
        local = LocalServer(0, 1, workers, link, candidates=candidates)
        both = GlobalDaemon(coordinator, listener, watches_memory=False).run, local.run

        def serve(run: Callable[[Ending], int], ending: Ending) -> None:
            silence()
            run(ending)

        self._threads = [
            threading.Thread(target=serve, args=served, name="lsgd-server", daemon=True)
            for served in zip(both, self._endings, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the servers."""
        for ending in self._endings * 2:  # the second time, it ends at once
            ending.ask("its script's end")
        for thread in self._threads:
            thread.join(END_WITHIN_S)
        self._open.close()


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
    return bool(solo) or not (any(name in environ for name in INDEX_VARIABLES) or listens(default_local_address()))


def launch_line() -> str:
    """Return the command that starts this script with servers."""
    script = sys.argv if sys.argv[0].endswith(".py") else ["my_script.py"]
    return f"lsgd launch -- python {shlex.join(script)}"


def listens(address: str) -> bool:
    """Return whether a process listens at a Unix socket, ``ipc://path``, even one that accepts no connection now."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.setblocking(False)
        return probe.connect_ex(address.removeprefix("ipc://")) in (0, errno.EAGAIN)
    return False


def _say(run: RunSettings) -> None:
    number = f" (its plan's workers = {run.workers} is ignored)" if run.workers > 1 else ""
    end = (
        "; its plan has no iterations or seconds, so it ends with its loop, or by Ctrl-C without saving: "
        "LSGD_ITERATIONS=N sets an end"
    )
    logger.warning(
        "no server found: this script runs alone, as one worker%s; to run with others: %s%s",
        *(number, launch_line(), "" if run.has_end else end),
    )
