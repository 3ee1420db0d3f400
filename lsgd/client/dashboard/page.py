"""The page as HTML: for the server with links to its parts, for a report with all of them inside."""

import functools
import html
import importlib.util
import sys
from importlib import resources

from lsgd.errors import ConfigError

PARTS = {"page.css": "text/css", "charts.js": "text/javascript", "page.js": "text/javascript"}
"""The files that belong to the page, beside plotly.js, with their types."""

PLOTLY = "plotly.js"


def require(command: str, *modules: str) -> None:
    """See that these are installed.

    Raises:
        ConfigError: one is not; the words have the line to type.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"{command} needs {' and '.join(missing)}, which the extra `dashboard` brings: "
            f"{sys.executable} -m pip install 'lsgd[dashboard]'"
        )


@functools.cache
def part(name: str) -> str:
    """Return the text of a file of the page, plotly.js included."""
    if name == PLOTLY:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs())
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def live_page(csrf: str, address: str, *, control: bool) -> str:
    """Return the page that a server shows.

    Args:
        csrf: what the page's changes of the run are known by.
        address: of the global server, for people.
        control: the page may stop and change the run.
    """
    head = '<link rel="stylesheet" href="page.css">'
    scripts = "".join(f'<script src="{name}" defer></script>' for name in (PLOTLY, "charts.js", "page.js"))
    about = {"mode": "live", "csrf": csrf, "address": address, "control": "yes" if control else "no"}
    return _filled(head + scripts, about, "")


def report_page(data: str, folder: str) -> str:
    """Return the page of a finished run, which needs nothing else.

    Args:
        data: the page's data, as JSON that may stand in a script element.
        folder: of the run, for people.
    """
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{part("page.css")}</style>'
    scripts = [f'<script id="data" type="application/json">{data}</script>']
    scripts += [f"<script>{_inline(part(name))}</script>" for name in (PLOTLY, "charts.js", "page.js")]
    return _filled(head, {"mode": "report", "address": folder, "control": "no"}, "".join(scripts))


def _filled(head: str, about: dict[str, str], end: str) -> str:
    attributes = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in about.items())
    text = part("page.html").replace("<!--head-->", head, 1).replace("<body>", f"<body {attributes}>", 1)
    before, mark, after = text.rpartition("<!--end-->")
    assert mark
    return before + end + after


def _inline(script: str) -> str:
    """Return a script that may stand in an element: the one thing that would end it is written otherwise."""
    return script.replace("</script", "<\\/script")
