"""Rules of contractions: products of matrices and `einsum`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist._src.global_view.decision import Call, Decision, merged
from tfdist._src.global_view.layout import ONE, PARTIAL_SUM, WHOLE, Layout
from tfdist._src.global_view.rules.table import is_plain, rule

# Contractions.


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(call: Call) -> Decision | None:
    """Products of matrices."""
    left, right = call.dims(0), call.dims(1)
    if left is None or right is None or call.has("local"):
        return None
    plain = call.type == "MatMul"
    first = bool(call.attr("transpose_a" if plain else "adj_x"))
    second = bool(call.attr("transpose_b" if plain else "adj_y"))
    rank = max(len(left), len(right))
    batch = list(range(rank - 2))

    def labels(dims: Any, pair: Sequence[str]) -> list[Any]:
        lead = batch[len(batch) - (len(dims) - 2) :]
        used: list[Any] = [None if dims[k] == ONE else label for k, label in enumerate(lead)]
        return [*used, *pair]

    one = labels(left, ("k", "i") if first else ("i", "k"))
    other = labels(right, ("j", "k") if second else ("k", "j"))
    return contraction(call, [one, other], [*batch, "i", "j"])


@rule("Einsum")
def einsum(call: Call) -> Decision | None:
    """Any contraction."""
    equation = call.attr("equation").decode().replace(" ", "")
    given, _, result = equation.partition("->")
    terms = given.split(",")
    ranks = [call.rank(i) for i in range(len(terms))]
    if None in ranks or call.has("local"):
        return None
    missing = [
        rank - (len(term) - 3) if "..." in term else 0  # type: ignore[operator]
        for term, rank in zip(terms, ranks, strict=True)
    ]
    most = max([0, *missing])

    def labels(term: str, count: int, dims: Any = None) -> list[Any]:
        if "..." not in term:
            return list(term)
        before, _, after = term.partition("...")
        middle: list[Any] = list(range(most - count, most))
        if dims is not None:
            middle = [
                None if dims[len(before) + k] == ONE else label for k, label in enumerate(middle)
            ]
        return [*before, *middle, *after]

    inputs = [
        labels(term, count, call.dims(i))
        for i, (term, count) in enumerate(zip(terms, missing, strict=True))
    ]
    out = labels(result, most)
    if any(len(set(term)) != len(term) for t in terms for term in [t.replace("...", "")]):
        return None if call.has("rows") else call.all(WHOLE)
    return contraction(call, inputs, out)


def contraction(call: Call, labels: Sequence[Sequence[Any]], out: Sequence[Any]) -> Decision | None:
    """A contraction, given a label for each axis; None for an axis that is broadcast."""
    dims: list[Any] = []
    for label in out:
        found = None
        for i, own in enumerate(labels):
            if label in own:
                found = call.dims(i)[own.index(label)]  # type: ignore[index]
                break
        dims.append(found if found is not None else ONE)
    known = [merged(call.op.outputs[0], dims)] if call.out_rank() in (None, len(dims)) else None
    if call.has("partial") and not call.has("rows"):
        parts = [v for v in call.layouts if v.kind == "partial"]
        if len(parts) == 1 and parts[0].is_sum:
            return call.all(parts[0], dims=known)
        return None
    # Contracted rows are preferred: a sum is cheaper than gathered rows.
    candidates = [
        (label is None or label in out, i, label)
        for i, layout in enumerate(call.layouts)
        if layout.kind == "rows"
        for label in [labels[i][layout.axis]]
    ]
    if not candidates:
        return call.all(WHOLE, dims=known)
    shared = [c for c in candidates if sum(c[2] in own for own in labels) > 1 and c[2] is not None]
    both = [
        c
        for c in shared
        if not c[0]
        and all(
            call.layouts[i].kind == "rows" and labels[i][call.layouts[i].axis] == c[2]
            for i in range(len(labels))
        )
    ]
    labeled = both or [c for c in candidates if c[2] is not None]
    if not labeled:
        return None
    _, source, label = labeled[0]
    target = call.layouts[source]
    inputs: list[Layout | None] = []
    for i, layout in enumerate(call.layouts):
        if label in labels[i]:
            wanted = target.moved_to(list(labels[i]).index(label))
            inputs.append(None if layout == wanted else wanted)
        else:
            inputs.append(None if is_plain(layout) else WHOLE)
    reason = ""
    if len(candidates) > 1 and any(v is WHOLE for v in inputs):
        reason = "pairs of rows"
    row = call.dims(source)[target.axis]  # type: ignore[index]
    if label in out:
        at = list(out).index(label)
        if known is not None:
            changed = list(known[0])
            changed[at] = row
            known = [tuple(changed)]
        return Decision(inputs, [target.moved_to(at)], dims=known, reason=reason)
    return Decision(inputs, [PARTIAL_SUM], dims=known, reason=reason)
