"""What both ends of a connection say first: for which run, generation, members and direction it is."""

import hashlib
import hmac
import struct
from dataclasses import dataclass

_FORM = struct.Struct("!4sQIIQ32s")
_MAGIC = b"lsg1"
_PROOF_NBYTES = 32

_ANSWER = struct.Struct("!Q32s")

HELLO_NBYTES = _FORM.size
ANSWER_NBYTES = _ANSWER.size


@dataclass(frozen=True)
class Hello:
    """A connection is to carry bytes from ``source`` to ``target``, ranks of a generation of a run.

    The one of them that is the target says how many bytes have arrived, over connections before this one.

    A nonce that the member at the other end has published through the servers proves it: strangers cannot read that.
    The answer is proved with the same nonce, which only that member and those who have read it know.
    """

    run: str
    generation: int
    source: int
    target: int

    def packed(self, nonce: bytes, received: int) -> bytes:
        """Return this as bytes, proved by the nonce of the end that answers."""
        proof = self._proof(nonce, b"hello", received)
        return _FORM.pack(_MAGIC, self.generation, self.source, self.target, received, proof)

    def answer(self, nonce: bytes, received: int) -> bytes:
        """Return what the other end answers."""
        return _ANSWER.pack(received, self._proof(nonce, b"answer", received))

    @staticmethod
    def read(data: bytes, run: str, nonce: bytes) -> tuple["Hello", int]:
        """Return what was said to the member of ``nonce``, and how many bytes have arrived there.

        Raises:
            ConnectionError: it is no hello, or is not proved.
        """
        magic, generation, source, target, received, proof = _FORM.unpack(data)
        hello = Hello(run, generation, source, target)
        if magic != _MAGIC or not hmac.compare_digest(proof, hello._proof(nonce, b"hello", received)):
            raise ConnectionError("it says no hello of a member")
        return hello, received

    def answered(self, answer: bytes, nonce: bytes) -> int:
        """Return how many bytes have arrived at the end that answers.

        Raises:
            ConnectionError: it is not that of the member.
        """
        received, proof = _ANSWER.unpack(answer)
        if not hmac.compare_digest(proof, self._proof(nonce, b"answer", received)):
            raise ConnectionError("another process answers in its place: its proof is wrong")
        return int(received)

    def _proof(self, nonce: bytes, word: bytes, received: int) -> bytes:
        said = struct.pack("!QIIQ", self.generation, self.source, self.target, received) + self.run.encode()
        return hashlib.blake2b(said, key=nonce, person=word, digest_size=_PROOF_NBYTES).digest()
