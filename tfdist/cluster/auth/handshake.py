"""The first words on a connection between two workers: each says and proves who it is."""

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
"""Instead of `MAGIC`, by those who go on in TLS."""
HELLO_SECONDS = 5.0

_DIALLER = "tfdist worker that dials"
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
    """Learns who is at the other end, and proves in both directions that both hold the secret.

    Both say hello with a challenge. Then each proves the secret over both hellos, the one that
    dialled first; the other answers only to a hello, and proves nothing to one that did not prove
    itself. Without a secret the proofs are made with an empty one.

    On a `TlsSocket` all of this is said in TLS, once both have shown certificates that the other
    trusts.

    Args:
        sock: a connection that has just been made.
        mine: what this process says of itself.
        secret: the job's secret; "" for none.
        deadline: the `time.monotonic()` at which to give up.
        first: whether this process dialled.
        admit: looks at the other's hello once it is proven, and raises WireError to refuse it. At
            the end that was dialled this comes before the word that the other is accepted.
        name: what messages call the other, where this process dialled.

    Returns:
        What the other process says of itself. Nothing of it is checked but its form, its protocol
        and that it holds the secret.

    Raises:
        ClusterError: the one that was dialled holds another secret, or has another protocol.
        TlsError: the one that was dialled does not trust this process, or the other way round, or
            only one of the two uses TLS.
        WireError: the other is no tfdist worker, or one that does not fit.
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
    # The other end is about to read why.
    end_gently(sock)
    if first:
        raise TlsError(f"{mine}: no TLS with {name}: {reason}. {remedy}.")
    raise WireError(f"no TLS: {reason}; {remedy[:1].lower()}{remedy[1:]}")


_ALL_OR_NONE = f"Set {CERTIFICATE}, {KEY} and {CA} on all workers, or on none"


class _TlsMismatch(Exception):
    """Only one of the two uses TLS."""


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
            raise _TlsMismatch("it does not use TLS, and this worker does")
        sock.secure(deadline)
        opening = hello
    else:
        opening = MAGIC + hello
    if first:
        sock.sendall(opening)
    if not isinstance(sock, TlsSocket) and _read_magic(sock, deadline) != MAGIC:
        if not first:
            sock.sendall(MAGIC)
        raise _TlsMismatch("it uses TLS, and this worker does not")
    header, _ = read_frame(sock, HELLO_LIMIT, deadline)
    theirs = Identity.from_header(header)
    error = protocols_differ(mine, theirs)
    if error is None and not is_challenge(header.get("challenge")):
        raise WireError("it sent no hello")
    if not first:
        sock.sendall(opening)
    if error is not None:
        raise error if first else WireError(str(error))
    # What was understood is proven rather than what was sent: JSON has many ways to write it.
    said = (hello, encode(header)) if first else (encode(header), hello)
    if first:
        _prove(sock, secret, _DIALLER, said)
        _check(sock, secret, _LISTENER, said, deadline, mine, theirs)
        if admit:
            admit(theirs)
    else:
        _check(sock, secret, _DIALLER, said, deadline, mine, theirs)
        if admit:
            admit(theirs)
        _prove(sock, secret, _LISTENER, said)
    return theirs


def _read_magic(sock: socket.socket, deadline: float) -> bytes:
    """Reads byte by byte, so that one who speaks another protocol is found out at once."""
    said = b""
    while len(said) < len(MAGIC):
        said += read_exactly(sock, 1, deadline)
        if not MAGIC.startswith(said) and not TLS_MAGIC.startswith(said):
            raise WireError("it is no tfdist worker")
    return said


def _prove(sock: socket.socket, secret: str, role: str, said: tuple[bytes, bytes]) -> None:
    sock.sendall(encode({"kind": "proof", "proof": prove(secret, role, *said)}))


def _check(
    sock: socket.socket,
    secret: str,
    role: str,
    said: tuple[bytes, bytes],
    deadline: float,
    mine: Identity,
    theirs: Identity,
) -> None:
    """Reads the other's proof, and tells the one that dialled where it is wrong."""
    header, _ = read_frame(sock, HELLO_LIMIT, deadline)
    if role == _LISTENER and header["kind"] == "refused":
        own = "one is set here" if secret else "none is set here"
        raise ClusterError(
            f"{theirs} refused {mine}: the two do not hold the same secret ({own}). Set the same "
            f"{VARIABLE} on all workers."
        )
    if header["kind"] == "proof" and proves(header.get("proof"), secret, role, *said):
        return
    if role == _DIALLER:
        send_at_once(sock, encode({"kind": "refused"}))
    raise WireError(
        f"it says that it is {theirs}, and does not hold the secret; set the same {VARIABLE} on "
        f"all workers"
    )
