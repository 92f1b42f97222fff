"""Proves that a process holds the job's secret, without telling it."""

from __future__ import annotations

import hashlib
import hmac
import secrets

VARIABLE = "TFDIST_SECRET"
"""Where the secret comes from; named in messages, which never hold the secret itself."""

_HEX = frozenset("0123456789abcdef")
_CHALLENGE_BYTES = 32


def new_secret() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def new_challenge() -> str:
    """What the other end has to bring into its proof; made anew for every connection."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def is_challenge(value: object) -> bool:
    """Whether a value has the form of a challenge."""
    return type(value) is str and len(value) == 2 * _CHALLENGE_BYTES and _HEX.issuperset(value)


def prove(secret: str, role: str, *transcript: bytes) -> str:
    """The proof of one end of a connection.

    Args:
        secret: the job's secret; "" where it has none.
        role: which end gives the proof, and in which protocol; so what one end has said is no
            answer that the other could give back.
        transcript: all that was said so far, the challenges of both ends included.

    Returns:
        An HMAC-SHA256 (RFC 2104) in hexadecimal digits.

    Example:
        >>> prove("s", "dialler", b"a") == prove("s", "listener", b"a")
        False
    """
    # Digests have one length, so no two transcripts run together into the same text.
    parts = [hashlib.sha256(part).digest() for part in (role.encode(), *transcript)]
    key = secret.encode(errors="surrogateescape")
    return hmac.new(key, b"".join(parts), hashlib.sha256).hexdigest()


def proves(proof: object, secret: str, role: str, *transcript: bytes) -> bool:
    """Whether a value is the proof of these; takes the same time however much of it is right."""
    expected = prove(secret, role, *transcript).encode()
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="surrogatepass"), expected
    )
