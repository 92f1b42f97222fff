"""Finds ranks that pass the same values to their collectives in different orders.

A rank reports each function to rank 0 once it is traced, and does not wait. Ranks may pass
different values, such as zeros on all but one, and may trace a function more or less often. But if
two ranks pass the same two values in different orders, each value is added to the other.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tfdist._src.cluster.spec.topology import Worker

# Functions that not all ranks have traced.
_MOST_KEPT = 256


class Passed(NamedTuple):
    """A value that a function passes to a collective.

    Attributes:
        fingerprint: of the operations that compute the value, equal on ranks that compute the same.
        where: for users, the operation and its line.
    """

    fingerprint: str
    where: str


def encode(passed: Sequence[Passed]) -> bytes:
    """Returns the values of a function, in order, as a payload."""
    return json.dumps(passed).encode()


def crossing(one: Sequence[Passed], other: Sequence[Passed]) -> tuple[int, int] | None:
    """Returns the places of the first two values that are passed in different orders.

    Args:
        one: the values of a rank.
        other: the values of another rank.

    Returns:
        An index for each rank; None if those that both ranks pass have the same order.

    Example:
        >>> a, b, zeros = Passed("1f", "a"), Passed("2e", "b"), Passed("3d", "zeros")
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
    """Compares the orders in which ranks pass values to the collectives of their functions.

    Args:
        workers: the group in rank order.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._told: OrderedDict[str, dict[int, list[Passed]]] = OrderedDict()

    def add(self, rank: int, function: str, payload: bytes) -> str | None:
        """Adds a function of a rank.

        Args:
            rank: the rank.
            function: its name for users, the same on all ranks.
            payload: as returned by `encode`.

        Returns:
            An error for users; None if the order is that of the other ranks so far.
        """
        mine = [Passed(str(fingerprint), str(where)) for fingerprint, where in json.loads(payload)]
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
        elif len(self._told) > _MOST_KEPT:
            self._told.popitem(last=False)
        return None
