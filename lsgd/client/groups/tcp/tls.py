"""TLS among the members of a run: all have one certificate, and trust this one only."""

import os
import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Contexts:
    """The contexts of the end that answers a connection, and of the one that begins it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(certificate: bytes) -> Contexts:
    """Return the contexts of members that have this key and certificate (PEM)."""
    return Contexts(_context(certificate, ssl.PROTOCOL_TLS_SERVER), _context(certificate, ssl.PROTOCOL_TLS_CLIENT))


def _context(certificate: bytes, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
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
