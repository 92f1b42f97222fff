"""The handshake on a new connection: both workers identify and authenticate themselves."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import asdict

from tfdist.cluster.auth.compatibility import protocols_differ
from tfdist.cluster.auth.hmac_challenge import VARIABLE, is_challenge, new_challenge, prove, proves
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.framing import HELLO_LIMIT, WireError, encode, read_exactly, read_frame
from tfdist.cluster.net.sockets import end_gently, send_at_once
from tfdist.cluster.net.tls import CA, CERTIFICATE, KEY, REMEDY, explain
from tfdist.cluster.net.tls_socket import TlsSocket
from tfdist.errors import ClusterError, TlsError

MAGIC = b"tfdist\r\n"
TLS_MAGIC = b"tfdists\n"
"""Sent instead of `MAGIC` by a worker that uses TLS."""
HELLO_SECONDS = 5.0

_DIALER = "tfdist worker that dials"
_LISTENER = "tfdist worker that listens"


def handshake(
    sock: socket.socket,
    mine: Identity,
    secret: str,
    deadline: float,
    *,
    first: bool,
    admit: Callable[[Identity], None] | None = None,
    name: str = "the other end",
) -> Identity:
    """Identifies the peer and authenticates both ends with the job's secret.

    Both ends send a hello with a challenge. Then each proves, over both hellos, that it has the
    secret: first the dialer, then the listener. The listener sends nothing before it has received a
    hello, and no proof to a peer whose own proof failed. Without a secret, an empty one is used.

    On a `TlsSocket` all of this happens inside TLS, after both ends have verified each other's
    certificates.

    Args:
        sock: a newly established connection.
        mine: the identity of this process.
        secret: the job's secret; "" for none.
        deadline: the `time.monotonic()` at which to give up.
        first: whether this process is the dialer.
        admit: inspects the peer's identity once it is authenticated, and raises WireError to reject
            it. A listener calls this before it sends its own proof.
        name: how the dialer's messages refer to the peer.

    Returns:
        The peer's identity. Only its form, its protocol and its proof of the secret are checked.

    Raises:
        ClusterError: this process dialed, and the peer has another secret or protocol.
        TlsError: this process dialed, and one of the two does not trust the other or does not use
            TLS.
        WireError: the peer is not a tfdist worker, or was rejected.
        OSError: the connection ended, or the deadline passed.
    """
    try:
        return _handshake(sock, mine, secret, deadline, first, admit)
    except _TlsMismatch as mismatch:
        reason, remedy = str(mismatch), _ALL_OR_NONE
    except ssl.SSLError as error:
        reason, remedy = explain(error) or "", REMEDY
        if not reason:
            raise
    # Let the peer read the reason.
    end_gently(sock)
    if first:
        raise TlsError(f"{mine}: no TLS with {name}: {reason}. {remedy}.")
    raise WireError(f"no TLS: {reason}; {remedy[:1].lower()}{remedy[1:]}")


_ALL_OR_NONE = f"Set {CERTIFICATE}, {KEY} and {CA} on all workers, or on none"


class _TlsMismatch(Exception):
    """Only one of the two ends uses TLS."""


def _handshake(
    sock: socket.socket,
    mine: Identity,
    secret: str,
    deadline: float,
    first: bool,
    admit: Callable[[Identity], None] | None,
) -> Identity:
    hello = encode({"kind": "hello", **asdict(mine), "challenge": new_challenge()})
    if isinstance(sock, TlsSocket):
        if first:
            sock.sendall(TLS_MAGIC)
        theirs_magic = _read_magic(sock, deadline)
        if not first:
            sock.sendall(TLS_MAGIC)
        if theirs_magic != TLS_MAGIC:
            raise _TlsMismatch("it does not use TLS, but this worker does")
        sock.secure(deadline)
        opening = hello
    else:
        opening = MAGIC + hello
    if first:
        sock.sendall(opening)
    if not isinstance(sock, TlsSocket) and _read_magic(sock, deadline) != MAGIC:
        if not first:
            sock.sendall(MAGIC)
        raise _TlsMismatch("it uses TLS, but this worker does not")
    header, _ = read_frame(sock, HELLO_LIMIT, deadline)
    theirs = Identity.from_header(header)
    error = protocols_differ(mine, theirs)
    if error is None and not is_challenge(header.get("challenge")):
        raise WireError("it sent no hello")
    if not first:
        sock.sendall(opening)
    if error is not None:
        raise error if first else WireError(str(error))
    # The proof covers the decoded hello, re-encoded: JSON has many encodings of the same value.
    transcript = (hello, encode(header)) if first else (encode(header), hello)
    if first:
        _prove(sock, secret, _DIALER, transcript)
        _check(sock, secret, _LISTENER, transcript, deadline, mine, theirs)
        if admit:
            admit(theirs)
    else:
        _check(sock, secret, _DIALER, transcript, deadline, mine, theirs)
        if admit:
            admit(theirs)
        _prove(sock, secret, _LISTENER, transcript)
    return theirs


def _read_magic(sock: socket.socket, deadline: float) -> bytes:
    """Reads byte by byte, so that a peer with another protocol is detected immediately."""
    magic = b""
    while len(magic) < len(MAGIC):
        magic += read_exactly(sock, 1, deadline)
        if not MAGIC.startswith(magic) and not TLS_MAGIC.startswith(magic):
            raise WireError("it is not a tfdist worker")
    return magic


def _prove(sock: socket.socket, secret: str, role: str, transcript: tuple[bytes, bytes]) -> None:
    sock.sendall(encode({"kind": "proof", "proof": prove(secret, role, *transcript)}))


def _check(
    sock: socket.socket,
    secret: str,
    role: str,
    transcript: tuple[bytes, bytes],
    deadline: float,
    mine: Identity,
    theirs: Identity,
) -> None:
    """Checks the peer's proof; a listener tells the dialer if it is wrong."""
    header, _ = read_frame(sock, HELLO_LIMIT, deadline)
    if role == _LISTENER and header["kind"] == "refused":
        here = "one is set here" if secret else "none is set here"
        raise ClusterError(
            f"{theirs} refused {mine}: their secrets differ ({here}). Set the same {VARIABLE} on "
            f"all workers."
        )
    if header["kind"] == "proof" and proves(header.get("proof"), secret, role, *transcript):
        return
    if role == _DIALER:
        send_at_once(sock, encode({"kind": "refused"}))
    raise WireError(
        f"it claims to be {theirs}, but does not have the secret; set the same {VARIABLE} on all "
        f"workers"
    )
