"""Whether this worker can serve metrics, if it is told to."""

from __future__ import annotations

import importlib.util
import socket

from tfdist._src.cluster import Topology, from_environment
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.monitoring.port import port_of
from tfdist._src.options import Options
from tfdist.errors import ClusterError

_NAME = "Prometheus"


def check(context: Context) -> Section:
    """Looks for the package, and briefly binds the port."""
    try:
        options = Options.from_environment(dict(context.environment))
    except ValueError:  # `settings` reports which
        return Section([(_NAME, "a setting is invalid")])
    if not options.metrics_port:
        return Section([(_NAME, "off")])
    try:
        job = from_environment(context.environment)
    except ClusterError:  # `workers` reports which
        job = Topology()
    host = options.metrics_host
    port = port_of(options.metrics_port, [worker.address for worker in job.workers], job.rank)
    section = Section()
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
        section.add(_NAME, f"port {port} of {host}, which is free")
    except (OSError, OverflowError) as error:
        section.add(_NAME, f"port {port} of {host}, unusable")
        section.problems.append(
            f"Metrics cannot be served on port {port} of {host} ({error}): choose another "
            "TFDIST_METRICS_PORT or TFDIST_METRICS_HOST"
        )
    if importlib.util.find_spec("prometheus_client") is None:
        section.problems.append(
            "TFDIST_METRICS_PORT is set, but the package prometheus_client is not installed: pip "
            "install 'tfdist[metrics]', or unset the variable"
        )
    return section
