"""How the members of a run recognize each other: by its certificate, and at the relay by tickets.

The relay greets each connection with a challenge. The answer is a ticket, which says which pair the connection is for,
and a proof that only members can compute: the global server gives them the run's secret over the encrypted channel.
Every connection has a new challenge, so an eavesdropper cannot reuse a ticket.
"""

import datetime
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, replace
from typing import Self

from lsgd.errors import ConfigError

_NAME = "lsgd"
_SERIAL = 1
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)  # machines' clocks do not matter


def run_certificate(secret: bytes, run: str) -> bytes:
    """Return the key and the certificate of a run as PEM text: always the same for the same arguments.

    So a restarted global server hands out the same one without a file. All members of a run share this
    certificate and trust no other. Only the global server knows ``secret``, without which nobody can derive the key.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = hashlib.blake2b(run.encode(), key=secret, person=b"lsgd tensors", digest_size=32).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), _SERIAL, _FROM, _UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


MAGIC = b"lsr1"
"""What a relay sends first: its kind and version."""

CHALLENGE_NBYTES = 16
GREETING_NBYTES = len(MAGIC) + CHALLENGE_NBYTES
"""Length of what a relay sends first."""

MET = b"!"
"""What the relay sends when both sides are there; all that follows comes from the other side."""

MAX_RUN_NBYTES = 16

_BODY = struct.Struct(f"!{MAX_RUN_NBYTES}sQII?")
_PROOF_NBYTES = 32
TICKET_NBYTES = _BODY.size + _PROOF_NBYTES
"""Length of the answer."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Says whose bytes a connection carries: in which run and generation, from which rank, to which one.

    Args:
        run: at most 16 bytes.
        of_target: whether the target presents it; else the source does.
    """

    run: bytes
    generation: int
    source: int
    target: int
    of_target: bool

    @property
    def counterpart(self) -> "Ticket":
        """The ticket of the other side."""
        return replace(self, of_target=not self.of_target)

    def answer(self, greeting: bytes, run_secret: bytes) -> bytes:
        """Return the answer to a relay's greeting."""
        body = _BODY.pack(self.run, self.generation, self.source, self.target, self.of_target)
        return body + _proof(run_secret, greeting, body)

    @classmethod
    def of(cls, answer: bytes, greeting: bytes, relay_secret: bytes) -> Self | None:
        """Return the ticket in the answer to a greeting; None if its proof is wrong."""
        body, proof = answer[: _BODY.size], answer[_BODY.size :]
        run, generation, source, target, of_target = _BODY.unpack(body)
        run = run.rstrip(b"\0")
        if not hmac.compare_digest(proof, _proof(secret_of_run(relay_secret, run), greeting, body)):
            return None
        return cls(run, generation, source, target, of_target)


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of ``tcp://host:port``.

    Raises:
        ConfigError: the address has another form.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is not an address of a relay, such as tcp://192.0.2.1:27401")
    return "" if host == "*" else host.strip("[]"), int(port)


def new_greeting() -> bytes:
    """Return what a relay sends first on a connection."""
    return MAGIC + secrets.token_bytes(CHALLENGE_NBYTES)


def secret_of_relay(server_key: bytes) -> bytes:
    """Return the secret that a relay and a global server with the same secret key share."""
    return hmac.digest(server_key, b"lsgd relay", "sha256")


def secret_of_run(relay_secret: bytes, run: bytes) -> bytes:
    """Return the secret by which members of a run prove that they are members."""
    return hmac.digest(relay_secret, b"run " + run, "sha256")


def _proof(run_secret: bytes, greeting: bytes, body: bytes) -> bytes:
    return hmac.digest(run_secret, greeting + body, "sha256")
