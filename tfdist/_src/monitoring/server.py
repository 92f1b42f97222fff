"""Serves this process's metrics over HTTP, if a port is set; training never fails because of it."""

from __future__ import annotations

from tfdist._src.cluster import Topology
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.cluster.this_worker import topology
from tfdist._src.monitoring.http_server import MetricsServer
from tfdist._src.monitoring.port import port_of
from tfdist._src.monitoring.snapshot import describe
from tfdist._src.options import Options

_begun = False


def serve(options: Options, strategy: str) -> None:
    """Serves metrics from the process's first strategy on.

    Args:
        options: the settings.
        strategy: the class of the strategy that has just been made.
    """
    global _begun
    describe(strategy, options.host)
    if options.metrics_port and not _begun:
        _begun = True
        start(options, topology())


def start(options: Options, job: Topology) -> MetricsServer | None:
    """Starts the server; on failure says why.

    Args:
        options: the host and the first port.
        job: the workers, among which this process has its port.

    Returns:
        The server; None if it cannot be started.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        from tfdist._src.monitoring.collector import Collector
    except ImportError:
        say(
            "tfdist: no metrics are served: TFDIST_METRICS_PORT needs the package "
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
        say(
            f"tfdist: {me}: it cannot listen on port {port} of {host} ({error}). Choose another "
            "TFDIST_METRICS_PORT or TFDIST_METRICS_HOST."
        )
        return None
