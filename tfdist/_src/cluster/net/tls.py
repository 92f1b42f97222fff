"""Mutual TLS between the workers, with certificates signed by the job's CA."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Any

from tfdist._src.cluster.net.tls_socket import TlsSocket
from tfdist._src.options import Options
from tfdist.errors import TlsError

CERTIFICATE, KEY, CA = "TFDIST_TLS_CERTIFICATE", "TFDIST_TLS_KEY", "TFDIST_TLS_CA"

_MAX_ROUNDS = 10


@dataclass(frozen=True)
class Tls:
    """The TLS contexts of a worker; created by `load`.

    Attributes:
        server: context for the connections that it accepts.
        client: context for the connections that it dials.
        certificate: this worker's certificate, DER.
        subject: subject of the certificate.
        expires: expiration date of the certificate.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    subject: str
    expires: str

    @classmethod
    def load(cls, options: Options) -> Tls | None:
        """Reads the files, and checks that two workers using them would trust each other.

        Args:
            options: `tls_certificate`, `tls_key` and `tls_ca` are used.

        Returns:
            The contexts; None if TLS is not configured.

        Raises:
            TlsError: a file is missing or invalid, the three do not match, or the certificate has
                expired.
        """
        if not options.tls:
            return None
        server, client = (
            _context(protocol, options)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        server.num_tickets = 0  # TLS sessions are never resumed
        subject, expires, certificate = _check_trusted(server, client, options)
        return cls(server, client, certificate, subject, expires)

    def wrap(self, sock: socket.socket, *, dialed: bool) -> TlsSocket:
        """Wraps a connection, which stays in the clear until `TlsSocket.secure`.

        Args:
            sock: a connected socket; the result takes ownership of it.
            dialed: whether this process dialed.

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
    """Why two workers do not trust each other, phrased about the peer.

    Returns:
        The reason; None if the error has another cause, such as a connection that ended.
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


REMEDY = f"Give all workers unexpired certificates signed by the CA that {CA} names on all of them"


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _context(protocol: int, options: Options) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Workers are known by address; the job's CA alone decides who is one of them.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, CA, options.tls_ca)
    # Only to validate it: the errors of `load_cert_chain` do not name the file.
    _trust(ssl.SSLContext(protocol), CERTIFICATE, options.tls_certificate)
    _read(KEY, options.tls_key)
    try:
        context.load_cert_chain(options.tls_certificate, options.tls_key, _no_passphrase)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error.reason):
            raise TlsError(
                f"The key in {options.tls_key} does not match the certificate in "
                f"{options.tls_certificate}: correct {KEY} or {CERTIFICATE}."
            ) from None
        raise TlsError(
            f"{KEY}: {options.tls_key} contains no PEM private key usable without a passphrase: "
            f"correct the path, or rewrite the key with `openssl pkey -in ... -out ...`."
        ) from None
    return context


def _no_passphrase() -> str:
    """Prevents OpenSSL from prompting on the terminal."""
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
    """Connects both contexts in memory.

    Returns:
        The certificate's subject, its expiration date, and its DER encoding.
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
                    f"{CERTIFICATE}: other workers would not trust {options.tls_certificate} "
                    f"({reason}): renew it if it has expired, and have it signed by the CA of {CA} "
                    f"({options.tls_ca})."
                ) from None
    certificate: dict[str, Any] = ends[0].getpeercert() or {}
    names = [f"{key}={value}" for pairs in certificate.get("subject", ()) for key, value in pairs]
    encoded = ends[0].getpeercert(binary_form=True) or b""
    return ", ".join(names), str(certificate.get("notAfter", "")), encoded
