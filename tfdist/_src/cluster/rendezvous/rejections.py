"""Reports rejected connections: the first of an address at once, the following ones summed up."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist._src.cluster.net.wait_messages import Announce

_EVERY_SECONDS = 10.0
_MAX_ADDRESSES = 1000


@dataclass
class _Unreported:
    """Rejections of one address since the last line about it."""

    since: float
    count: int = 0
    reason: str = ""


class Rejections:
    """The rejected connections, by address.

    Args:
        announce: called with each line.

    Example:
        >>> rejections = Rejections(print)
        >>> rejections.add("10.0.0.9", "10.0.0.9:40000", "it sent no hello", now=0.0)
        tfdist: dropped a connection from 10.0.0.9:40000: it sent no hello
        >>> for second in range(1, 4):
        ...     rejections.add("10.0.0.9", "10.0.0.9:40001", "it sent no hello", now=second)
        >>> rejections.tick(now=12.0)
        tfdist: dropped 3 more connections from 10.0.0.9; the last: it sent no hello
    """

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._addresses: dict[str, _Unreported] = {}

    def add(self, address: str, peer: str, reason: str, now: float) -> None:
        """Notes a rejected connection.

        Args:
            address: its IP address.
            peer: its address and port.
            reason: why it was rejected.
            now: the time, in seconds of any clock.
        """
        known = self._addresses.get(address)
        if known is None and len(self._addresses) < _MAX_ADDRESSES:
            self._addresses[address] = _Unreported(now)
            self._announce(f"tfdist: dropped a connection from {peer}: {reason}")
            return
        if known is None:  # a flood from many addresses
            known = self._addresses.setdefault("other addresses", _Unreported(now))
        known.count += 1
        known.reason = reason

    @property
    def unreported(self) -> bool:
        """Whether there are rejections that `tick` has yet to report."""
        return any(one.count for one in self._addresses.values())

    def tick(self, now: float) -> None:
        """Reports what has come in the last seconds, and forgets the addresses that are silent."""
        for address, one in list(self._addresses.items()):
            if now - one.since >= _EVERY_SECONDS:
                self._report(address, one)
                del self._addresses[address]
                if one.count:
                    self._addresses[address] = _Unreported(now)

    def close(self) -> None:
        """Reports the rest."""
        for address, one in self._addresses.items():
            self._report(address, one)
        self._addresses.clear()

    def _report(self, address: str, one: _Unreported) -> None:
        if one.count:
            connections = "connection" if one.count == 1 else "connections"
            self._announce(
                f"tfdist: dropped {one.count} more {connections} from {address}; the last: "
                f"{one.reason}"
            )
