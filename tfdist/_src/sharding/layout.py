"""Which elements of which variables each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of a flat variable.

    Attributes:
        variable: the variable's number.
        start: the first element.
        stop: one past the last element.
        offset: the position of the first element in the rank's shard of the bucket.
    """

    variable: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Variables of one type, laid end to end and divided into equal shards.

    A shard boundary may fall within a variable; the last shards may contain padding.

    Attributes:
        variables: the variables' numbers.
        sizes: their numbers of elements.
        ranks: the number of shards.

    Example:
        >>> Bucket((0, 1), (5, 2), ranks=2).pieces(1)
        [Piece(variable=0, start=4, stop=5, offset=0), Piece(variable=1, start=0, stop=2, offset=1)]
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(self.sizes)

    @property
    def shard_size(self) -> int:
        """The number of elements in a rank's shard, including padding."""
        return -(-self.size // self.ranks)

    @property
    def padding(self) -> int:
        """The number of padding elements in all shards together."""
        return self.shard_size * self.ranks - self.size

    def elements(self, rank: int) -> tuple[int, int]:
        """The first element of a rank's shard and the one past its last, without padding."""
        ends = rank * self.shard_size, (rank + 1) * self.shard_size
        return min(ends[0], self.size), min(ends[1], self.size)

    def pieces(self, rank: int) -> list[Piece]:
        """The contents of a rank's shard, in order."""
        first, last = rank * self.shard_size, (rank + 1) * self.shard_size
        pieces, begin = [], 0
        for variable, size in zip(self.variables, self.sizes, strict=True):
            start, stop = max(first, begin), min(last, begin + size)
            if start < stop:
                pieces.append(Piece(variable, start - begin, stop - begin, start - first))
            begin += size
        return pieces


def cut(sizes: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> list[Bucket]:
    """Returns the buckets of some variables.

    Args:
        sizes: the number of elements of every variable.
        groups: for each bucket, the numbers of its variables.
        ranks: the number of shards of each bucket.
    """
    filled = [[i for i in group if sizes[i]] for group in groups]
    return [Bucket(tuple(g), tuple(sizes[i] for i in g), ranks) for g in filled if g]
