"""The dashboard's HTTP server: the page, its data as server-sent events, and an operator's changes to the run.

Access rules:
1. A name in ``Host`` must be one of ours, so that no other site's name can point to this server (DNS rebinding).
2. If a token is set, every request needs it: first in the address, then as a cookie.
3. A change needs the page's secret in a header, and no foreign ``Origin``; other sites cannot send either.
"""

import asyncio
import errno
import gzip
import hmac
import ipaddress
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from lsgd.errors import ConfigError, LsgdError
from lsgd.protocol.messages import ChangeSettings, Operator, StopRun
from lsgd.protocol.ports import user_of
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.run_folder import METRICS
from lsgd.watch.dashboard.data import Story
from lsgd.watch.dashboard.follow import READ_S, Follower
from lsgd.watch.dashboard.page import PARTS, PLOTLY, live_page, part
from lsgd.watch.metrics import CONTENT_TYPE, check
from lsgd.watch.reader import Reader, ask
from lsgd.watch.results import read_rounds

DEFAULT_PORT = 8484
MAX_BROWSERS = 32
SAY_ALIVE_EVERY_S, SEND_WITHIN_S, MAX_BODY_NBYTES = 5.0, 10.0, 1 << 16
"""Time between keep-alives; how long a page may take to receive; the longest request."""

LAST_WORDS_S = 1.0
"""How long pages have to receive the final state when the dashboard ends."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass
class Dashboard:
    """State that the handlers share.

    Args:
        address, keys: address of the global server, and keys for it.
        token: token that visitors need; empty: none.
        control: whether visitors may stop and change the run.
        metrics: callback that returns the run's metrics in Prometheus's text format.
    """

    address: str
    keys: ConnectorKeys | None
    host: str
    token: str
    control: bool
    metrics: Callable[[], bytes] = bytes
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    text: str = ""
    streams: "list[_Events]" = field(default_factory=list)
    closing: bool = False
    port: int = 0
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def show(self, text: str | None) -> None:
        """Show this from now on; None: close."""
        async with self.news:
            self.text, self.closing = (self.text, True) if text is None else (text, False)
            self.news.notify_all()

    async def changes(self, seen: str | None) -> bool:
        """Wait until there is something new to show, or the end; return False if nothing came for a while."""
        async with self.news:
            try:
                waited = self.news.wait_for(lambda: self.closing or (self.text and self.text is not seen))
                await asyncio.wait_for(waited, SAY_ALIVE_EVERY_S)
            except TimeoutError:
                return False
        return True

    def knows(self, host: str) -> bool:
        """Whether ``Host`` is an accepted name of this machine."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            found = ipaddress.ip_address(name)
        except ValueError:
            ours = {"localhost"} if is_loopback(self.host) else {"localhost", self.host.lower(), *_own_names()}
            return name in ours
        return found.is_loopback or not is_loopback(self.host)

    def url(self) -> str:
        """Return the address to open, with the token."""
        anywhere = self.host in ("", "0.0.0.0", "::")
        host = socket.gethostname() if anywhere else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{f'?token={self.token}' if self.token else ''}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


class _Handler(RequestHandler):
    """Checks and headers for every request, including unknown paths."""

    def initialize(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("X-Frame-Options", "DENY")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.clear_header("Server")

    def prepare(self) -> None:
        if not self.dashboard.knows(self.request.host):
            raise HTTPError(403, reason="this name is not ours: open the address that lsgd dashboard printed")
        token = self.dashboard.token
        if token and not self._has(token):
            raise HTTPError(401, reason="a token is needed: open the address that lsgd dashboard printed")

    def _has(self, token: str) -> bool:
        given = (self.get_query_argument("token", ""), self.get_cookie(self.cookie) or "")
        return any([hmac.compare_digest(each.encode(), token.encode()) for each in given])

    @property
    def cookie(self) -> str:
        """Name of the token's cookie; it has the port, because browsers share cookies between a host's ports."""
        return f"lsgd-{self.dashboard.port}"

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{status_code}: {self._reason}\n")


class _Unknown(_Handler):
    def prepare(self) -> None:
        super().prepare()
        raise HTTPError(404, reason="there is no such page: the dashboard is at /")


class _Page(_Handler):
    def get(self) -> None:
        d = self.dashboard
        if self.get_query_argument("token", "") and d.token:
            self.set_cookie(self.cookie, d.token, httponly=True, samesite="Lax")
            self.redirect("/")
            return
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(live_page(d.csrf, d.address, control=d.control))


class _Part(_Handler):
    def get(self, name: str) -> None:
        self.set_header("Content-Type", f"{PARTS.get(name, 'text/javascript')}; charset=utf-8")
        if name == PLOTLY:
            self.set_header("Cache-Control", "private, max-age=3600")
        packed = "gzip" in self.request.headers.get("Accept-Encoding", "")
        if packed:
            self.set_header("Content-Encoding", "gzip")
        self.finish(_packed(name) if packed else part(name))

    def compute_etag(self) -> str | None:
        return None


@cache
def _packed(name: str) -> bytes:
    return gzip.compress(part(name).encode(), 5)


class _State(_Handler):
    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(self.dashboard.text or "{}")


class _Metrics(_Handler):
    async def get(self) -> None:
        try:
            check()
        except ConfigError as error:
            raise HTTPError(501, reason=str(error)) from None
        page = await asyncio.get_running_loop().run_in_executor(None, self.dashboard.metrics)
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(page)


class _Events(_Handler):
    """Sends the page's complete data whenever it changes; slow browsers skip some versions.

    A page beyond the :data:`MAX_BROWSERS`-th takes the place of the one that has been open for longest.
    """

    async def get(self) -> None:
        d = self.dashboard
        if len(d.streams) >= MAX_BROWSERS:  # so that pages that somebody keeps open lock nobody out
            d.streams.pop(0).cut()
        d.streams.append(self)
        try:
            self.set_header("Content-Type", "text/event-stream")
            await self._send("retry: 1000\n\n")
            seen = None
            while not d.closing:
                if d.text and d.text is not seen:
                    seen = d.text
                    await self._send(f"data: {seen}\n\n")
                    continue
                if not await d.changes(seen):
                    await self._send("event: alive\ndata: .\n\n")
            if d.text and d.text is not seen:
                await self._send(f"data: {d.text}\n\n")
            await asyncio.wait_for(asyncio.ensure_future(self.finish()), SEND_WITHIN_S)
        except StreamClosedError:
            pass
        except TimeoutError:  # the browser does not read
            self.detach().close()
        finally:
            if self in d.streams:
                d.streams.remove(self)

    def cut(self) -> None:
        """Close the connection."""
        if stream := getattr(self.request.connection, "stream", None):
            stream.close()

    async def _send(self, text: str) -> None:
        self.write(text)
        await asyncio.wait_for(asyncio.ensure_future(self.flush()), SEND_WITHIN_S)


class _Change(_Handler):
    def prepare(self) -> None:
        super().prepare()
        d, origin = self.dashboard, self.request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != self.request.host:
            raise HTTPError(403, reason="a change has to come from the page itself")
        if not hmac.compare_digest(self.request.headers.get("X-Lsgd-Csrf", "").encode(), d.csrf.encode()):
            raise HTTPError(403, reason="a change needs the page's own secret: reload the page")
        if not d.control:
            raise HTTPError(403, reason="this page only shows the run: use lsgd set and lsgd stop, or --private")

    async def post(self, what: str) -> None:
        if self.dashboard.changing.locked():
            raise HTTPError(409, reason="another change is being made: try again")
        async with self.dashboard.changing:
            try:
                message = self._message(what)
                loop = asyncio.get_running_loop()
                status = await loop.run_in_executor(None, ask, self.dashboard.address, message, self.dashboard.keys)
                self.finish({"count": status["count"]})
            except LsgdError as error:
                self.set_status(400)
                self.finish({"error": str(error)})

    def _message(self, what: str) -> Operator:
        try:
            body = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            raise HTTPError(400, reason="the body has to be JSON") from None
        if what == "stop":
            return StopRun("stopped from the dashboard")
        if not isinstance(body, dict) or not body or not all(isinstance(value, str) for value in body.values()):
            raise HTTPError(400, reason='name settings and their values as texts: {"period": "8"}')
        return ChangeSettings(body)


def application(dashboard: Dashboard) -> Application:
    """Return the application with its routes."""
    shared = {"dashboard": dashboard}
    names = "|".join(name.replace(".", r"\.") for name in (*PARTS, PLOTLY))
    paths = [("/", _Page), (f"/({names})", _Part), ("/state.json", _State), ("/metrics", _Metrics)]
    routes = [(path, handler, shared) for path, handler in (*paths, ("/events", _Events), ("/(set|stop)", _Change))]
    return Application(
        routes, default_handler_class=_Unknown, default_handler_args=shared, log_function=lambda handler: None
    )


def open_dashboard(
    address: str,
    keys: ConnectorKeys | None,
    host: str,
    port: int | None,
    folder: Path | None,
    say: Callable[[str], None],
    private: bool = False,
    parent: int = 0,
) -> None:
    """Serve until SIGINT or SIGTERM, or until ``parent`` is no longer our parent process.

    Anybody who can open the page can change the run, unless the run has keys and the page has no token.

    Args:
        address: address of the global server.
        keys: keys for it.
        host: address to listen on; if other machines can reach it, the page needs a token.
        port: TCP port; None: the default port, or else any free one.
        folder: run folder, for the older rounds, and to keep the final page if ``parent`` is set; None: unknown.
        say: callback for the page's address once it is open.
        private: whether a token is always required.
        parent: process id; 0: none.

    Raises:
        ConfigError: the port or the host cannot be used.
    """
    token = secrets.token_urlsafe(24) if private or not is_loopback(host) else ""
    dashboard = Dashboard(address, keys, host, token, control=bool(token) or keys is None)
    sockets, taken = _bind(host, port)
    dashboard.port = sockets[0].getsockname()[1]
    asyncio.run(_serve(dashboard, sockets, folder, lambda url: say(f"{url}{taken}"), parent))


def _bind(host: str, port: int | None) -> tuple[list[socket.socket], str]:
    """Return sockets that listen, and why not at the default port."""
    trouble = ""
    for each in (DEFAULT_PORT, 0) if port is None else (port,):
        try:
            bound: list[socket.socket] = bind_sockets(each, host)
            return bound, trouble and f" ({trouble})"
        except OSError as error:
            trouble = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                trouble = f"port {each} is taken by {user_of(host, each)}"
        except UnicodeError:  # such as 10.0.0..1
            trouble = "Name or service not known"
    where = host if port is None else f"{host}, port {port}"
    raise ConfigError(f"the dashboard cannot listen at {where}: {trouble}; give another --port or --host")


async def _serve(
    dashboard: Dashboard, sockets: list[socket.socket], folder: Path | None, say: Callable[[str], None], parent: int
) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # the launcher has said so: a scheduler sends it to all
            loop.add_signal_handler(number, end.set)
    server = HTTPServer(
        application(dashboard), max_body_size=MAX_BODY_NBYTES, body_timeout=10, idle_connection_timeout=60
    )
    server.add_sockets(sockets)

    def tell(text: str) -> None:
        asyncio.run_coroutine_threadsafe(dashboard.show(text), loop)

    reader = Reader(dashboard.address, dashboard.keys)
    story = Story(read_rounds(folder / METRICS) if folder else ())
    follower = Follower(reader, story, tell, lambda: bool(dashboard.streams), folder if parent else None)
    dashboard.metrics = follower.metrics
    follower.start()
    say(dashboard.url())
    while not end.is_set() and (not parent or os.getppid() == parent):
        with suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), 1.0)
    follower.stop()
    await asyncio.to_thread(follower.join, READ_S + 2.0)
    await dashboard.show(None)
    server.stop()
    said_at = loop.time()
    while dashboard.streams and loop.time() - said_at < LAST_WORDS_S:
        await asyncio.sleep(0.02)
    with suppress(TimeoutError):
        await asyncio.wait_for(server.close_all_connections(), 2.0)
