"""Certificates for the tests, made once by make.sh: Python's library can make none.

`worker` is signed by `ca`, `expired` too, and `stranger` by `other_ca`; `locked.key` is the key of
`worker` under a passphrase.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def files(name: str = "worker", ca: str = "ca", key: str = "") -> dict[str, str]:
    """The fields of Options for TLS."""
    return {
        "tls_certificate": str(FOLDER / f"{name}.pem"),
        "tls_key": str(FOLDER / f"{key or name}.key"),
        "tls_ca": str(FOLDER / f"{ca}.pem"),
    }


def variables(name: str = "worker", ca: str = "ca", key: str = "") -> dict[str, str]:
    """The same as environment variables."""
    return {f"TFDIST_{field.upper()}": path for field, path in files(name, ca, key).items()}
