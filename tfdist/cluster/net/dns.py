"""Resolves host names within a deadline, however long the name service takes."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from typing import Any

from tfdist.cluster.spec.host_port import shown, split
from tfdist.errors import ClusterError

_LOOKUP_SECONDS = 5.0
_PATIENCE_SECONDS = 8.0
_RETRY_SECONDS = 0.5

Endpoint = tuple[socket.AddressFamily, Any]
"""A family, and an address as `socket.connect` takes it in that family."""


def resolve(address: str, seconds: float = _LOOKUP_SECONDS) -> list[Endpoint]:
    """Resolves an address once.

    Args:
        address: `"host:port"`.
        seconds: how long the name service may take.

    Returns:
        Where to connect to, the preferred first.

    Raises:
        OSError: the name does not resolve, or not in time.

    Example:
        >>> resolve("127.0.0.1:2222")[0][1]
        ('127.0.0.1', 2222)
    """
    host, port = split(address)
    if is_numeric(host):
        return _look_up(host, port)
    answer: list[list[Endpoint] | OSError] = []
    done = threading.Event()

    def ask() -> None:
        try:
            answer.append(_look_up(host, port))
        except OSError as error:
            answer.append(error)
        except UnicodeError:
            answer.append(OSError("it is not a valid host name"))
        done.set()

    # getaddrinfo can take minutes and cannot be interrupted, so it runs where it holds up nobody.
    threading.Thread(target=ask, name="tfdist-resolve", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer from the name service in {seconds:.0f} s")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def check_resolvable(
    address: str, *, name: str | None = None, patience: float | None = None
) -> list[Endpoint]:
    """Checks that an address resolves, trying again for a while.

    Args:
        address: `"host:port"`.
        name: what to call it in an error message; the address by default.
        patience: seconds until the error; 8 by default.

    Returns:
        Where to connect to, the preferred first.

    Raises:
        ClusterError: it still does not resolve.

    Example:
        >>> len(check_resolvable("127.0.0.1:2222"))
        1
    """
    end = time.monotonic() + (_PATIENCE_SECONDS if patience is None else patience)
    while True:
        try:
            return resolve(address, min(_LOOKUP_SECONDS, max(0.1, end - time.monotonic())))
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < end:
                time.sleep(_RETRY_SECONDS)
                continue
            raise ClusterError(
                f"{name or address}: the host name does not resolve ({error.strerror or error}). "
                f"Received: {shown(address)}. Correct it in TF_CONFIG, or the name service of "
                f"this machine ({socket.gethostname()})."
            ) from None


def is_numeric(host: str) -> bool:
    """Whether a host is an IP address, which needs no name service."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str, port: int) -> list[Endpoint]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))
