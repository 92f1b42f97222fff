"""Proves that a process has the job's secret, without revealing it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

VARIABLE = "TFDIST_SECRET"
"""The variable with the secret; messages name the variable and never contain the secret."""

_HEX = frozenset("0123456789abcdef")
_CHALLENGE_BYTES = 32


def new_secret() -> str:
    """A new random secret for one job."""
    return secrets.token_hex(32)


def new_challenge() -> str:
    """A random value that the peer's proof must cover; a new one for every connection."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def is_challenge(value: object) -> bool:
    """Whether a value has the form of a challenge."""
    return type(value) is str and len(value) == 2 * _CHALLENGE_BYTES and _HEX.issuperset(value)


def prove(secret: str, role: str, *transcript: bytes) -> str:
    """The proof of one end of a connection.

    Args:
        secret: the job's secret; "" for none.
        role: the protocol, and which end proves itself, so that neither end's proof can be
            reflected as the other's.
        transcript: everything sent so far, including the challenges of both ends.

    Returns:
        An HMAC-SHA256 (RFC 2104) in hexadecimal digits.

    Example:
        >>> prove("s", "dialer", b"a") == prove("s", "listener", b"a")
        False
    """
    # Digests have a fixed length, so different transcripts never concatenate to the same bytes.
    parts = [hashlib.sha256(part).digest() for part in (role.encode(), *transcript)]
    key = secret.encode(errors="surrogateescape")
    return hmac.digest(key, b"".join(parts), "sha256").hex()


def proves(proof: object, secret: str, role: str, *transcript: bytes) -> bool:
    """Whether a value is the proof that `prove` returns; compares in constant time."""
    expected = prove(secret, role, *transcript).encode()
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="surrogatepass"), expected
    )
