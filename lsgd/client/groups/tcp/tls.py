"""TLS among the members of a run: all have one certificate, and trust this one only."""

import functools
import os
import ssl
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contexts:
    """The contexts of the end that answers a connection, and of the one that begins it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class _Connection(ssl.SSLSocket):
    """As Python's, which does not close what it has made of a connection that is reset at that moment."""

    def getpeername(self) -> Any:
        """Return the other end's address; close the connection if there is no other end any more."""
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise ConnectionResetError("the other end is gone") from None


@functools.lru_cache(maxsize=1)  # all generations of a run have the same
def contexts(certificate: bytes) -> Contexts:
    """Return the contexts of members that have this key and certificate (PEM)."""
    return Contexts(_context(certificate, ssl.PROTOCOL_TLS_SERVER), _context(certificate, ssl.PROTOCOL_TLS_CLIENT))


def _context(certificate: bytes, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _Connection
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # members have addresses, and the certificate is the run's
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # the end that only sends would never read them
    memory = os.memfd_create("lsgd-certificate")  # ssl reads a key from files only; this one is on no disk
    try:
        os.write(memory, certificate)
        path = f"/proc/self/fd/{memory}"
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    finally:
        os.close(memory)
    return context
