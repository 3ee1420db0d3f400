"""``lsgd report``: the page of a finished run as one file."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.watch.dashboard.data import encoded, finished
from lsgd.watch.dashboard.follow import KEPT
from lsgd.watch.dashboard.page import report_page
from lsgd.watch.results import METRICS, RESULT, read, read_rounds


def report(folder: Path) -> str:
    """Return the page of the run in ``folder``, as HTML.

    The curves come from ``metrics.jsonl``. The timeline, the throughput and the log come from the file that a dashboard
    of the same run wrote at its end, if there was one.

    Raises:
        ConfigError: there is no run in the folder.
    """
    document = read(folder)
    if not document:
        raise ConfigError(
            f"there is no {RESULT} in {folder}: name the folder of a run, on the machine that was its node 0 "
            f"(lsgd runs lists them)"
        )
    page = finished(document, read_rounds(folder / METRICS))
    kept = _kept(folder, str(document.get("run", "")))
    for name in ("recent", "whole", "gaps", "log", "settings", "workers"):
        if name in kept:
            page[name] = kept[name]
    return report_page(encoded(page), str(folder))


def _kept(folder: Path, run: str) -> dict[str, Any]:
    """Return the data that a dashboard of this run kept; empty if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        if kept["head"]["run"] == run:
            return dict(kept)
    return {}
