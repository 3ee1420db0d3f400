"""The proof that two machines know the same password, without showing it: SPAKE2, and what follows from its key.

A machine that does not know the password can try one in each exchange, and learns only whether it was right: neither
from an exchange that it overhears, nor from one that it breaks off, can it find the password by computing.
"""

import hashlib
import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B
from spake2.ed25519_basic import NotOnCurve
from spake2.spake2 import SPAKEError

from lsgd.errors import ProtocolError

KEY_NBYTES, MESSAGE_NBYTES = 32, 33
_LABEL = b"lsgd pairing 1"


@dataclass(frozen=True)
class Keys:
    """What both know after an exchange, if they used the same password; each of 32 bytes.

    Args:
        typer_proof, owner_proof: what the machine where the code was typed, and the one that owns it, send as proof.
        typer_sends, owner_sends: what encrypts the messages of each.
        lasting: what the two keep, so that no code is needed the next time.
    """

    typer_proof: bytes
    owner_proof: bytes
    typer_sends: bytes
    owner_sends: bytes
    lasting: bytes


class Exchange:
    """One side of one exchange.

    Args:
        password: what both must know.
        typer, owner: the identities of the machines.
        context: all that both have said in clear text before; the keys depend on it.
        types: whether this is the machine where the code was typed.

    Attributes:
        message: what the other side needs.
    """

    def __init__(self, password: bytes, typer: str, owner: str, context: bytes, *, types: bool) -> None:
        side = SPAKE2_A if types else SPAKE2_B
        self._side = side(password, idA=typer.encode(), idB=owner.encode())
        self._context = context
        self.message: bytes = self._side.start()

    def keys(self, message: bytes) -> Keys:
        """Return the keys; ``message`` is the other side's.

        Raises:
            ProtocolError: it is no such message.
        """
        if len(message) != MESSAGE_NBYTES:
            raise ProtocolError("a proof has another length")
        try:
            key = self._side.finish(message)
        except (SPAKEError, NotOnCurve, ValueError, AssertionError) as error:
            raise ProtocolError(f"a proof is malformed: {type(error).__name__}") from None
        salt = hashlib.sha256(self._context).digest()
        derived = HKDF(SHA256(), 5 * KEY_NBYTES, salt, _LABEL).derive(key)
        return Keys(*(derived[at : at + KEY_NBYTES] for at in range(0, len(derived), KEY_NBYTES)))


def is_equal(proof: bytes, expected: bytes) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(proof, expected)


class Cipher:
    """Encrypts the messages of one side, in their order."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._count = 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")

    def seal(self, text: bytes) -> bytes:
        """Encrypt the next message."""
        return self._cipher.encrypt(self._nonce(), text, None)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt the next message.

        Raises:
            ProtocolError: somebody has changed it, or it is not the next one.
        """
        try:
            return self._cipher.decrypt(self._nonce(), sealed, None)
        except InvalidTag:
            raise ProtocolError("a message was changed on the way") from None
