"""Where the workers of this host serve their metrics, for the launcher to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.monitoring.port import port_of
from tfdist.options import Options


def describe(environment: Mapping[str, str], addresses: Sequence[str], ranks: range) -> str:
    """The addresses of the metrics; "" if none are served.

    Args:
        environment: the variables of the workers.
        addresses: `"host:port"` of every worker of the job, in rank order.
        ranks: this host's workers.

    Example:
        >>> describe({"TFDIST_METRICS_PORT": "9400"}, ["a:1", "a:2"], range(2))
        'metrics on 127.0.0.1, ports 9400 (worker 0) to 9401 (worker 1)'
    """
    try:
        options = Options.from_environment(dict(environment))
    except ValueError:  # The workers report which.
        return ""
    if not options.metrics_port:
        return ""
    first, last = (port_of(options.metrics_port, addresses, rank) for rank in (ranks[0], ranks[-1]))
    if len(ranks) == 1:
        return f"metrics on {options.metrics_host}, port {first} (worker {ranks[0]})"
    ports = f"ports {first} (worker {ranks[0]}) to {last} (worker {ranks[-1]})"
    return f"metrics on {options.metrics_host}, {ports}"
