"""Whether another worker can be reached."""

from __future__ import annotations

import enum
import socket

from tfdist.cluster.net.dns import resolve


class Answer(enum.Enum):
    """What a machine answers; the value is what the user reads."""

    LISTENING = "reachable, and listening"
    REFUSED = "reachable; nothing listens there yet, which is normal before the start"
    UNRESOLVED = "its name does not resolve"
    SILENT = "no answer"


def probe(address: str, timeout: float) -> Answer:
    """Opens a TCP connection and closes it.

    Args:
        address: `"host:port"`.
        timeout: seconds for the name, and again for the connection.

    Example:
        >>> probe("127.0.0.1:1", 1.0).name
        'REFUSED'
    """
    try:
        endpoints = resolve(address, timeout)
    except OSError:
        return Answer.UNRESOLVED
    answer = Answer.SILENT
    for family, where in endpoints:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout / len(endpoints))
            try:
                connection.connect(where)
                return Answer.LISTENING
            except ConnectionRefusedError:
                answer = Answer.REFUSED
            except OSError:
                pass  # Silent, or no route to it.
    return answer
