"""Layouts of tensors over workers, and symbolic dimensions. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Symbol:
    """An unknown size; two different symbols never compare equal.

    Attributes:
        source: the tensor that has this size along `axis`; None for the number of rows of the
            batch.
        axis: the axis of `source`.
        size: the size if the traced graph determines it, for example by a fixed batch size.
    """

    source: Any = None
    axis: int = 0
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension: the product of an integer and symbols, such as `2 * batch * time`.

    Attributes:
        factor: the integer, at least 0.
        symbols: the symbols, in a fixed order; a symbol may occur several times.
    """

    factor: int
    symbols: tuple[Symbol, ...] = ()

    @property
    def value(self) -> int | None:
        """The dimension as an integer; None if it is unknown."""
        result = self.factor
        for symbol in self.symbols:
            if symbol.size is None:
                return 0 if self.factor == 0 else None
            result *= symbol.size
        return result

    def __mul__(self, other: Dim) -> Dim:
        if not (self.symbols and other.symbols):
            return Dim(self.factor * other.factor, self.symbols or other.symbols)
        symbols = sorted((*self.symbols, *other.symbols), key=id)
        return Dim(self.factor * other.factor, tuple(symbols))

    def divided_by(self, other: Dim) -> Dim | None:
        """Returns the quotient; None if the division is not known to be exact."""
        if self.factor == 0 and other.factor != 0:
            return self
        left = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in left:
                return self._divided_in_numbers(other)
            left.remove(symbol)
        if other.factor == 0 or self.factor % other.factor:
            return self._divided_in_numbers(other)
        return Dim(self.factor // other.factor, tuple(left))

    def _divided_in_numbers(self, other: Dim) -> Dim | None:
        own, by = self.value, other.value
        if own is None or not by or own % by:
            return None
        return Dim(own // by)

    def is_same(self, other: Dim) -> bool:
        """Whether two dimensions are known to be equal."""
        return self == other or (self.value is not None and self.value == other.value)

    def has(self, symbol: Symbol) -> bool:
        """Whether a symbol is a factor of the dimension."""
        return symbol in self.symbols

    def __repr__(self) -> str:
        names = [f"s{id(symbol) % 997}" for symbol in self.symbols]
        return "*".join([*([str(self.factor)] if self.factor != 1 or not names else []), *names])


ONE = Dim(1)


def product(dims: Iterable[Dim]) -> Dim:
    """Returns the product of dimensions."""
    result = ONE
    for dim in dims:
        result *= dim
    return result


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the workers hold a tensor's value for the whole batch.

    Attributes:
        kind: one of
            "whole": every worker holds the value;
            "rows": each worker holds its own rows, cut along an axis;
            "partial": the value is the reduction of the workers' values;
            "per_worker": each worker holds a value of its own, such as its rank or its shard of
                the optimizer state; only collectives of the traced program combine the values;
            "unset": no value has been written yet, as in a new list of tensors;
            "shared": a resource that the workers of one process share.
        axis: for the kind "rows", the axis along which the rows are cut. It has the size
            `outer * rows * inner`.
        outer: how often the axis repeats all rows, such as twice after a tensor has been
            concatenated with itself.
        inner: the number of consecutive elements along the axis that belong to the same row.
        reduction: for a partial value, "sum", "min", "max", "product", "all" or "any"; or "stack"
            if the workers' values are stacked along the first axis.
        zeroed: for a partial sum, whether a worker without rows holds zeros. Otherwise, such a
            worker holds a value computed from substitute rows, which must not be added to the sum.
    """

    kind: str
    axis: int = 0
    outer: Dim = ONE
    inner: Dim = ONE
    reduction: str = ""
    zeroed: bool = False

    def moved_to(self, axis: int) -> Layout:
        """Returns this layout, but with the rows on another axis."""
        return dataclasses.replace(self, axis=axis)

    @property
    def is_sum(self) -> bool:
        """Whether the value is a partial sum."""
        return self.kind == "partial" and self.reduction == "sum"

    @property
    def has_one_element_per_row(self) -> bool:
        """Whether the axis of the rows has exactly one element for each row."""
        return self.outer == ONE and self.inner == ONE

    def __repr__(self) -> str:
        if self.kind == "rows":
            around = "" if self.has_one_element_per_row else f" of {self.outer}, {self.inner}"
            return f"rows({self.axis}{around})"
        return f"partial({self.reduction})" if self.kind == "partial" else self.kind


WHOLE = Layout("whole")
PER_WORKER = Layout("per_worker")
UNSET = Layout("unset")
SHARED = Layout("shared")
PARTIAL_SUM = Layout("partial", reduction="sum")
ZEROED_SUM = Layout("partial", reduction="sum", zeroed=True)


def rows(axis: int = 0, outer: Dim = ONE, inner: Dim = ONE) -> Layout:
    """Returns the layout of a tensor that holds the rows of the batch along an axis."""
    return Layout("rows", axis, outer, inner)


def partial(reduction: str) -> Layout:
    """Returns the layout of a value that is the reduction of the workers' values."""
    return Layout("partial", reduction=reduction)


def joined(first: Layout, second: Layout) -> Layout:
    """Returns the layout of the result of a conditional, given the layouts in its two branches."""
    if first == second or second.kind == "unset":
        return first
    if first.kind == "unset":
        return second
    kinds = {first.kind, second.kind}
    if "per_worker" in kinds:
        return PER_WORKER
    if kinds == {"whole", "rows"}:
        return first if first.kind == "rows" else second
    if kinds == {"whole", "partial"}:
        one = first if first.kind == "partial" else second
        return ZEROED_SUM if one.is_sum else WHOLE
    if first.is_sum and second.is_sum:
        return ZEROED_SUM
    return WHOLE


def aligned(before: Sequence[Dim], layout: Layout, after: Sequence[Dim]) -> Layout | None:
    """Returns the layout that a tensor with rows has after a reshape.

    Args:
        before: the dimensions before the reshape.
        layout: the layout before the reshape, of the kind "rows".
        after: the dimensions after the reshape.

    Returns:
        The layout; None if the rows are not on a single axis after the reshape.
    """
    row = before[layout.axis].divided_by(layout.outer * layout.inner)
    if row is None:
        return None
    major = product(before[: layout.axis]) * layout.outer
    minor = layout.inner * product(before[layout.axis + 1 :])
    for axis, dim in enumerate(after):
        # `outer` determines `inner` and vice versa, since the number of elements stays the same.
        outer = major.divided_by(product(after[:axis]))
        if outer is not None:
            inner = dim.divided_by(outer * row)
            if inner is not None:
                return rows(axis, outer, inner)
        inner = minor.divided_by(product(after[axis + 1 :]))
        if inner is not None:
            outer = dim.divided_by(row * inner)
            if outer is not None:
                return rows(axis, outer, inner)
    return None
