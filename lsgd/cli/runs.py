"""``lsgd runs``: lists the runs in a folder, from the files in each run folder."""

import textwrap
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from lsgd.run_folder import ENDED, RESULT, followed, inside, is_live
from lsgd.watch.results import ended, read
from lsgd.watch.terminal import duration

_HEADER = ("run", "state", "algorithm", "iterations", "loss", "time", "started")
_RIGHT = ("iterations", "loss", "time")


def find_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the ``result.json`` of each run in ``folder``, or of ``folder`` itself; newest first.

    It adds ``folder`` and the actual ``state``: finished, stopped, failed, running (somebody holds the folder's lock),
    or unknown (a run without a launcher, or a machine that is not node 0).
    """
    paths = (folder, *inside(folder, "*/"))
    folders = [path for path in paths if any(inside(path, "node*.lock")) or "run" in read(path)]
    return [_run(path) for path in sorted(folders, key=lambda path: (_started(path), str(path)), reverse=True)]


def _run(folder: Path) -> dict[str, Any]:
    result = read(folder)
    if is_live(folder):
        result["state"] = "running"
    elif result.get("state") == "over":
        result["state"] = ended(result)
    elif result.get("state") not in ENDED:
        result["state"], result["reason"] = _without_end(folder)
    started = datetime.fromtimestamp(_started(folder)).astimezone().isoformat(timespec="seconds")
    return {"folder": str(folder), "started": started, **result}


def _without_end(folder: Path) -> tuple[str, str]:
    """Return the state, and the reason, of a run that is over and whose end is not in its folder."""
    if (place := followed(folder, 0)) and place.node:
        return "unknown", f"its results are on node {place.node}, which served it last"
    if (folder / "node0.lock").exists():
        return "failed", f"its launcher was killed; the logs are in {folder}"
    if any(folder.glob("node*.lock")):
        return "unknown", "its results are on node 0"
    return "unknown", "it has no launcher: ask its global server with lsgd status --connect HOST:PORT"


def _started(folder: Path) -> float:
    """Return when a run was launched: the time of its lock."""
    paths = [*folder.glob("node*.lock")] or [folder / RESULT]
    return max(path.stat().st_mtime for path in paths)


def view(found: list[dict[str, Any]], columns: int) -> list[str]:
    """Return runs as a table of lines no longer than ``columns``, with the reasons of those that did not finish."""
    rows = [_HEADER, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, least in ((2, 9), (0, 15), (6, 5)):  # the algorithm's name is shortened first, then the run's, the date
        over = sum(widths) + 2 * (len(widths) - 1) - columns
        widths[index] -= min(max(0, over), max(0, widths[index] - least))
    lines = []
    for row, run in zip(rows, [{}, *found], strict=True):
        cells = [
            _short(text, width).rjust(width) if name in _RIGHT else _short(text, width).ljust(width)
            for name, text, width in zip(_HEADER, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
        if run.get("state") in ("failed", "stopped", "unknown"):
            lines += textwrap.wrap(str(run.get("reason", "")), columns, initial_indent="    ", subsequent_indent="    ")
    return lines


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    limit = f"/{run['iterations']}" if run.get("iterations") else ""
    loss = run.get("loss")
    return (
        Path(run["folder"]).absolute().name,
        run["state"],
        str(run.get("algorithm", "-")),
        f"{run['count']}{limit}" if "count" in run else "-",
        "-" if loss is None else f"{loss:.4g}",
        duration(run["seconds"]) if "seconds" in run else "-",
        time.strftime("%m-%d %H:%M", datetime.fromisoformat(run["started"]).timetuple()),
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
