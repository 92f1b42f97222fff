"""The output of the workers, shown on the driver."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from functools import partial
from types import TracebackType

from tfdist._src.cluster.auth.handshake import handshake
from tfdist._src.cluster.auth.identity import PRINT, Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist.errors import TfdistError

_CONNECT_SECONDS = 30.0
_QUIET_SECONDS = 10.0
# Time limit for the last output after the workers have ended.
_LAST_SECONDS = 10.0
_TICK_SECONDS = 0.1
_READ_SIZE = 64 * 1024
_MAX_LINE = 1 << 20
_BACKLOG = 1024


class DriverLog:
    """Listens for connections of workers while it is open, and prints the lines that they send.

    Args:
        secret: the secret that a worker must prove.
        workers: the number of workers.

    Attributes:
        port: the port for connections, on all addresses.
    """

    def __init__(self, secret: str, workers: int) -> None:
        both = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=both,
        )
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            Identity.of_other("the driver", PRINT),
            secret,
            None,
            workers,
            _screen,
            self._begin,
            _show,
        )
        accept = partial(self._acceptor.accept, self._socket)
        self._selector.register(self._socket, selectors.EVENT_READ, accept)
        self._lines: dict[socket.socket, bytes] = {}  # incomplete lines
        self._workers = workers
        self._begun = self._ended = 0
        self._told, self._since = False, time.monotonic()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="tfdist-log", daemon=True)

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
            # After a failure, do not wait for workers that may never connect.
            wanted = self._workers if error is None and self._begun else 0
            self._changed.wait_for(lambda: self._ended >= max(self._begun, wanted), _LAST_SECONDS)
        if not self._begun and error is None:
            _show(
                "tfdist: no worker has connected to the driver; the workers' output is in the "
                "executors' logs"
            )
        self._stopped = True
        self._thread.join()

    def _serve(self) -> None:
        with self._selector:
            while not self._stopped:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    key.data()
                self._acceptor.tick()
                self._remind()
            self._acceptor.close()
            for sock in (self._socket, *self._lines):
                sock.close()

    def _remind(self) -> None:
        if self._begun or self._told or time.monotonic() < self._since + _QUIET_SECONDS:
            return
        self._told = True
        _show(
            f"tfdist: the workers have not started yet: Spark needs {self._workers} free task "
            "slots at once, and then sends them their rows"
        )

    def _begin(self, sock: socket.socket, hello: Identity) -> None:
        """Adds a worker that has connected."""
        self._lines[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, sock))
        with self._changed:
            self._begun += 1

    def _read(self, sock: socket.socket) -> None:
        """Prints complete lines; at the end of a worker's output, also an incomplete line."""
        try:
            data = sock.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:  # The worker or its host is gone.
            data = b""
        whole, end, rest = (self._lines[sock] + data).rpartition(b"\n")
        if not data or len(rest) > _MAX_LINE:
            whole, end, rest = self._lines[sock] + data, b"", b""
        self._lines[sock] = rest
        if whole or end:
            _show((whole + end).decode(errors="replace"), end="")
        if not data:
            self._selector.unregister(sock)
            del self._lines[sock]
            sock.close()
            with self._changed:
                self._ended += 1
                self._changed.notify()


def _show(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError, ValueError):  # The output is closed.
        print(text, end=end, flush=True)


def _screen(hello: Identity) -> None:
    if hello.purpose != PRINT:
        raise WireError(f"{hello} connected for {hello.purpose!r} to a driver")


class DriverLogClient:
    """A task's connection to the driver. Without it, output is only in the executor's log.

    Args:
        address: the driver's host and port; without a host, no connection is made.
        secret: the job's secret.
    """

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._socket: socket.socket | None = None
        host, port = address
        if not host:
            return
        try:
            self._socket = socket.create_connection((host.strip("[]"), port), _CONNECT_SECONDS)
            mine = Identity.of_other("a task", PRINT)
            deadline = time.monotonic() + _CONNECT_SECONDS
            handshake(self._socket, mine, secret, deadline, first=True, admit=_screen)
        except (OSError, WireError, TfdistError) as error:
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

    def _give_up(self, error: Exception) -> None:
        # Printed to the executor's log.
        print(f"tfdist: the driver shows no further output of this worker: {error}", flush=True)
        self.close()
