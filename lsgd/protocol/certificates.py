"""The certificate of a run, by which members recognize each other when they exchange tensors over TLS."""

import datetime
import hashlib

_NAME = "lsgd"
_SERIAL = 1
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)  # machines' clocks do not matter


def run_certificate(secret: bytes, run: str) -> bytes:
    """Return the key and the certificate of a run as PEM text: always the same for the same arguments.

    So a restarted global server hands out the same one, and no file contains it. All members of a run share this
    certificate and trust no other.

    Args:
        secret: known to the global server alone; nobody can derive the certificate's key without it.
        run: identity of the run.
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
