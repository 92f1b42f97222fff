"""Authenticates both ends of a new connection.

Both ends prove that they have the job's secret, with an HMAC over everything sent so far. The
dialer proves it first; only then does the listener send its own identity and proof. If the job has
no secret, the secret is empty. With TLS, the proofs also cover the certificates of both ends, so
that a process between the two ends cannot forward the proofs.

The protocol is a generator that does no I/O, so one thread can run many handshakes concurrently.
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
    """Returns a new random value for one connection; the peer's proof must cover it."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def is_challenge(value: object) -> bool:
    """Whether a value has the form of a challenge."""
    return type(value) is str and len(value) == 2 * _CHALLENGE_BYTES and _HEX.issuperset(value)


def prove(secret: str, role: str, *transcript: bytes) -> str:
    """Returns the proof of one end of a connection.

    Args:
        secret: the job's secret; "" for none.
        role: the protocol and the end that proves itself, so that neither end's proof can be
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
    """Requests bytes from the peer.

    Attributes:
        count: the number of bytes, which is bounded.
        some: whether fewer bytes suffice; at least one byte is always needed.
    """

    count: int
    some: bool = False


@dataclass(frozen=True)
class WriteBytes:
    """Requests that these bytes be sent."""

    data: bytes


@dataclass(frozen=True)
class Secure:
    """Requests TLS; answered with the digests of this end's and the peer's certificate."""


Steps = Generator[ReadBytes | WriteBytes | Secure, bytes, Identity]


class TlsMismatch(Exception):
    """Only one of the two ends uses TLS."""


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

    On a `TlsSocket`, all of this happens inside TLS, after both ends have verified each other's
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
        The peer's identity. Only its form, protocol and proof of the secret are checked.

    Raises:
        ClusterError: this process dialed, and the peer has another secret or protocol.
        TlsError: this process dialed, and one of the two ends does not trust the other or does not
            use TLS.
        WireError: the peer is not a tfdist worker, or was rejected.
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
        # Let the peer read the error.
        end_gently(sock)
        if first:
            raise dialer_error(error, mine, name) from None
        raise framing.WireError(f"no TLS: {problem}") from None


def dialer_error(error: Exception, mine: Identity, name: str) -> Exception:
    """Returns the error to raise at the dialer; it names both ends if they cannot use TLS."""
    problem = tls_problem(error)
    return TlsError(f"{mine}: no TLS with {name}: {problem}.") if problem else error


def tls_problem(error: Exception) -> str | None:
    """Returns why two ends cannot use TLS, and the remedy; None for any other error."""
    if isinstance(error, TlsMismatch):
        return (
            f"{error}. Set TFDIST_TLS_CERTIFICATE, TFDIST_TLS_KEY and TFDIST_TLS_CA on all "
            "workers, or on none"
        )
    reason = explain(error) if isinstance(error, ssl.SSLError) else None
    return f"{reason}. {REMEDY}" if reason else None


def dialing(mine: Identity, secret: str, tls: bool, name: str, admit: Admit | None = None) -> Steps:
    """The dialer's side of the handshake."""
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
    """The listener's side of the handshake.

    Args:
        mine: the identity of this process.
        secret: the job's secret.
        tls: whether the connection uses TLS.
        admit: see `handshake`.
        answer_as: returns the identity to present to an admitted peer; `mine` by default.
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
    """Reads the first bytes as they arrive, so that another protocol is detected immediately."""
    magic = b""
    while len(magic) < len(MAGIC):
        magic += yield ReadBytes(len(MAGIC) - len(magic), some=True)
        if not MAGIC.startswith(magic) and not TLS_MAGIC.startswith(magic):
            raise framing.WireError("it does not speak tfdist's protocol")
    return magic


def _frame() -> Generator[ReadBytes | WriteBytes | Secure, bytes, tuple[framing.Header, bytes]]:
    """Reads a frame; returns its header and all of its bytes."""
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
    """Whether only authenticated processes, or only processes of this host, can connect to the job.

    Args:
        topology: the job's workers. On loopback, only processes of this host reach them.
        options: `secret` and the TLS options are used.

    Example:
        >>> is_closed(Topology(), Options())
        True
    """
    return bool(options.secret) or options.tls or all(map(_is_loopback, _hosts(topology)))


def check_security(topology: Topology, options: Options, warn: Announce) -> None:
    """Warns about a job that is open to strangers, or refuses it.

    Args:
        topology: the job's workers.
        options: `security` selects the reaction; `secret` and the TLS options are used.
        warn: called with the warning, on rank 0.

    Raises:
        ClusterError: the job is open, and `TFDIST_SECURITY=required`.
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
    """Describes briefly how the job's processes authenticate one another."""
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
