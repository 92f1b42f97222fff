"""Detects ranks that wait for one another or run collectives in different orders.

Such ranks cannot proceed, but each of them only seems to wait for a slow worker.

A rank reports each function to rank 0 once the function is traced, and does not wait for a reply.
Ranks may pass different values, such as zeros on all ranks but one, and may trace a function a
different number of times. But if two ranks pass the same two values in different orders, a
collective would combine two different values.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfdist._src.cluster.cluster_spec import Worker

# Names in the reports.
SESSION = "session"
NOTICES = "notices"


@dataclass(frozen=True)
class CrossedWait:
    """Two ranks that wait for each other: one in an exchange, the other in another operation.

    Attributes:
        sequence: the exchange's number.
        communicator: the communicator of the operation.
        number: the number of the operation on that communicator.
        in_exchange: the rank that waits in the exchange.
        in_operation: the rank that waits in the operation.
        message: the error, for users.
    """

    sequence: int
    communicator: str
    number: int
    in_exchange: int
    in_operation: int
    message: str = field(compare=False)


def crossed_waits(
    sequence: int,
    tag: str,
    joined: set[int],
    reports: Mapping[int, bytes],
    names: Mapping[int, str],
) -> set[CrossedWait]:
    """Returns the waits that cross an exchange.

    Args:
        sequence: the exchange's number.
        tag: the purpose of the exchange.
        joined: the ranks that have joined it.
        reports: the reports of the ranks that have answered, as JSON.
        names: the ranks' workers.

    Example:
        >>> operation = {"communicator": "workers", "what": "all_gather 'x'", "number": 3}
        >>> reports = {
        ...     0: {"operations": [{"communicator": "session", "number": 7}], "queued": 0},
        ...     1: {"operations": [{**operation, "waits_for": [0]}]},
        ... }
        >>> encoded = {rank: json.dumps(report).encode() for rank, report in reports.items()}
        >>> found = crossed_waits(7, "epoch", {0}, encoded, {0: "worker 0", 1: "worker 1"})
        >>> [(one.in_exchange, one.in_operation) for one in found]
        [(0, 1)]
    """
    known = {rank: read for rank, text in reports.items() if (read := _read(text)) is not None}
    # Ranks that do nothing else, and so will not join a collective on their own.
    blocked = {
        rank
        for rank in joined & known.keys()
        if not known[rank].get("queued")
        and {one.get("communicator") for one in known[rank]["operations"]} == {SESSION}
    }
    found = set()
    for rank in known.keys() - joined:
        for one in known[rank]["operations"]:
            waits_for = blocked.intersection(one.get("waits_for") or ())
            if one.get("communicator") == SESSION or not waits_for:
                continue
            other = min(waits_for)
            message = (
                f"The workers wait for one another: {names[other]}{_place(known[other])} in the "
                f"exchange {tag!r}, which {names[rank]} has not joined, and "
                f"{names[rank]}{_place(known[rank])} in {_described(one)}, which "
                f"{names[other]} has not joined. Make the same calls in the same order on all "
                "workers."
            )
            found.add(
                CrossedWait(
                    sequence, one["communicator"], one.get("number", 0), other, rank, message
                )
            )
    return found


def _read(text: bytes) -> dict[str, Any] | None:
    report: Any
    try:
        report = json.loads(text)
    except ValueError:
        return None
    operations = report.get("operations") if isinstance(report, dict) else None
    if not isinstance(operations, list) or not all(isinstance(one, dict) for one in operations):
        return None
    return dict(report)


def _place(report: Mapping[str, Any]) -> str:
    return f", in {report['main']}," if report.get("main") else ""


def _described(operation: Mapping[str, Any]) -> str:
    what = operation.get("what", "")
    return f"a wait for notice {what!r}" if operation["communicator"] == NOTICES else str(what)


# The maximum number of functions kept because some ranks have not traced them yet.
_MAX_KEPT = 256


class CollectiveInput(NamedTuple):
    """A value that a function passes to a collective.

    Attributes:
        fingerprint: the fingerprint of the operations that compute the value; equal on ranks that
            compute the same.
        where: the operation and its line, for users.
    """

    fingerprint: str
    where: str


def encode(passed: Sequence[CollectiveInput]) -> bytes:
    """Returns the values of a function, in order, as a payload."""
    return json.dumps(passed).encode()


def crossing(
    one: Sequence[CollectiveInput], other: Sequence[CollectiveInput]
) -> tuple[int, int] | None:
    """Returns the positions of the first two values that are passed in different orders.

    Args:
        one: the values of a rank.
        other: the values of another rank.

    Returns:
        An index for each rank; None if the values that both ranks pass have the same order.

    Example:
        >>> a, b, zeros = (CollectiveInput(*one) for one in (("1f", "a"), ("2e", "b"), ("3d", "0")))
        >>> crossing([a, b], [b, a])
        (0, 0)
        >>> crossing([a, b], [a, zeros]) is None
        True
    """
    counts = Counter(p.fingerprint for p in one), Counter(p.fingerprint for p in other)
    common = {f for f, count in counts[0].items() if counts[1][f] == count}
    places = [[i for i, p in enumerate(own) if p.fingerprint in common] for own in (one, other)]
    for i, j in zip(*places, strict=True):
        if one[i].fingerprint != other[j].fingerprint:
            return i, j
    return None


class TracedOrders:
    """Checks that ranks pass values to the collectives of a function in the same order.

    Args:
        workers: the group in rank order.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._told: OrderedDict[str, dict[int, list[CollectiveInput]]] = OrderedDict()

    def add(self, rank: int, function: str, payload: bytes) -> str | None:
        """Adds a function of a rank.

        Args:
            rank: the rank.
            function: its name for users, the same on all ranks.
            payload: as returned by `encode`.

        Returns:
            An error for users; None if the order agrees with the other ranks so far.
        """
        mine = [
            CollectiveInput(str(fingerprint), str(where))
            for fingerprint, where in json.loads(payload)
        ]
        told = self._told.setdefault(function, {})
        for other, theirs in told.items():
            if found := crossing(theirs, mine):
                i, j = found
                return (
                    f"The workers pass values to their collectives in different orders, in "
                    f"{function}: {self._workers[other]} passes {theirs[i].where} where "
                    f"{self._workers[rank]} passes {mine[j].where}. Run the same code on all "
                    "workers, and sort what you loop over if it is a `set`."
                )
        told[rank] = mine
        if len(told) == len(self._workers):
            del self._told[function]
        elif len(self._told) > _MAX_KEPT:
            self._told.popitem(last=False)
        return None
