"""Whether another worker is reachable."""

from __future__ import annotations

import enum
import socket

from tfdist._src.cluster.net.dns import resolve


class ProbeResult(enum.Enum):
    """The result of a probe; the value is shown to the user."""

    LISTENING = "reachable, and listening"
    REFUSED = "reachable, but not listening yet, which is normal before the start"
    UNRESOLVED = "its name does not resolve"
    SILENT = "no answer"


def probe(address: str, timeout: float) -> ProbeResult:
    """Opens a TCP connection and closes it.

    Args:
        address: `"host:port"`.
        timeout: seconds for resolving the name, and again for the connection.

    Example:
        >>> probe("127.0.0.1:1", 1.0).name
        'REFUSED'
    """
    try:
        endpoints = resolve(address, timeout)
    except OSError:
        return ProbeResult.UNRESOLVED
    result = ProbeResult.SILENT
    for family, endpoint in endpoints:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout / len(endpoints))
            try:
                connection.connect(endpoint)
                return ProbeResult.LISTENING
            except ConnectionRefusedError:
                result = ProbeResult.REFUSED
            except OSError:
                pass  # Silent, or no route.
    return result
