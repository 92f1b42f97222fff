"""Resolves host names within a time limit, even if the name service does not answer."""

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
    """Resolves an address in a single attempt.

    Args:
        address: the address, as `"host:port"`.
        seconds: the time limit for the lookup.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        OSError: the host name does not resolve, or not within the time limit.

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

    # getaddrinfo can take minutes and cannot be interrupted, so it runs in a daemon thread. This
    # thread does not prevent the process from exiting.
    threading.Thread(target=ask, name="tfdist-resolve", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer from the name service in {seconds:.0f} s")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def check_resolvable(
    address: str, *, name: str | None = None, timeout: float | None = None
) -> list[Endpoint]:
    """Checks that an address resolves; if it does not, retries until a timeout.

    Args:
        address: the address, as `"host:port"`.
        name: the name of the worker in an error message; by default, the address.
        timeout: the number of seconds until the last attempt; 8 by default.

    Returns:
        The endpoints to connect to, in order of preference.

    Raises:
        ClusterError: the address does not resolve before the timeout.

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
    """Finds out which host names do not resolve on this machine, in a background thread.

    Error messages and progress messages use this to explain why a worker is missing.

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
        """Starts to look up the host names of the addresses.

        This has no effect if the previous lookup is still running.

        Args:
            addresses: the addresses, as `"host:port"`.
        """
        names = [at for at in addresses if at and not is_numeric(split(at)[0])]
        if names and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(
                target=self._check, args=[names], name="tfdist-names", daemon=True
            )
            self._thread.start()

    def problem(self, addresses: Iterable[str]) -> str:
        """Describes the failed lookups that are known so far.

        Args:
            addresses: the addresses to describe. The failed lookups of other addresses are ignored.

        Returns:
            A clause with the name of the first host that does not resolve, and the error. "" if no
            lookup is known to have failed.
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
    """Whether a host is an IP address, which does not have to be resolved."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str, port: int) -> list[Endpoint]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))
