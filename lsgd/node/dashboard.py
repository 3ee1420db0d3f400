"""The run's page during a launch: a process that ends with the launch, and that the run does not need."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lsgd.node.process import LSGD, first_words
from lsgd.node.screen import LAUNCHER

LOG = "dashboard.log"
STARTS_WITHIN_S, ENDS_WITHIN_S = 15.0, 5.0


@contextmanager
def dashboard(folder: Path, port: int | None, environ: Mapping[str, str], *, insecure: bool) -> Iterator[None]:
    """Run ``lsgd dashboard`` for the run in ``folder`` inside the context, and print its address.

    Args:
        folder: of the run, which this process has claimed.
        port: of the page; 0: the default port, or else any free one; None: no page.
        environ: environment of the process.
        insecure: the run uses no keys on the network.
    """
    if port is None:
        yield
        return
    command = [*LSGD, "dashboard", "--run", str(folder), "--parent", str(os.getpid())]
    command += ["--port", str(port)] * (port > 0) + ["--insecure"] * insecure
    with (folder / LOG).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C at the terminal reaches the launcher alone
        )
    try:
        said = first_words(process, STARTS_WITHIN_S) or f"the dashboard does not start: see {folder / LOG}"
        print(f"{LAUNCHER}{said}", flush=True)
        yield
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(ENDS_WITHIN_S)
        assert process.stdout
        process.stdout.close()
