"""Detects ranks that wait for one another, and ranks that run collectives in different orders.

Ranks that wait for one another can never continue. Without this check, each of them would only
appear to wait for a slow worker.

To compare the orders, each rank sends rank 0 the inputs of the collectives in each function when
the function is traced. The rank does not wait for a reply. Some differences are legal. For example,
all ranks but one may pass zeros, and a rank may trace a function more often than the others. But if
two ranks pass the same two values in different orders, a collective would combine two different
values.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfdist._src.cluster.cluster_spec import Worker

# Two values of "communicator" in the reports. They mark waits for exchanges and for notices.
SESSION = "session"
NOTICES = "notices"


@dataclass(frozen=True)
class CrossedWait:
    """Two ranks that wait for each other.

    One rank waits in an exchange that the other rank has not joined. The other rank waits in
    another operation, such as a collective, that the first rank has not joined.

    Attributes:
        sequence: the number of the exchange.
        communicator: the communicator of the other operation.
        number: the number of the other operation on that communicator.
        in_exchange: the rank that waits in the exchange.
        in_operation: the rank that waits in the other operation.
        message: the error message for the user.
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
    """Finds the ranks that wait in another operation for a rank that waits in an exchange.

    Args:
        sequence: the number of the exchange.
        tag: the purpose of the exchange.
        joined: the ranks that have joined the exchange.
        reports: the reports of the ranks as JSON, by rank. Some ranks may not have answered.
        names: the name of each rank's worker.

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
    # The ranks that only wait in the exchange. They run no other operation, and no operation is
    # queued, so they cannot join a collective until the exchange is complete.
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


# The maximum number of functions to remember. A function is forgotten when all ranks have traced
# it.
_MAX_KEPT = 256


class CollectiveInput(NamedTuple):
    """A value that a function passes to a collective.

    Attributes:
        fingerprint: a digest of the TensorFlow operations that compute the value. Two ranks that
            compute a value in the same way have the same digest.
        where: the operation and its line in the source code, for error messages.
    """

    fingerprint: str
    where: str


def encode(passed: Sequence[CollectiveInput]) -> bytes:
    """Encodes the inputs of a function's collectives, in order, as a payload."""
    return json.dumps(passed).encode()


def crossing(
    one: Sequence[CollectiveInput], other: Sequence[CollectiveInput]
) -> tuple[int, int] | None:
    """Finds the first difference between the orders in which two ranks pass their values.

    Only values that both ranks pass equally often are compared.

    Args:
        one: the values of one rank.
        other: the values of another rank.

    Returns:
        The index into `one` and the index into `other` at which the two ranks pass different
        values. None if the orders agree.

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
    """Checks that all ranks pass the values in a function to collectives in the same order.

    Args:
        workers: the workers of the group in rank order.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._told: OrderedDict[str, dict[int, list[CollectiveInput]]] = OrderedDict()

    def add(self, rank: int, function: str, payload: bytes) -> str | None:
        """Adds the inputs of a function on one rank, and compares them with the other ranks.

        Args:
            rank: the rank that has traced the function.
            function: the name of the function in error messages, the same on all ranks.
            payload: the inputs of the function's collectives, as returned by `encode`.

        Returns:
            An error message for the user. None if the order agrees with all ranks that have already
            traced the function.
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
