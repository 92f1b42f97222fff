"""Encodes errors for other workers, so that all raise the same error."""

from __future__ import annotations

from tfdist._src.cluster.net.framing import Header, WireError
from tfdist.errors import (
    ClusterError,
    PeerLostError,
    ProgramMismatchError,
    RendezvousError,
    TfdistError,
    TlsError,
    UnsupportedError,
)

_TYPES: dict[str, type[TfdistError]] = {
    error.__name__: error
    for error in (
        ClusterError,
        PeerLostError,
        ProgramMismatchError,
        RendezvousError,
        TlsError,
        UnsupportedError,
    )
}


def encode_error(kind: str, error: TfdistError) -> Header:
    """The header of a frame of the given kind that carries the error."""
    return {"kind": kind, "type": type(error).__name__, "message": str(error)}


def decode_error(header: Header) -> TfdistError:
    """The error that a frame carries.

    Raises:
        WireError: the header carries no known error.
    """
    kind, message = header.get("type"), header.get("message")
    if kind not in _TYPES or not isinstance(message, str):
        raise WireError("it sent an invalid error")
    return _TYPES[kind](message)
