"""Data that is slow on its way from worker to worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist._src.launch.flight.words import listed, seconds, workers

# What takes less than this share of the longest only happens to be on its way.
_WORTH_NAMING = 0.1
_SILENT_SECONDS = 1.0


@dataclass(frozen=True)
class Backlog:
    """What a worker has sent and another one has not acknowledged.

    Attributes:
        sender: the worker that has sent it.
        receiver: the worker that it is for.
        bytes: how much.
        bytes_per_second: how fast data came there lately; 0 if unknown.
        silent_seconds: for how long nothing has come there.
    """

    sender: str
    receiver: str
    bytes: int
    bytes_per_second: float
    silent_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes, as far as can be told."""
        rest = self.bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return max(rest, self.silent_seconds)


def longest(found: Iterable[Backlog]) -> tuple[Backlog, ...]:
    """Those that take long compared with the longest, which comes first."""
    ordered = sorted(found, key=lambda one: -one.seconds)
    return tuple(one for one in ordered if one.seconds >= _WORTH_NAMING * ordered[0].seconds)


def describe(found: Sequence[Backlog]) -> str:
    """What is on its way between whom, and where to look.

    Example:
        >>> describe([Backlog("worker 2 (c:1)", "worker 0 (a:1)", 400_000, 120e3, 0.0)])
        'Data is on its way from worker 2 (c:1) to worker 0 (a:1): 0.4 MB, at 0.12 MB/s. Look at the network between them.'
    """  # noqa: E501
    senders, receivers = _ends(found)
    if len(senders) > 1 and len(receivers) > 1:
        pairs = [f"from {one.sender} to {one.receiver}" for one in found]
        return f"Data is on its way {listed(pairs)}: {_amount(found)}. Look at the network."
    between = f"Data is on its way from {workers(senders)} to {workers(receivers)}"
    where = "between them"
    if len(found) > 1:
        where = f"of {(senders if len(senders) == 1 else receivers)[0]}"
    return f"{between}: {_amount(found)}. Look at the network {where}."


def _ends(found: Sequence[Backlog]) -> tuple[list[str], list[str]]:
    """The senders and the receivers, each once."""
    senders = dict.fromkeys(one.sender for one in found)
    receivers = dict.fromkeys(one.receiver for one in found)
    return list(senders), list(receivers)


def _amount(found: Sequence[Backlog]) -> str:
    amount = f"{sum(one.bytes for one in found) / 1e6:.2g} MB"
    silent = min(one.silent_seconds for one in found)
    if silent >= _SILENT_SECONDS:
        return f"{amount}, of which nothing has come for {seconds(silent)}"
    rate = sum(one.bytes_per_second for one in found)
    return f"{amount}, at {rate / 1e6:.2g} MB/s" if rate else amount
