"""The first words on a connection between two workers: each says and proves who it is."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict

from tfdist.cluster.agreement import protocols_differ
from tfdist.cluster.hello import Hello
from tfdist.cluster.proof import VARIABLE, is_challenge, new_challenge, prove, proves
from tfdist.cluster.sockets import send_at_once
from tfdist.cluster.wire import HELLO_LIMIT, WireError, encode, read_exactly, read_frame
from tfdist.errors import ClusterError

MAGIC = b"tfdist\r\n"
HELLO_SECONDS = 5.0

_DIALLER = "tfdist worker that dials"
_LISTENER = "tfdist worker that listens"


def handshake(
    sock: socket.socket,
    mine: Hello,
    secret: str,
    deadline: float,
    *,
    first: bool,
    admit: Callable[[Hello], None] | None = None,
) -> Hello:
    """Learns who is at the other end, and proves in both directions that both hold the secret.

    Both say hello with a challenge. Then each proves the secret over both hellos, the one that
    dialled first; the other answers only to a hello, and proves nothing to one that did not prove
    itself. Without a secret the proofs are made with an empty one.

    Args:
        sock: a connection that has just been made.
        mine: what this process says of itself.
        secret: the job's secret; "" for none.
        deadline: the `time.monotonic()` at which to give up.
        first: whether this process dialled.
        admit: looks at the other's hello once it is proven, and raises WireError to refuse it. At
            the end that was dialled this comes before the word that the other is accepted.

    Returns:
        What the other process says of itself. Nothing of it is checked but its form, its protocol
        and that it holds the secret.

    Raises:
        ClusterError: the one that was dialled holds another secret, or has another protocol.
        WireError: the other is no tfdist worker, or one that does not fit.
        OSError: the connection ended, or the deadline passed.
    """
    hello = encode({"kind": "hello", **asdict(mine), "challenge": new_challenge()})
    if first:
        sock.sendall(MAGIC + hello)
    # Byte by byte, so that one who speaks another protocol is found out at once.
    for position in range(len(MAGIC)):
        if read_exactly(sock, 1, deadline) != MAGIC[position : position + 1]:
            raise WireError("it is no tfdist worker")
    header, _ = read_frame(sock, HELLO_LIMIT, deadline)
    theirs = Hello.from_header(header)
    error = protocols_differ(mine, theirs)
    if error is None and not is_challenge(header.get("challenge")):
        raise WireError("it sent no hello")
    if not first:
        sock.sendall(MAGIC + hello)
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


def _prove(sock: socket.socket, secret: str, role: str, said: tuple[bytes, bytes]) -> None:
    sock.sendall(encode({"kind": "proof", "proof": prove(secret, role, *said)}))


def _check(
    sock: socket.socket,
    secret: str,
    role: str,
    said: tuple[bytes, bytes],
    deadline: float,
    mine: Hello,
    theirs: Hello,
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
