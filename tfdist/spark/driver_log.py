"""The output of the workers, shown on the driver."""

from __future__ import annotations

import hmac
import socket
import socketserver
import threading
import time
from types import TracebackType

_CONNECT_SECONDS = 30.0
_QUIET_SECONDS = 10.0
# How long the last output may take after the workers have ended.
_LAST_SECONDS = 10.0


class DriverLog(socketserver.ThreadingTCPServer):
    """Listens for lines, and prints them, while it is open.

    Args:
        secret: what a worker must begin with.
        workers: how many there are.

    Attributes:
        port: where it listens, on all addresses.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, secret: str, workers: int) -> None:
        super().__init__(("", 0), _Lines, bind_and_activate=False)
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        self.socket = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=self.request_queue_size,
            dualstack_ipv6=both,
        )
        self.token = _token(secret)
        self.port: int = self.socket.getsockname()[1]
        self.printing = threading.Lock()
        self._workers = workers
        self._begun = self._ended = 0
        self._told, self._since = False, time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)

    def service_actions(self) -> None:
        """Called by the loop that listens."""
        if self._begun or self._told or time.monotonic() < self._since + _QUIET_SECONDS:
            return
        self._told = True
        print(
            f"tfdist: the workers have not begun yet: Spark needs slots for {self._workers} tasks "
            "at once, and then gives them their rows",
            flush=True,
        )

    def worker_begins(self) -> None:
        """A worker has connected."""
        with self._changed:
            self._begun += 1

    def worker_ends(self) -> None:
        """All that it has sent is printed."""
        with self._changed:
            self._ended += 1
            self._changed.notify()

    def __enter__(self) -> DriverLog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            # After a failure, some may never have begun.
            wanted = self._workers if error is None and self._begun else 0
            self._changed.wait_for(lambda: self._ended >= max(self._begun, wanted), _LAST_SECONDS)
        if not self._begun and error is None:
            print(
                "tfdist: no worker has reached the driver: what they have printed is in the "
                "executors' logs",
                flush=True,
            )
        self.shutdown()
        self.server_close()


class _Lines(socketserver.StreamRequestHandler):
    server: DriverLog

    def handle(self) -> None:
        token = self.rfile.readline(len(self.server.token))
        if not hmac.compare_digest(token, self.server.token):
            return
        self.server.worker_begins()
        try:
            for line in self.rfile:
                with self.server.printing:
                    print(line.decode(errors="replace"), end="", flush=True)
        finally:
            self.server.worker_ends()


class DriverLogClient:
    """A task's connection to it; without one, output stays in the executor's log.

    Args:
        address: the driver's host and the port; no connection is made without a host.
        secret: the job's.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._socket: socket.socket | None = None
        host, port = address
        if not host:
            return
        try:
            self._socket = socket.create_connection((host.strip("[]"), port), _CONNECT_SECONDS)
            self._socket.sendall(_token(secret))
        except OSError as error:
            self._give_up(error)

    def send(self, lines: bytes) -> None:
        """Sends whole lines."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(lines)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _give_up(self, error: OSError) -> None:
        # In the executor's log.
        print(f"tfdist: the driver shows no output from here on: {error}", flush=True)
        self.close()


def _token(secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"tfdist driver log", "sha256").hex().encode() + b"\n"
