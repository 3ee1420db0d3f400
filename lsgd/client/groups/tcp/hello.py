"""What both ends of a connection say first: for which run, generation, members and direction it is."""

import hashlib
import hmac
import struct
from dataclasses import dataclass

_FORM = struct.Struct("!4sQII32s")
_MAGIC = b"lsg1"
_PROOF_NBYTES = 32

HELLO_NBYTES = _FORM.size
ANSWER_NBYTES = _PROOF_NBYTES


@dataclass(frozen=True)
class Hello:
    """A connection is to carry bytes from ``source`` to ``target``, ranks of a generation of a run.

    A nonce that the member at the other end has published through the servers proves it: strangers cannot read that.
    The answer is proved with the same nonce, which only that member and those who have read it know.
    """

    run: str
    generation: int
    source: int
    target: int

    def packed(self, nonce: bytes) -> bytes:
        """Return this as bytes, proved by the nonce of the end that answers."""
        return _FORM.pack(_MAGIC, self.generation, self.source, self.target, self._proof(nonce, b"hello"))

    def answer(self, nonce: bytes) -> bytes:
        """Return what the other end answers."""
        return self._proof(nonce, b"answer")

    @staticmethod
    def read(data: bytes, run: str, nonce: bytes) -> "Hello":
        """Return what was said to the member of ``nonce``.

        Raises:
            ConnectionError: it is no hello, or is not proved.
        """
        magic, generation, source, target, proof = _FORM.unpack(data)
        hello = Hello(run, generation, source, target)
        if magic != _MAGIC or not hmac.compare_digest(proof, hello._proof(nonce, b"hello")):
            raise ConnectionError("it says no hello of a member")
        return hello

    def check(self, answer: bytes, nonce: bytes) -> None:
        """Check the answer.

        Raises:
            ConnectionError: it is not that of the member.
        """
        if not hmac.compare_digest(answer, self.answer(nonce)):
            raise ConnectionError("another process answers in its place: its proof is wrong")

    def _proof(self, nonce: bytes, word: bytes) -> bytes:
        said = struct.pack("!QII", self.generation, self.source, self.target) + self.run.encode()
        return hashlib.blake2b(said, key=nonce, person=word, digest_size=_PROOF_NBYTES).digest()
