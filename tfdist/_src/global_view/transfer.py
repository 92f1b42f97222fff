"""Describes the values that a step communicates, as data and as text.

The launcher also uses this module, so it does not import TensorFlow.
"""

import dataclasses
from collections.abc import Sequence

# Assumed size of an unknown dimension in estimates.
_NOMINAL = 32
STATISTICS = "statistics of each replica"
SPARSE_GRADIENT = "a sparse gradient"
# Maps the reason for a gather to advice on avoiding the gather. The advice is empty if the gather
# takes the place of a reduction.
REMEDIES = {
    "pairs of rows": "Compare smaller values, such as embeddings instead of features: each row is "
    "compared with all others.",
    "rows are coupled": "Replace operations that mix rows, such as sorts, cumulative sums and "
    "diagonals, by sums or means over the rows, and `tf.boolean_mask` by a mask.",
    "no rule": "Replace the operation, or the Python function, by TensorFlow or Keras operations "
    "that tfdist can divide by rows.",
    "numbers are drawn for the whole batch": "Draw the numbers by `keras.random` or "
    "`tf.random.stateless_*`.",
    "state that devices share": "Create the variable, seed generator or table in the strategy's "
    "scope.",
    "printed": "Print or write a sum or a mean over the rows.",
    "a result for all rows": "Return the mean over the rows as the log.",
    STATISTICS: "",
    SPARSE_GRADIENT: "",
}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that a step communicates.

    Attributes:
        kind: "reduce" or "gather"; or "send" for a value that is sent between pipeline stages.
        operation: the type of the operation that needs the value; "moments" for statistics of the
            batch.
        size: the number of bytes of the whole value; None if a dimension is unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: the file and line of the user's code, or the name of the operation.
        reason: why the value is gathered; "" for a reduction.
        element_size: the number of bytes of an element; 0 if it varies, as for strings.
    """

    kind: str
    operation: str
    size: int | None
    shape: tuple[int | None, ...]
    where: str
    reason: str
    element_size: int = 0

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else bytes_text(self.size)
        shape = "x".join("?" if n is None else str(n) for n in self.shape) or "scalar"
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.kind} {size} [{shape}] for {self.operation} at {self.where}{why}"

    def estimate(self, unknown: int | None = None) -> int:
        """Returns the number of bytes of the whole value, estimated if it is unknown.

        Args:
            unknown: the assumed size of each unknown dimension; 32 by default.
        """
        if self.size is not None:
            return self.size
        count = self.element_size
        for size in self.shape:
            count *= (unknown or _NOMINAL) if size is None else size
        return count

    @property
    def replaces_reduction(self) -> bool:
        """Whether the value is gathered in place of a reduction, as sparse gradients are."""
        return REMEDIES.get(self.reason) == ""


def largest_first(found: Sequence[Transfer]) -> list[Transfer]:
    """Sorts transfers by decreasing size; unknown sizes are estimated."""
    return sorted(found, key=lambda one: -one.estimate())


def total(found: Sequence[Transfer], kind: str) -> int:
    """Returns the total size in bytes of all transfers of a kind; unknown sizes count as 0."""
    return sum(one.size or 0 for one in found if one.kind == kind)


def remedies(found: Sequence[Transfer]) -> list[str]:
    """Returns advice on avoiding gathers, one line per reason."""
    reasons = dict.fromkeys(one.reason for one in found if one.kind == "gather")
    known = [(reason, REMEDIES.get(reason)) for reason in reasons]
    return [f"To gather less ({reason}): {remedy}" for reason, remedy in known if remedy]


def report(found: Sequence[Transfer]) -> str:
    """Returns a table of the values that a step communicates, largest first."""
    if not found:
        return "The step communicates nothing but the number of rows."
    unknown = sum(one.size is None for one in found)
    reduced, gathered, sent = (total(found, kind) for kind in ("reduce", "gather", "send"))
    totals = totals_text(reduced, gathered, sent, unknown)
    lines = [f"The step {totals}:"]
    ordered = largest_first(found)
    lines += [f"  {transfer}" for transfer in ordered]
    lines += remedies(ordered)
    return "\n".join(lines)


def totals_text(reduced: int, gathered: int, sent: int, unknown: int) -> str:
    """Says how many bytes a step communicates, as the predicate of a sentence.

    Example:
        >>> totals_text(2048, 0, 0, 1)
        'reduces 2.0 KiB and gathers 0 B, besides 1 value of unknown size'
    """
    rest = f", besides {unknown} value{'s' * (unknown > 1)} of unknown size" if unknown else ""
    values = [f"reduces {bytes_text(reduced)}", f"gathers {bytes_text(gathered)}"]
    if sent:
        values = [", ".join(values), f"sends {bytes_text(sent)} between stages"]
    return " and ".join(values) + rest


def bytes_text(count: int) -> str:
    """Formats a number of bytes with a unit.

    Example:
        >>> bytes_text(1536)
        '1.5 KiB'
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
