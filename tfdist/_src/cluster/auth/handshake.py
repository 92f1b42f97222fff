"""Authenticates both ends of a new connection.

The dialer is the end that opened the connection; the listener is the end that accepted it. Each end
proves that it knows the job's secret. The proof is an HMAC of the messages that have been sent so
far, with the secret as the key. The dialer sends its proof first. The listener sends its own
identity and its own proof only after it has verified the dialer's proof. If the job has no secret,
the key is the empty string. If the connection uses TLS, the proofs also cover the certificates of
both ends. A man in the middle with another certificate can therefore not relay the proofs.

`dialing` and `listening` are generators that do no I/O. They yield the operations to perform, so
one thread can run many handshakes concurrently.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass

from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import Topology, split
from tfdist._src.cluster.net import framing
from tfdist._src.cluster.net.sockets import end_gently
from tfdist._src.cluster.net.tls import REMEDY, TlsSocket, explain
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.options import Options
from tfdist.errors import ClusterError, TlsError

_HEX = frozenset("0123456789abcdef")
_CHALLENGE_BYTES = 32


def new_secret() -> str:
    """Returns a new random secret for one job."""
    return secrets.token_hex(32)


def new_challenge() -> str:
    """Returns a new random value for one connection, so that an old proof cannot be replayed."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def is_challenge(value: object) -> bool:
    """Whether a value has the type, length and digits of a challenge."""
    return type(value) is str and len(value) == 2 * _CHALLENGE_BYTES and _HEX.issuperset(value)


def prove(secret: str, role: str, *transcript: bytes) -> str:
    """Returns the proof that one end of a connection knows the secret.

    Args:
        secret: the job's secret; "" if the job has no secret.
        role: a text that names the protocol and the end that sends the proof. Because of this text,
            an end cannot send the proof of the other end back as its own.
        transcript: the messages sent so far, including the challenges of both ends.

    Returns:
        An HMAC-SHA256 (RFC 2104) in hexadecimal digits.

    Example:
        >>> prove("s", "dialer", b"a") == prove("s", "listener", b"a")
        False
    """
    # The digests all have the same length, so two different transcripts never result in the same
    # concatenation.
    parts = [hashlib.sha256(part).digest() for part in (role.encode(), *transcript)]
    key = secret.encode(errors="surrogateescape")
    return hmac.digest(key, b"".join(parts), "sha256").hex()


def proves(proof: object, secret: str, role: str, *transcript: bytes) -> bool:
    """Whether `proof` is the proof that `prove` returns.

    The two proofs are compared in constant time, so that the time reveals nothing about the secret.
    """
    expected = prove(secret, role, *transcript).encode()
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="surrogatepass"), expected
    )


MAGIC = b"tfdist\r\n"
TLS_MAGIC = b"tfdists\n"
"""Sent instead of `MAGIC` by a worker that uses TLS."""
HELLO_SECONDS = 5.0

_DIALER = "tfdist worker that dials"
_LISTENER = "tfdist worker that listens"

Admit = Callable[[Identity], None]
AnswerAs = Callable[[Identity], Identity]


@dataclass(frozen=True)
class ReadBytes:
    """Asks the caller of the generator to read bytes from the connection.

    Attributes:
        count: the number of bytes to read. It has an upper limit, even if the peer is malicious.
        some: whether the caller may read fewer bytes, but at least one.
    """

    count: int
    some: bool = False


@dataclass(frozen=True)
class WriteBytes:
    """Asks the caller of the generator to send bytes to the peer."""

    data: bytes


@dataclass(frozen=True)
class Secure:
    """Asks the caller of the generator to perform the TLS handshake.

    The caller sends the digests of this end's and the peer's certificate to the generator.
    """


Steps = Generator[ReadBytes | WriteBytes | Secure, bytes, Identity]


class TlsMismatch(Exception):
    """Raised when only one of the two ends uses TLS."""


def handshake(
    sock: socket.socket,
    mine: Identity,
    secret: str,
    deadline: float,
    *,
    first: bool,
    admit: Admit | None = None,
    name: str = "the other end",
) -> Identity:
    """Identifies the peer and authenticates both ends with the job's secret.

    If `sock` is a `TlsSocket`, the two ends first perform the TLS handshake, in which they verify
    each other's certificates. The identities and proofs are then sent over TLS.

    Args:
        sock: a newly established connection.
        mine: the identity of this process.
        secret: the job's secret; "" if the job has no secret.
        deadline: the `time.monotonic()` at which to give up.
        first: whether this process is the dialer.
        admit: called with the peer's identity once the peer is authenticated; raises WireError to
            reject the peer. If this process is the listener, this happens before it sends its own
            proof.
        name: the peer's name in the error messages of the dialer.

    Returns:
        The peer's identity. The handshake has verified that the peer knows the secret and that both
        ends use the same protocol version. The caller must check the other fields.

    Raises:
        ClusterError: this process is the dialer, and the peer has a different secret or protocol
            version.
        TlsError: this process is the dialer, and one of the two ends does not trust the other or
            does not use TLS.
        WireError: the peer is not a tfdist worker, or this process has rejected the peer.
        OSError: the connection ended, or the deadline passed.
    """
    tls = isinstance(sock, TlsSocket)
    steps = (
        dialing(mine, secret, tls, name, admit) if first else listening(mine, secret, tls, admit)
    )
    try:
        return _run(sock, steps, deadline)
    except (TlsMismatch, ssl.SSLError) as error:
        if (problem := tls_problem(error)) is None:
            raise
        # Give the peer time to read the TLS error before the connection is closed.
        end_gently(sock)
        if first:
            raise dialer_error(error, mine, name) from None
        raise framing.WireError(f"no TLS: {problem}") from None


def dialer_error(error: Exception, mine: Identity, name: str) -> Exception:
    """Returns the error that the dialer raises after a failed handshake.

    If `error` is a problem with TLS, the result is a TlsError that names both ends. Otherwise, the
    result is `error`.
    """
    problem = tls_problem(error)
    return TlsError(f"{mine}: no TLS with {name}: {problem}.") if problem else error


def tls_problem(error: Exception) -> str | None:
    """Returns why two ends cannot use TLS and what to do about it; None for other errors."""
    if isinstance(error, TlsMismatch):
        return (
            f"{error}. Set TFDIST_TLS_CERTIFICATE, TFDIST_TLS_KEY and TFDIST_TLS_CA on all "
            "workers, or on none"
        )
    reason = explain(error) if isinstance(error, ssl.SSLError) else None
    return f"{reason}. {REMEDY}" if reason else None


def dialing(mine: Identity, secret: str, tls: bool, name: str, admit: Admit | None = None) -> Steps:
    """Performs the dialer's part of the handshake."""
    hello = framing.encode({"kind": "hello", **vars(mine), "challenge": new_challenge()})
    certificates: tuple[bytes, ...] = ()
    if tls:
        yield WriteBytes(TLS_MAGIC)
        if (yield from _magic()) != TLS_MAGIC:
            raise TlsMismatch("it does not use TLS, but this worker does")
        digests = yield Secure()
        certificates = (digests[:32], digests[32:])
        yield WriteBytes(hello)
    else:
        yield WriteBytes(MAGIC + hello)
        if (yield from _magic()) != MAGIC:
            raise TlsMismatch("it uses TLS, but this worker does not")
    header, challenge = yield from _frame()
    if header["kind"] != "challenge" or not is_challenge(header.get("challenge")):
        raise framing.WireError("it sent no challenge")
    if header.get("protocol") != mine.protocol:
        raise ClusterError(_other_protocol(mine, header.get("protocol"), name))
    transcript = (hello, challenge, *certificates)
    yield WriteBytes(
        framing.encode({"kind": "proof", "proof": prove(secret, _DIALER, *transcript)})
    )
    header, _ = yield from _frame()
    if header["kind"] == "refused":
        here = "one is set here" if secret else "none is set here"
        raise ClusterError(
            f"{name} refused {mine}: their secrets differ ({here}). Set the same "
            f"TFDIST_SECRET on all {mine.kind}."
        )
    theirs = Identity.from_header({**header, "kind": "hello"})
    said = framing.encode({"kind": "hello", **vars(theirs)})
    if header["kind"] != "proof" or not proves(
        header.get("proof"), secret, _LISTENER, *transcript, said
    ):
        raise framing.WireError(_no_secret(theirs))
    if admit:
        admit(theirs)
    return theirs


def listening(
    mine: Identity,
    secret: str,
    tls: bool,
    admit: Admit | None = None,
    answer_as: AnswerAs | None = None,
) -> Steps:
    """Performs the listener's part of the handshake.

    Args:
        mine: the identity of this process.
        secret: the job's secret.
        tls: whether the connection uses TLS.
        admit: see `handshake`.
        answer_as: called with the identity of an admitted peer; returns the identity that this
            process sends to that peer. By default, this process sends `mine`.
    """
    certificates: tuple[bytes, ...] = ()
    magic = yield from _magic()
    if tls:
        yield WriteBytes(TLS_MAGIC)
        if magic != TLS_MAGIC:
            raise TlsMismatch("it does not use TLS, but this worker does")
        digests = yield Secure()
        certificates = (digests[32:], digests[:32])
    elif magic != MAGIC:
        yield WriteBytes(MAGIC)
        raise TlsMismatch("it uses TLS, but this worker does not")
    header, hello = yield from _frame()
    opening = b"" if tls else MAGIC
    challenge = framing.encode(
        {"kind": "challenge", "protocol": mine.protocol, "challenge": new_challenge()}
    )
    protocol = header.get("protocol")
    if header["kind"] == "hello" and type(protocol) is int and protocol != mine.protocol:
        yield WriteBytes(opening + challenge)
        raise framing.WireError(_other_protocol(mine, protocol, "the other end"))
    theirs = Identity.from_header(header)
    if not is_challenge(header.get("challenge")):
        raise framing.WireError("it sent no hello")
    yield WriteBytes(opening + challenge)
    transcript = (hello, challenge, *certificates)
    header, _ = yield from _frame()
    if header["kind"] != "proof" or not proves(header.get("proof"), secret, _DIALER, *transcript):
        yield WriteBytes(framing.encode({"kind": "refused"}))
        raise framing.WireError(_no_secret(theirs))
    if admit:
        admit(theirs)
    if answer_as:
        mine = answer_as(theirs)
    said = framing.encode({"kind": "hello", **vars(mine)})
    proof = prove(secret, _LISTENER, *transcript, said)
    yield WriteBytes(framing.encode({"kind": "proof", **vars(mine), "proof": proof}))
    return theirs


def _magic() -> Generator[ReadBytes | WriteBytes | Secure, bytes, bytes]:
    """Reads the first bytes, and fails at the first byte that is not part of tfdist's protocol."""
    magic = b""
    while len(magic) < len(MAGIC):
        magic += yield ReadBytes(len(MAGIC) - len(magic), some=True)
        if not MAGIC.startswith(magic) and not TLS_MAGIC.startswith(magic):
            raise framing.WireError("it does not speak tfdist's protocol")
    return magic


def _frame() -> Generator[ReadBytes | WriteBytes | Secure, bytes, tuple[framing.Header, bytes]]:
    """Reads a frame; returns the header of the frame and the bytes of the whole frame."""
    steps = framing.frame_steps(framing.HELLO_LIMIT)
    count = next(steps)
    said = b""
    while True:
        part = yield ReadBytes(count)
        said += part
        try:
            count = steps.send(part)
        except StopIteration as end:
            header: framing.Header = end.value[0]
            return header, said


def _run(sock: socket.socket, steps: Steps, deadline: float) -> Identity:
    """Runs a handshake on a blocking socket."""
    try:
        step = next(steps)
        while True:
            answer = b""
            if isinstance(step, ReadBytes):
                read = framing.read_some if step.some else framing.read_exactly
                answer = read(sock, step.count, deadline)
            elif isinstance(step, WriteBytes):
                sock.sendall(step.data)
            else:
                assert isinstance(sock, TlsSocket)
                sock.secure(deadline)
                answer = sock.certificate_digests()
            step = steps.send(answer)
    except StopIteration as end:
        identity: Identity = end.value
        return identity


def _other_protocol(mine: Identity, theirs: object, name: str) -> str:
    return (
        f"The workers run different protocols of tfdist: {mine.protocol} here; {theirs} at {name}. "
        f"Install the same version of tfdist everywhere."
    )


def _no_secret(theirs: Identity) -> str:
    return (
        f"it claims to be {theirs}, but does not have the secret; set the same "
        f"TFDIST_SECRET on all {theirs.kind}"
    )


_REMEDY = (
    "Give all workers the same TFDIST_SECRET (`tfdist run` creates one; on Kubernetes, mount a "
    "Secret as this variable; with Slurm, `export TFDIST_SECRET=$(openssl rand -hex 32)` before "
    "srun), or TLS certificates"
)


def is_closed(topology: Topology, options: Options) -> bool:
    """Whether the job is protected from processes that do not belong to it.

    A job is protected if it has a secret or uses TLS. It is also protected if all workers listen at
    loopback addresses, because only processes of this host can connect to these addresses.

    Args:
        topology: the job's workers.
        options: the job's options. Only `secret` and the TLS options are used.

    Example:
        >>> is_closed(Topology(), Options())
        True
    """
    return bool(options.secret) or options.tls or all(map(_is_loopback, _hosts(topology)))


def check_security(topology: Topology, options: Options, warn: Announce) -> None:
    """Warns or raises an error if any process could connect to the job (see `is_closed`).

    Args:
        topology: the job's workers.
        options: the job's options. `security` determines whether this function warns, raises an
            error, or does nothing. `secret` and the TLS options are also used.
        warn: called with the text of the warning. Only rank 0 warns.

    Raises:
        ClusterError: the job is not protected, and `TFDIST_SECURITY=required` is set.
    """
    if options.security == "none" or is_closed(topology, options):
        return
    if options.security == "required":
        raise ClusterError(
            f"{topology.me}: TFDIST_SECURITY=required, but the job has neither a secret nor TLS. "
            f"{_REMEDY}."
        )
    if topology.is_chief:
        warn(
            f"anyone who can reach the workers' ports can take part in this job: it has "
            f"neither a secret nor TLS. {_REMEDY}; TFDIST_SECURITY=none silences this warning, "
            f"TFDIST_SECURITY=required makes it an error."
        )


def summary(topology: Topology, options: Options) -> str:
    """Returns a short description of how the job's processes authenticate one another."""
    if options.tls:
        return "TLS certificates and a secret" if options.secret else "TLS certificates"
    if options.secret:
        return "a secret"
    if is_closed(topology, options):
        return "none; only processes of this host can connect"
    return f"none: anyone who can reach the workers' ports can take part. {_REMEDY}"


def _hosts(topology: Topology) -> set[str]:
    return {split(worker.address)[0] for worker in topology.workers if worker.address}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
