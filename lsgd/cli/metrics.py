"""``lsgd metrics``: a process that follows a run and serves its metrics to Prometheus."""

import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lsgd.errors import ConfigError
from lsgd.protocol.sockets import ConnectorKeys
from lsgd.watch.metrics import CONTENT_TYPE, check, exposition
from lsgd.watch.reader import Reader
from lsgd.watch.view import RunView

LINGER_S = 60.0
"""How long to serve the metrics after the run's end, so that they are read once more."""


def serve(address: str, keys: ConnectorKeys | None, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve ``/metrics`` of the run at ``address`` until a while after its end; wait for a server that is away.

    Raises:
        ConfigError: prometheus_client is missing, or the port cannot be used.
        JoinError: the global server refuses us.
    """
    check()
    view, lock = RunView(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # for a silent peer

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            with lock:
                page = exposition(view)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"nothing can listen on {host}:{port}: {error.strerror}; name another --port") from None
    with server, Reader(address, keys) as reader:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        shown = f"[{host}]" if ":" in host else host
        say(f"metrics on http://{shown}:{server.server_address[1]}/metrics")
        over_at: float | None = None
        try:
            while over_at is None or time.monotonic() - over_at < LINGER_S:
                batch = reader.read(0.25)
                with lock:
                    view.take(batch)
                over_at = (over_at or time.monotonic()) if view.state == "over" else None
        finally:
            server.shutdown()
