"""What a person wants to be told of a run that nobody looks at; the process of ``lsgd alert``."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lsgd.means import mean_of_finite
from lsgd.output import detail
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.server.daemon import Signals
from lsgd.watch.reader import Reader
from lsgd.watch.to_end import to_end
from lsgd.watch.view import TAKES_PART, RunView

FLAT_OVER = 128
"""After how many global rounds that are no lower than as many before them a loss is flat."""

LOW_NBYTES = 1_000_000_000
"""With less free, a disk is nearly full."""

SILENT_S = 30.0
"""How long the global server may be silent."""

TELL_WITHIN_S = 30.0
"""How long a command or a web server may take."""

LOOK_EVERY_S = 10.0

LOG, _OF_RUN = "alert.log", "alerts of run "
"""The file of what ``lsgd launch --alert`` has told, and how the lines about a run begin in it."""


@dataclass(frozen=True)
class Alert:
    """Something that a person should know.

    Args:
        code: for programs: ``rounds.fail``, ``worker.straggler``, ``loss.flat``, ``run.over``, ...
        words: for people, one sentence.
    """

    code: str
    words: str


@dataclass(frozen=True)
class Facts:
    """What the run's events do not say: for how long its server is silent, and how much space the disk has."""

    silent_s: float = 0.0
    free_nbytes: float = float("inf")


class Alerts:
    """Says each alert once: of a worker, once for each state; of a server that was silent, again if it is so again.

    ``told``: what a process before this one has said of the same run, as :func:`line_of` returns it.
    """

    def __init__(self, told: Collection[str] = ()) -> None:
        self._told = told
        self._said = set[tuple[str, str]]()

    def new(self, run: RunView, facts: Facts | None = None) -> Iterator[Alert]:
        """Yield what has not been said yet."""
        facts = facts or Facts()
        found = dict(_found(run, facts))
        if not facts.silent_s:
            self._said.discard(("server.silent", ""))
        for (code, subject), words in found.items():
            if (code, subject) not in self._said:
                self._said.add((code, subject))
                if line_of(alert := Alert(code, words)) not in self._told:
                    yield alert


def _found(run: RunView, facts: Facts) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield all that is the case: a code with what it is of, and the words."""
    if run.now.state == "over":
        yield ("run.over", run.now.run), f"the run is over after {run.now.count} iterations: {run.now.reason}"
        return
    ended = [each for each in run.rounds if each.state != "open"][-2:]
    if len(ended) == 2 and all(each.state == "failed" for each in ended):
        yield ("rounds.fail", ""), f"two rounds in a row have failed, the last because {ended[-1].reason}"
    for worker in run.workers.values():
        if worker.state not in TAKES_PART and worker.reason and run.now.state == "running":
            is_so = "has left" if worker.state == "left" else f"is {worker.state}"
            yield (f"worker.{worker.state}", worker.worker), f"{worker.worker} {is_so}: {worker.reason}"
        if worker.lost_its_loss:
            yield ("loss.nan", worker.worker), f"the loss of {worker.worker} is no number any more"
    if (flat := _flat(run)) is not None:
        before, last = flat
        yield (
            ("loss.flat", ""),
            f"the loss has not fallen for {FLAT_OVER} rounds: it was {before:.4g}, and is {last:.4g}",
        )
    if facts.silent_s > SILENT_S:
        yield ("server.silent", ""), f"the global server has not answered for {facts.silent_s:.0f} s"
    if facts.free_nbytes < LOW_NBYTES:
        yield ("disk.low", ""), f"the disk of the run's folder has {facts.free_nbytes / 1e6:.0f} MB left"


def _flat(run: RunView) -> tuple[float, float] | None:
    """Return the lowest losses before and in the last rounds, if the later is no lower."""
    of_rounds = (mean_of_finite(loss for loss in each.losses.values() if loss is not None) for each in run.rounds)
    losses = [loss for loss in of_rounds if loss is not None]
    if len(losses) < 2 * FLAT_OVER:
        return None
    before, last = min(losses[-2 * FLAT_OVER : -FLAT_OVER]), min(losses[-FLAT_OVER:])
    return (before, last) if last >= before else None


def line_of(alert: Alert) -> str:
    """Return the line about an alert in the log."""
    return f"{alert.code}: {alert.words}"


def _told(log: Path, run: str) -> Collection[str]:
    """Return the lines about a run in the log of alerts that the launcher writes."""
    lines, is_ours = set[str](), False
    with suppress(OSError):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(_OF_RUN):
                is_ours = line == f"{_OF_RUN}{run}"
                continue
            lines |= {line} if is_ours else set()
    return lines


def watch(address: str, keys: ConnectorKeys | None, to: str, run_dir: Path, say: Callable[[str], object]) -> None:
    """Tell of the run that is served at an address until it is over, or a signal comes.

    ``to``: as in :func:`tell`. ``run_dir``: folder of the run. ``say``: prints what was told, too.

    Raises:
        JoinError: as :func:`lsgd.watch.to_end.to_end` does.
    """
    alerts: Alerts | None = None
    run, signals, heard_at, looked_at = RunView(), Signals(), time.monotonic(), 0.0

    def see(alerts: Alerts, facts: Facts) -> None:
        for alert in alerts.new(run, facts):
            say(line_of(alert))
            if trouble := tell(to, alert, run.now.run, run_dir):
                say(f"the alert {alert.code} could not be sent: {trouble}")

    try:
        with Reader(address, keys) as reader:
            for batch in to_end(reader, run, run_dir, signals):
                run.apply(batch)
                now = time.monotonic()
                heard_at = now if batch.connected else heard_at
                if run.now.run and not batch.more and (run.now.state == "over" or now - looked_at > LOOK_EVERY_S):
                    looked_at = now
                    if alerts is None:
                        alerts = Alerts(_told(run_dir / LOG, run.now.run))
                        say(detail(f"{_OF_RUN}{run.now.run}"))
                    see(alerts, Facts(now - heard_at, shutil.disk_usage(run_dir).free))
    finally:
        signals.restore()


def tell(to: str, alert: Alert, run: str, run_dir: Path) -> str:
    """Tell somebody; return why it failed, or nothing.

    ``to`` is an address that begins with ``http``, which gets a JSON object with ``code``, ``text``, ``run`` and
    ``folder`` by POST (chat programs show ``text``); or a command, which finds the same in the variables
    ``LSGD_ALERT_CODE``, ``LSGD_ALERT``, ``LSGD_ALERT_RUN`` and ``LSGD_ALERT_FOLDER``.
    """
    if to.startswith(("http://", "https://")):
        from urllib.request import Request, urlopen  # 7 ms that no other command needs

        about = {"code": alert.code, "text": f"lsgd, {run_dir.name}: {alert.words}", "run": run, "folder": str(run_dir)}
        request = Request(to, json.dumps(about).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=TELL_WITHIN_S):
                return ""
        except (OSError, ValueError) as error:
            return str(error)
    about = {"CODE": alert.code, "RUN": run, "FOLDER": str(run_dir)}
    variables = {"LSGD_ALERT": alert.words} | {f"LSGD_ALERT_{name}": value for name, value in about.items()}
    try:
        done = subprocess.run(
            to, shell=True, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, timeout=TELL_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return f"it has not ended within {TELL_WITHIN_S:g} s"
    return f"it ended with exit code {done.returncode}" if done.returncode else ""
