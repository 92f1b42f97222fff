"""Parses `host:port`, with helpful errors."""

from __future__ import annotations

from tfdist.errors import ClusterError

_REMEDY = 'Write it as "host:port", for example "10.0.0.7:2222" or "[fd00::7]:2222".'


def shown(value: object, limit: int = 200) -> str:
    """The value as quoted in an error message: its repr, truncated to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def split(address: object, where: str = "the address") -> tuple[str, int]:
    """Splits an address into host and port.

    Args:
        address: `"host:port"`, with an IPv6 host in brackets.
        where: what the error message calls the address.

    Returns:
        The host without brackets, and the port.

    Raises:
        ClusterError: the address does not have this form.

    Example:
        >>> split("[::1]:2222")
        ('::1', 2222)
    """

    def wrong(problem: str) -> ClusterError:
        return ClusterError(f"{where} {problem}. Received: {shown(address)}. {_REMEDY}")

    if not isinstance(address, str):
        raise wrong("must be a string")
    if address != "".join(address.split()) or not address.isprintable():
        raise wrong("must not contain whitespace")
    if "/" in address:
        raise wrong("must not contain a scheme or a path")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (address.startswith("[") and not bracketed):
        raise wrong("has no port")
    if ":" in host and not bracketed:
        raise wrong("is ambiguous: an IPv6 host must be in brackets")
    host = host[1:-1] if bracketed else host
    if not host:
        raise wrong("has no host")
    if not (port.isascii() and port.isdecimal()):
        raise wrong("has no port" if not port else "has a port that is not a number")
    if not 1 <= int(port) <= 65535:
        raise wrong("has a port outside 1 to 65535")
    return host, int(port)
