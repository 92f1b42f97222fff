"""Resolves host names before a deadline, even if the name service hangs."""

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from tfdist._src.cluster.cluster_spec import shown, split
from tfdist.errors import ClusterError

_LOOKUP_SECONDS = 5.0
_RETRY_FOR_SECONDS = 8.0
_RETRY_SECONDS = 0.5

Endpoint = tuple[socket.AddressFamily, Any]
"""A family, and an address as `socket.connect` accepts it for that family."""


def resolve(address: str, seconds: float = _LOOKUP_SECONDS) -> list[Endpoint]:
    """Resolves an address once.

    Args:
        address: `"host:port"`.
        seconds: the time limit of the lookup.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        OSError: the name does not resolve in time.

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

    # getaddrinfo can take minutes and cannot be interrupted, so it runs in a daemon thread.
    threading.Thread(target=ask, name="tfdist-resolve", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer from the name service in {seconds:.0f} s")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def check_resolvable(
    address: str, *, name: str | None = None, timeout: float | None = None
) -> list[Endpoint]:
    """Checks that an address resolves, retrying for a while.

    Args:
        address: `"host:port"`.
        name: its name in an error message; the address by default.
        timeout: seconds to keep trying; 8 by default.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        ClusterError: it still does not resolve.

    Example:
        >>> len(check_resolvable("127.0.0.1:2222"))
        1
    """
    end = time.monotonic() + (_RETRY_FOR_SECONDS if timeout is None else timeout)
    while True:
        try:
            return resolve(address, min(_LOOKUP_SECONDS, max(0.1, end - time.monotonic())))
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < end:
                time.sleep(_RETRY_SECONDS)
                continue
            raise ClusterError(
                f"{name or address}: the host name does not resolve ({error.strerror or error}). "
                f"Received: {shown(address)}. Correct it in TF_CONFIG, or fix the name service of "
                f"this machine ({socket.gethostname()})."
            ) from None


class NameChecks:
    """Finds names that do not resolve on this machine, in another thread, for messages.

    Example:
        >>> checks = NameChecks()
        >>> checks.begin(["127.0.0.1:2222"])
        >>> checks.problem(["127.0.0.1:2222"])
        ''
    """

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._thread: threading.Thread | None = None

    def begin(self, addresses: Iterable[str]) -> None:
        """Starts looking up the hosts of addresses, unless the last lookup is still running.

        Args:
            addresses: `"host:port"`.
        """
        names = [at for at in addresses if at and not is_numeric(split(at)[0])]
        if names and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._check, args=[names], name="tfdist-names", daemon=True
            )
            self._thread.start()

    def problem(self, addresses: Iterable[str]) -> str:
        """Describes the problems known so far.

        Args:
            addresses: the addresses that matter now.

        Returns:
            A clause that names the first host that does not resolve, and the resolver's error; ""
            if none is known.
        """
        hosts = dict.fromkeys(split(at)[0] for at in addresses if at)
        known = [(host, self._problems[host]) for host in hosts if host in self._problems]
        if not known:
            return ""
        more = f", nor {'does' if len(known) == 2 else 'do'} {len(known) - 1} more"
        host, reason = known[0]
        return f"the name {host} does not resolve here ({reason}){more if known[1:] else ''}"

    def _check(self, addresses: list[str]) -> None:
        for address in addresses:
            host = split(address)[0]
            try:
                resolve(address)
            except OSError as error:
                self._problems[host] = error.strerror or str(error)
            else:
                self._problems.pop(host, None)


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
