"""Digests of chunks of bytes: by them workers, disks and stores know what they have in common without sending it."""

import hashlib
from collections.abc import Iterable

CHUNK_NBYTES = 1 << 20
"""Size of a chunk; the last one of a tensor may be smaller."""

DIGEST_NBYTES = 16
"""Size of a digest."""


def digest_of(data: bytes | memoryview, kind: str) -> bytes:
    """Return the digest of bytes of a kind: 16 bytes of BLAKE2b of the kind, a line feed, and the bytes."""
    found = hashlib.blake2b(f"{kind}\n".encode(), digest_size=DIGEST_NBYTES)
    found.update(data)
    return found.digest()


def root_of(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a list of digests."""
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_NBYTES).digest()
