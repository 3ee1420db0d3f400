"""The page as HTML: with links to its parts for the server, with all of them inline for a report."""

import functools
import html
import json
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from lsgd.errors import ConfigError
from lsgd.run_folder import METRICS, RESULT
from lsgd.watch.dashboard.data import encoded, finished
from lsgd.watch.dashboard.follow import KEPT
from lsgd.watch.results import read, read_rounds

PARTS = {"page.css": "text/css", "charts.js": "text/javascript", "page.js": "text/javascript"}
"""The page's files besides plotly.js, with their types."""

PLOTLY = "plotly.js"


@functools.cache
def part(name: str) -> str:
    """Return the text of one of the page's files, or of plotly.js."""
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs())
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def live_page(csrf: str, address: str, *, control: bool) -> str:
    """Return the page that the server shows.

    Args:
        csrf: secret that the page sends with its changes to the run.
        address: address of the global server, which it shows.
        control: whether the page may stop and change the run.
    """
    head = '<link rel="stylesheet" href="page.css">'
    scripts = "".join(f'<script src="{name}" defer></script>' for name in (PLOTLY, "charts.js", "page.js"))
    about = {"mode": "live", "csrf": csrf, "address": address, "control": "yes" if control else "no"}
    return _filled(head + scripts, about, "")


def report_page(data: str, folder: str) -> str:
    """Return the self-contained page of a finished run; ``data`` is JSON that is safe inside a script element."""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{part("page.css")}</style>'
    scripts = [f'<script id="data" type="application/json">{data}</script>']
    parts = [part(name).replace("</script", "<\\/script") for name in (PLOTLY, "charts.js", "page.js")]
    scripts += [f"<script>{text}</script>" for text in parts]
    return _filled(head, {"mode": "report", "address": folder, "control": "no"}, "".join(scripts))


def _filled(head: str, about: dict[str, str], end: str) -> str:
    attributes = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in about.items())
    text = part("page.html").replace("<!--head-->", head, 1).replace("<body>", f"<body {attributes}>", 1)
    before, mark, after = text.rpartition("<!--end-->")
    assert mark
    return before + end + after


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
    for name in ("recent", "whole", "gaps", "turns", "agreement", "log", "settings", "workers", "sums"):
        if name in kept:
            page[name] = kept[name]
    return report_page(encoded(page), str(folder).encode(errors="replace").decode())  # its name may be no UTF-8


def _kept(folder: Path, run: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        if kept["head"]["run"] == run:
            return dict(kept)
    return {}
