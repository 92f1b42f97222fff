"""Which elements of which variables each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flat variable.

    Attributes:
        variable: its number.
        start: the first element.
        stop: the one after the last.
        at: where they begin in their rank's share of the bucket.
    """

    variable: int
    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Variables of one type that travel together, one after the other, in equal shares.

    A share ends where it does, within a variable too; the last ones may hold padding.

    Attributes:
        variables: their numbers.
        sizes: their numbers of elements.
        ranks: the number of shares.

    Example:
        >>> Bucket((0, 1), (5, 2), ranks=2).pieces(1)
        [Piece(variable=0, start=4, stop=5, at=0), Piece(variable=1, start=0, stop=2, at=1)]
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(self.sizes)

    @property
    def share(self) -> int:
        """The number of elements in a rank's share, with padding."""
        return -(-self.size // self.ranks)

    @property
    def padding(self) -> int:
        """By how many elements the shares together are longer."""
        return self.share * self.ranks - self.size

    def pieces(self, rank: int) -> list[Piece]:
        """What is in a rank's share, in order."""
        first, last = rank * self.share, (rank + 1) * self.share
        pieces, begin = [], 0
        for variable, size in zip(self.variables, self.sizes, strict=True):
            start, stop = max(first, begin), min(last, begin + size)
            if start < stop:
                pieces.append(Piece(variable, start - begin, stop - begin, start - first))
            begin += size
        return pieces


def cut(sizes: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> list[Bucket]:
    """The buckets of some variables.

    Args:
        sizes: of all variables, in elements.
        groups: for each bucket the numbers of its variables.
        ranks: among how many each is shared out.
    """
    filled = [[i for i in group if sizes[i]] for group in groups]
    return [Bucket(tuple(g), tuple(sizes[i] for i in g), ranks) for g in filled if g]
