"""How two members authenticate each other: TLS with the run's certificate, and the first bytes from both ends."""

import functools
import hashlib
import hmac
import os
import ssl
import struct
from dataclasses import dataclass
from typing import Any

_FORM = struct.Struct("!4sQIIQ32s")
_MAGIC = b"lsg1"
_PROOF_NBYTES = 32

_ANSWER = struct.Struct("!Q32s")

HELLO_NBYTES = _FORM.size
ANSWER_NBYTES = _ANSWER.size


@dataclass(frozen=True)
class Hello:
    """Announces a connection that carries bytes from ``source`` to ``target``, two ranks of a run's generation.

    The target also reports how many bytes have arrived over earlier connections. A nonce authenticates the hello and
    its answer. The answering member has published it through the servers, where only members can read it.
    """

    run: str
    generation: int
    source: int
    target: int

    def packed(self, nonce: bytes, received: int) -> bytes:
        """Return this as bytes, authenticated with the nonce of the end that answers."""
        proof = self._proof(nonce, b"hello", received)
        return _FORM.pack(_MAGIC, self.generation, self.source, self.target, received, proof)

    def answer(self, nonce: bytes, received: int) -> bytes:
        """Return what the other end answers."""
        return _ANSWER.pack(received, self._proof(nonce, b"answer", received))

    @staticmethod
    def read(data: bytes, run: str, nonce: bytes) -> tuple["Hello", int]:
        """Return the hello to the member with this nonce, and how many bytes have arrived at the other end.

        Raises:
            ConnectionError: it is not a hello, or its proof is wrong.
        """
        magic, generation, source, target, received, proof = _FORM.unpack(data)
        hello = Hello(run, generation, source, target)
        if magic != _MAGIC or not hmac.compare_digest(proof, hello._proof(nonce, b"hello", received)):
            raise ConnectionError("it did not send a member's hello")
        return hello, received

    def answered(self, answer: bytes, nonce: bytes) -> int:
        """Return how many bytes have arrived at the end that answers.

        Raises:
            ConnectionError: the answer is not the member's.
        """
        received, proof = _ANSWER.unpack(answer)
        if not hmac.compare_digest(proof, self._proof(nonce, b"answer", received)):
            raise ConnectionError("another process answers in its place: its proof is wrong")
        return int(received)

    def _proof(self, nonce: bytes, word: bytes, received: int) -> bytes:
        said = struct.pack("!QIIQ", self.generation, self.source, self.target, received) + self.run.encode()
        return hashlib.blake2b(said, key=nonce, person=word, digest_size=_PROOF_NBYTES).digest()


class _Connection(ssl.SSLSocket):
    """Closes its socket if the connection is reset while it is being wrapped, where Python's leaves it open."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            self.close()
            raise ConnectionResetError("the other end is gone") from None


@functools.lru_cache(maxsize=2)  # all generations of a run use the same
def context_of(certificate: bytes, *, answers: bool) -> ssl.SSLContext:
    """Return the context for this key and certificate (PEM), at the end that answers or the end that dials."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if answers else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = _Connection
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, not a host's
    context.verify_mode = ssl.CERT_REQUIRED
    if answers:
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
