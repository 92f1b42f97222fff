"""The output of the workers, shown on the driver."""

from __future__ import annotations

import hmac
import socket
import socketserver
import sys
import threading
from types import TracebackType

_CONNECT_SECONDS = 10.0


class DriverLog(socketserver.ThreadingTCPServer):
    """Listens for lines, and prints them, while it is open.

    Args:
        secret: what a worker must begin with.

    Attributes:
        port: where it listens, on all addresses.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, secret: str) -> None:
        super().__init__(("", 0), _Lines)
        self.token = _token(secret)
        self.port: int = self.server_address[1]
        self.printing = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)

    def __enter__(self) -> DriverLog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()


class _Lines(socketserver.StreamRequestHandler):
    server: DriverLog

    def handle(self) -> None:
        token = self.rfile.readline(len(self.server.token))
        if not hmac.compare_digest(token, self.server.token):
            return
        for line in self.rfile:
            with self.server.printing:
                print(line.decode(errors="replace"), end="", flush=True, file=sys.stdout)


class DriverLogClient:
    """A task's connection to it; without one, output stays in the executor's log.

    Args:
        address: the driver's host and the port; no connection is made without a host.
        secret: the job's.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._socket: socket.socket | None = None
        if not address[0]:
            return
        try:
            self._socket = socket.create_connection(address, timeout=_CONNECT_SECONDS)
            self._socket.sendall(_token(secret))
        except OSError as error:
            print(
                f"tfdist: the driver shows no output, as it cannot be reached: {error}", flush=True
            )
            self.close()

    def send(self, lines: bytes) -> None:
        """Sends whole lines."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(lines)
        except OSError:
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _token(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"tfdist driver log", "sha256").hex().encode() + b"\n"
