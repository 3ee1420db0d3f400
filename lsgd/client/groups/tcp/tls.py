"""TLS among the members of a run: all have the same certificate, and trust only this one."""

import functools
import os
import ssl
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contexts:
    """The contexts of the end that accepts a connection, and of the end that dials."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class _Connection(ssl.SSLSocket):
    """Python's, which leaves its socket open if the connection is reset while it is being wrapped."""

    def getpeername(self) -> Any:
        """Return the other end's address; close the connection if the other end is gone."""
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise ConnectionResetError("the other end is gone") from None


@functools.lru_cache(maxsize=1)  # all generations of a run use the same
def contexts(certificate: bytes) -> Contexts:
    """Return the contexts for this key and certificate (PEM)."""
    return Contexts(_context(certificate, ssl.PROTOCOL_TLS_SERVER), _context(certificate, ssl.PROTOCOL_TLS_CLIENT))


def _context(certificate: bytes, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _Connection
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a sending end would never read them
    memory = os.memfd_create("lsgd-certificate")  # ssl reads keys from files only; this file is on no disk
    try:
        os.write(memory, certificate)
        path = f"/proc/self/fd/{memory}"
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    finally:
        os.close(memory)
    return context
