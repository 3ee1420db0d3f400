"""How one connection of a mesh is made, and answered: TCP options, TLS, the hello; again until it succeeds."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lsgd.client.control.closing import on_error
from lsgd.client.groups.handshake import ANSWER_NBYTES, HELLO_NBYTES, Hello, context_of
from lsgd.client.groups.routes import Route
from lsgd.client.groups.service import exactly, retried
from lsgd.client.groups.stream import TensorStream

logger = logging.getLogger("lsgd")

HELLO_WITHIN_S = 10.0
"""How long a connection's handshake and hello may take, in seconds."""

KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""After how many seconds an idle connection is probed, how often, and after how many failures it is given up."""

_OTHER_CERTIFICATE = ("TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE", "TLSV1_ALERT_DECRYPT_ERROR")
"""What the other end says to a certificate that is not the run's."""

MAX_REFUSALS = 5
"""How many refused connections are logged."""

_RETRY_S = (0.05, 1.0)  # the first pause, and the longest


@dataclass(eq=False)
class Connections:
    """Makes the connections of a run's generation, and answers those of others.

    Args:
        certificate: key and certificate of TLS (PEM); empty: the connections are not encrypted.
        timeout_s: how long to try to make a connection for which an operation waits.
    """

    run: str
    generation: int
    certificate: bytes
    timeout_s: float
    _refused: int = field(default=0, init=False)

    async def make(self, stream: TensorStream, route: Route, source: int, target: int) -> None:
        """Make a stream's connection; try again until it succeeds, is hopeless, or is waited for too long."""
        hello, began = Hello(self.run, self.generation, source, target), time.monotonic()
        pause_s, longest_s = _RETRY_S
        while True:
            try:
                async with asyncio.timeout(HELLO_WITHIN_S):
                    await self._try(stream, route, hello)
                return
            except (OSError, TimeoutError) as error:
                stream.trouble = error.strerror or str(error) or f"no answer within {HELLO_WITHIN_S:g} s"
                late = time.monotonic() - max(began, stream.waited_since()) > self.timeout_s
                if _is_final(error) or late:
                    stream.fail(ConnectionError(f"no connection with {stream.peer}: {stream.trouble}"))
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def answer(
        self, raw: socket.socket, origin: str, nonce: bytes, expected: Callable[[Hello], TensorStream]
    ) -> None:
        """Answer a connection from ``origin``, and give it to the stream that is ``expected`` for its hello."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                connection = await self._secured(raw, answers=True)
                with on_error(connection.close):
                    hello, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, nonce)
                    if hello.generation != self.generation:
                        raise ConnectionError("its hello is for something else")
                    stream = expected(hello)
                    connection.send(hello.answer(nonce, stream.renew()))
            stream.connect(connection, received)
        except ConnectionAbortedError:  # the mesh was closed
            pass
        except (OSError, TimeoutError) as error:
            if self._refused < MAX_REFUSALS:
                self._refused += 1
                why = str(error) or f"it did not say who it is within {HELLO_WITHIN_S:g} s"
                logger.warning("refused a connection from %s to the port for tensors: %s", origin, why)

    async def _try(self, stream: TensorStream, route: Route, hello: Hello) -> None:
        connection = await self._secured(await route.open(), answers=route.answers)
        with on_error(connection.close):
            if route.answers:
                heard, received = Hello.read(await exactly(connection, HELLO_NBYTES), self.run, route.nonce)
                if heard != hello:
                    raise ConnectionError("its hello is for something else")
                connection.send(hello.answer(route.nonce, stream.renew()))
            else:
                connection.send(hello.packed(route.nonce, stream.renew()))
                received = hello.answered(await exactly(connection, ANSWER_NBYTES), route.nonce)
        stream.between_nbytes = route.between_nbytes
        stream.connect(connection, received)

    async def _secured(self, raw: socket.socket, *, answers: bool) -> socket.socket:
        """Return the connection, in TLS if there is a certificate, after its handshake."""
        with on_error(raw.close):
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)
            if not self.certificate:
                return raw
            context = context_of(self.certificate, answers=answers)
            connection = context.wrap_socket(raw, server_side=answers, do_handshake_on_connect=False)
        with on_error(connection.close):
            await retried(connection, connection.do_handshake)
        return connection


def _is_final(error: Exception) -> bool:
    """Whether trying again makes no sense: nobody is there any more, or its certificate is not the run's.

    Other errors of a handshake come from bytes that were changed on the way.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLCertVerificationError) or (error.reason or "") in _OTHER_CERTIFICATE
    return isinstance(error, ConnectionRefusedError)
