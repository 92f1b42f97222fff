"""Mutual TLS between workers, with certificates that the job's CA has signed."""

from __future__ import annotations

import errno
import hashlib
import selectors
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

from tfdist._src.options import Options, Variable
from tfdist.errors import TlsError


class TlsSocket(ssl.SSLSocket):
    """A socket that can use TLS, created by `Tls.wrap`.

    This class differs from `ssl.SSLSocket` in two ways: a non-blocking operation that would block
    raises BlockingIOError, and the connection can be shut down in one direction only. It is not
    thread-safe.
    """

    own_certificate = b""
    """The certificate of this end, in DER encoding."""
    _secured = False

    def secure(self, deadline: float) -> None:
        """Performs the TLS handshake; both ends must do this at the same time.

        Args:
            deadline: the `time.monotonic()` at which to give up.

        Raises:
            ssl.SSLError: the two ends do not trust each other, or their versions of TLS are
                incompatible.
            OSError: the connection ended, or the deadline passed.
        """
        seconds = self.gettimeout()
        self.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            self.do_handshake()
        except TimeoutError:
            raise TimeoutError("it was silent or too slow") from None
        self.settimeout(seconds)
        self._secured = True

    def begin(self) -> int | None:
        """Continues the TLS handshake of a non-blocking socket as far as possible.

        Returns:
            None if the handshake is complete. Otherwise, the `selectors` event to wait for before
            the next call of this method.

        Raises:
            ssl.SSLError: the two ends do not trust each other, or their versions of TLS are
                incompatible.
            OSError: the connection ended.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        self._secured = True
        return None

    def certificate_digests(self) -> bytes:
        """Returns the SHA-256 digests of this end's and the peer's certificate, 32 bytes each."""
        both = (self.own_certificate, self.getpeercert(binary_form=True) or b"")
        return b"".join(hashlib.sha256(one).digest() for one in both)

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receives and decrypts data; with MSG_PEEK, returns raw data and leaves it unread."""
        if not self._secured or flags & socket.MSG_PEEK:
            return socket.socket.recv(self, buflen, flags)
        seconds = self.gettimeout()
        if flags & socket.MSG_DONTWAIT:
            self.settimeout(0)
        try:
            return super().recv(buflen)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "not yet") from None
        finally:
            if seconds != 0:
                self.settimeout(seconds)

    def send(self, data: Any, flags: int = 0) -> int:
        """Encrypts and sends data.

        Once TLS is used, this sends all of the data or raises BlockingIOError. After
        BlockingIOError, the caller must send the same data again.
        """
        if not self._secured:
            return socket.socket.send(self, data, flags)
        seconds = self.gettimeout()
        if flags & socket.MSG_DONTWAIT:
            self.settimeout(0)
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, "not yet") from None
        finally:
            if seconds != 0:
                self.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        """Shuts down one direction; data in the other direction can still be received."""
        socket.socket.shutdown(self, how)


def in_the_clear(sock: socket.socket) -> socket.socket:
    """Returns the plain socket of a connection, which no longer uses TLS.

    Both ends must do this after they have read all data that was sent over TLS.
    """
    return socket.socket(fileno=sock.detach()) if isinstance(sock, TlsSocket) else sock


_MAX_ROUNDS = 10


@dataclass(frozen=True)
class Tls:
    """The TLS contexts of this worker, created by `load`.

    Attributes:
        server: the context for the connections that this worker accepts.
        client: the context for the connections that this worker opens.
        certificate: the certificate of this worker, in DER encoding.
        subject: the subject of the certificate.
        expires: the expiration date of the certificate.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    subject: str
    expires: str

    @classmethod
    def load(cls, options: Options) -> Tls | None:
        """Reads the certificate, the key and the CA from their files.

        This also checks that two workers with these files would trust each other.

        Args:
            options: the job's options. `tls_certificate`, `tls_key` and `tls_ca` are used.

        Returns:
            The contexts; None if the job does not use TLS.

        Raises:
            TlsError: a file is missing or invalid, the files do not belong together, or the
                certificate has expired.
        """
        if not options.tls:
            return None
        server, client = (
            _context(protocol, options)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        server.num_tickets = 0  # no tickets are needed, because TLS sessions are never resumed
        subject, expires, certificate = _check_trusted(server, client, options)
        return cls(server, client, certificate, subject, expires)

    def wrap(self, sock: socket.socket, *, dialed: bool) -> TlsSocket:
        """Converts a socket to a `TlsSocket`, which sends plaintext until the TLS handshake.

        Args:
            sock: a connected socket. The returned object takes ownership of it.
            dialed: whether this process has opened the connection.

        Raises:
            OSError: the connection has ended.
        """
        context = self.client if dialed else self.server
        try:
            wrapped = context.wrap_socket(
                sock, server_side=not dialed, do_handshake_on_connect=False
            )
        except BaseException:
            sock.close()
            raise
        assert isinstance(wrapped, TlsSocket)
        wrapped.own_certificate = self.certificate
        return wrapped


def explain(error: ssl.SSLError) -> str | None:
    """Returns why two workers cannot use TLS, as a clause in which "it" is the peer.

    Returns:
        The reason. None if the error has another cause, for example if the connection has ended.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    reason = str(getattr(error, "reason", None) or "")
    _, alert, words = reason.partition("ALERT_")
    if alert:
        return f"it does not accept this worker's certificate ({_words(words)})"
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "it sent no certificate"
    if not reason or isinstance(error, ssl.SSLEOFError) or "EOF" in reason:
        return None
    return f"the two cannot agree on TLS ({_words(reason)})"


REMEDY = (
    "Give all workers unexpired certificates signed by the CA that TFDIST_TLS_CA names on all of "
    "them"
)


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _context(protocol: int, options: Options) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_RENEGOTIATION
    # A worker is any process with a certificate from the job's CA. The certificate does not have to
    # contain the worker's host name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, Variable.TLS_CA, options.tls_ca)
    # This only validates the certificate. The errors of `load_cert_chain` would not tell which file
    # is invalid.
    _trust(ssl.SSLContext(protocol), Variable.TLS_CERTIFICATE, options.tls_certificate)
    _read(Variable.TLS_KEY, options.tls_key)
    try:
        context.load_cert_chain(options.tls_certificate, options.tls_key, _no_passphrase)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error.reason):
            raise TlsError(
                f"The key in {options.tls_key} does not match the certificate in "
                f"{options.tls_certificate}: correct TFDIST_TLS_KEY or TFDIST_TLS_CERTIFICATE."
            ) from None
        raise TlsError(
            f"TFDIST_TLS_KEY: {options.tls_key} contains no PEM private key usable without a "
            f"passphrase: correct the path, or rewrite the key with `openssl pkey -in ... "
            "-out ...`."
        ) from None
    return context


def _no_passphrase() -> str:
    """Returns a wrong passphrase, so that OpenSSL does not ask for one on the terminal."""
    return " "


def _trust(context: ssl.SSLContext, variable: str, path: str) -> None:
    content = _read(variable, path)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise TlsError(
            f"{variable}: {path} contains no PEM certificate: correct the path."
        ) from None


def _read(variable: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TlsError(
            f"{variable}: {path} cannot be read ({error.strerror}): correct the path, or make the "
            f"file readable by this user."
        ) from None


def _check_trusted(
    server: ssl.SSLContext, client: ssl.SSLContext, options: Options
) -> tuple[str, str, bytes]:
    """Performs a TLS handshake between the two contexts in memory, without a connection.

    If the handshake succeeds, two workers with these files trust each other.

    Returns:
        The subject of the certificate, its expiration date, and the certificate in DER encoding.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for _ in range(_MAX_ROUNDS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", None) or _words(str(error.reason))
                raise TlsError(
                    f"TFDIST_TLS_CERTIFICATE: other workers would not trust "
                    f"{options.tls_certificate} ({reason}): renew it if it has expired, and have "
                    f"it signed by the CA of TFDIST_TLS_CA ({options.tls_ca})."
                ) from None
    certificate: dict[str, Any] = ends[0].getpeercert() or {}
    names = [f"{key}={value}" for pairs in certificate.get("subject", ()) for key, value in pairs]
    encoded = ends[0].getpeercert(binary_form=True) or b""
    return ", ".join(names), str(certificate.get("notAfter", "")), encoded
