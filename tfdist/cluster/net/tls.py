"""TLS between the workers, each of which proves to be one of the job by a certificate of its CA."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Any

from tfdist.cluster.net.tls_socket import TlsSocket
from tfdist.errors import TlsError
from tfdist.options import Options

CERTIFICATE, KEY, CA = "TFDIST_TLS_CERTIFICATE", "TFDIST_TLS_KEY", "TFDIST_TLS_CA"

_TO_AND_FRO = 10


@dataclass(frozen=True)
class Tls:
    """What one worker needs for TLS; `load` makes it.

    Attributes:
        server: for the connections that it is dialled on.
        client: for those that it dials.
        subject: whom the certificate is for.
        expires: when it expires.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    subject: str
    expires: str

    @classmethod
    def load(cls, options: Options) -> Tls | None:
        """Reads the files, and tries whether a worker that has the same would be trusted.

        Args:
            options: `tls_certificate`, `tls_key` and `tls_ca` are used.

        Returns:
            The contexts; None where TLS is not set.

        Raises:
            TlsError: a file is missing or not what it should be, or the three do not fit together,
                or the certificate has expired.
        """
        if not options.tls:
            return None
        server, client = (
            _context(protocol, options)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        )
        server.num_tickets = 0  # no connection is resumed
        return cls(server, client, *_seen_by_another(server, client, options))

    def wrap(self, sock: socket.socket, *, dialled: bool) -> TlsSocket:
        """The connection with TLS, which is still in the clear.

        Args:
            sock: a connected socket, which is taken over.
            dialled: whether this process dialled.

        Raises:
            OSError: the connection has ended.
        """
        context = self.client if dialled else self.server
        try:
            wrapped = context.wrap_socket(
                sock, server_side=not dialled, do_handshake_on_connect=False
            )
        except BaseException:
            sock.close()
            raise
        assert isinstance(wrapped, TlsSocket)
        return wrapped


def explain(error: ssl.SSLError) -> str | None:
    """Why two workers do not trust one another, in words about the other one.

    Returns:
        The reason; None where the error has another cause, such as a connection that ended.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    reason = str(getattr(error, "reason", None) or "")
    _, alert, words = reason.partition("ALERT_")
    if alert:
        return f"it does not accept this worker's certificate ({_words(words)})"
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return "it brought no certificate"
    if not reason or isinstance(error, ssl.SSLEOFError) or "EOF" in reason:
        return None
    return f"the two cannot agree on TLS ({_words(reason)})"


REMEDY = (
    f"Give all workers certificates that have not expired, signed by the CA that {CA} names on all"
)


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _context(protocol: int, options: Options) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Workers go by addresses; it is the job's own CA that tells who is one of them.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _trust(context, CA, options.tls_ca)
    # Only to see whether it is one: the message of `load_cert_chain` names neither file.
    _trust(ssl.SSLContext(protocol), CERTIFICATE, options.tls_certificate)
    _read(KEY, options.tls_key)
    try:
        context.load_cert_chain(options.tls_certificate, options.tls_key, _no_passphrase)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error.reason):
            raise TlsError(
                f"The key in {options.tls_key} is not that of the certificate in "
                f"{options.tls_certificate}: correct {KEY} or {CERTIFICATE}."
            ) from None
        raise TlsError(
            f"{KEY}: {options.tls_key} holds no private key in PEM that can be used without a "
            f"passphrase: correct the path, or write the key anew with `openssl pkey -in ... -out "
            f"...`."
        ) from None
    return context


def _no_passphrase() -> str:
    """Instead of asking at the terminal."""
    return " "


def _trust(context: ssl.SSLContext, variable: str, path: str) -> None:
    content = _read(variable, path)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise TlsError(
            f"{variable}: {path} holds no certificate in PEM: correct the path."
        ) from None


def _read(variable: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TlsError(
            f"{variable}: {path} cannot be read ({error.strerror}): correct the path, or let this "
            f"user read the file."
        ) from None


def _seen_by_another(
    server: ssl.SSLContext, client: ssl.SSLContext, options: Options
) -> tuple[str, str]:
    """Connects both contexts in memory; whom the certificate is for, and when it expires."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    for _ in range(_TO_AND_FRO):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", None) or _words(str(error.reason))
                raise TlsError(
                    f"{CERTIFICATE}: other workers would not trust {options.tls_certificate} "
                    f"({reason}): renew it if it has expired, and let the CA of {CA} "
                    f"({options.tls_ca}) sign it."
                ) from None
    seen: dict[str, Any] = ends[0].getpeercert() or {}
    names = [f"{key}={value}" for pairs in seen.get("subject", ()) for key, value in pairs]
    return ", ".join(names), str(seen.get("notAfter", ""))
