"""Serves this process's metrics over HTTP if a port is set."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import Counter
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from tfdist._src.cluster import Topology
from tfdist._src.cluster.cluster_spec import port_of
from tfdist._src.cluster.net.framing import printable
from tfdist._src.cluster.rendezvous.acceptor import Rejections
from tfdist._src.cluster.this_worker import topology
from tfdist._src.log import logger
from tfdist._src.monitoring.metrics_reading import describe
from tfdist._src.options import Options

_MAX_CONNECTIONS = 8
"""The maximum number of connections. If there are more, the address with the most connections loses
its oldest connection."""
_SILENCE_SECONDS = 5.0
_REQUEST_SECONDS = 20.0
_MAX_REASON = 200


class _Handler(WSGIRequestHandler):
    server: MetricsServer
    timeout = _SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing, because the base class would print a line for each request."""

    def log_error(self, format: str, *args: Any) -> None:
        """Reports a failed request."""
        self.server.reject(self.client_address, format % args)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application over HTTP in background threads, until the process ends.

    Args:
        host: the address or name to listen on.
        port: the port.
        application: a WSGI application (PEP 3333).

    Raises:
        OSError: the server cannot listen on the port.
        OverflowError: the port number is out of range.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: Any) -> None:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family = family
        self._open: dict[socket.socket, tuple[str, float]] = {}
        self._rejections = Rejections(logger.warning)
        self._lock = threading.RLock()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(application)
        threading.Thread(target=self.serve_forever, name="tfdist-metrics", daemon=True).start()

    def reject(self, address: Any, reason: str) -> None:
        """Logs that a client received no answer. Messages about one host may be combined."""
        text = printable(reason)[:_MAX_REASON]
        with self._lock:
            self._rejections.add(
                address[0], f"{address[0]}:{address[1]}", f"no metrics: {text}", time.monotonic()
            )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a new connection; closes an older connection if too many are open."""
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                counts = Counter(address for address, _ in self._open.values())
                most = max(counts, key=lambda address: counts[address])
                oldest = next(one for one, (address, _) in self._open.items() if address == most)
                self._drop(oldest, "too many connections from one address")
            self._open[request] = client_address[0], time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Removes a connection that has ended from the open connections."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Closes connections that take too long, and reports rejections; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for one in [one for one, (_, at) in self._open.items() if now > at + _REQUEST_SECONDS]:
                self._drop(one, "it was too slow")
            self._rejections.tick(now)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the exception that ended a connection."""
        self.reject(client_address, str(sys.exc_info()[1]))

    def _drop(self, request: socket.socket, reason: str) -> None:
        """Closes a connection; the thread of the connection then ends by itself."""
        with contextlib.suppress(OSError):
            peer = request.getpeername()
            request.shutdown(socket.SHUT_RDWR)
            self.reject(peer, reason)
        self._open.pop(request, None)


_begun = False


def serve(options: Options, strategy: str) -> None:
    """Starts to serve metrics when the process creates its first strategy.

    Args:
        options: the settings.
        strategy: the name of the class of the strategy that has just been created.
    """
    global _begun
    describe(strategy, options.host)
    if options.metrics_port and not _begun:
        _begun = True
        start(options, topology())


def start(options: Options, job: Topology) -> MetricsServer | None:
    """Starts the server; if this fails, logs the reason.

    Args:
        options: the host and the first port.
        job: the topology of the job; this process's position among the workers of its host
            determines its port.

    Returns:
        The server; None if it cannot be started.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from tfdist._src.monitoring.collector import Collector
    except ImportError:
        logger.error(
            "no metrics are served: TFDIST_METRICS_PORT needs the package "
            "prometheus_client. Install it with `pip install 'tfdist[metrics]'`, or unset the "
            "variable."
        )
        return None
    registry = CollectorRegistry()
    registry.register(Collector())
    host = options.metrics_host
    port = port_of(options.metrics_port, [worker.address for worker in job.workers], job.rank)
    try:
        return MetricsServer(host, port, make_wsgi_app(registry))
    except (OSError, OverflowError) as error:
        me = f"{job.me} serves no metrics" if job.workers else "no metrics are served"
        logger.error(
            f"{me}: it cannot listen on port {port} of {host} ({error}). Choose another "
            "TFDIST_METRICS_PORT or TFDIST_METRICS_HOST."
        )
        return None
