"""Evaluates small integer tensors, such as shapes and axes, with symbols for unknown sizes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.global_view.layout import ONE, Dim, product

_MAX_ELEMENTS = 64  # Larger tensors are not evaluated.
_RULES: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes along which a gradient is summed because the forward operand was broadcast along them.

    Attributes:
        certain: axes that were certainly broadcast.
        possible: axes that may have been broadcast, including the certain axes.
    """

    certain: frozenset[int]
    possible: frozenset[int]


def contents_of(op: Any, values: Sequence[Any]) -> list[Any] | None:
    """Returns the content of each result of an operation; None if the contents are unknown.

    Args:
        op: the operation.
        values: facts about the operands, as `Value`s.
    """
    rule = _RULES.get(op.type)
    if rule is None or not all(t.dtype.is_integer or t.dtype.is_bool for t in op.outputs):
        return None
    try:
        results = rule(op, values)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None  # An operand is unknown, or has an unsupported form.
    if results is None:
        return None
    results = results if isinstance(results, list) else [results]
    return [
        r if not isinstance(r, np.ndarray) or r.size <= _MAX_ELEMENTS else None for r in results
    ]


def array(values: Any) -> np.ndarray:
    """Converts nested lists of integers, `Dim`s and Nones to an array of `Dim`s and Nones."""
    flat = np.empty(np.shape(values), dtype=object)
    given = np.array(values, dtype=object)
    for index in np.ndindex(flat.shape):
        value: Any = given[index]
        flat[index] = Dim(int(value)) if isinstance(value, (int, np.integer)) else value
    return flat


def _rule(*types: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES.update(dict.fromkeys(types, function))
        return function

    return register


def _known(value: Any) -> np.ndarray:
    if not isinstance(value.content, np.ndarray):
        raise ValueError("unknown")
    return value.content


def _ints(value: Any) -> list[int]:
    return [int(d.value) for d in _known(value).ravel()]


@_rule("Const")
def _const(op: Any, values: Any) -> Any:
    dtype, shape = op.outputs[0].dtype, op.outputs[0].shape
    if not (dtype.is_integer or dtype.is_bool) or (shape.num_elements() or 0) > _MAX_ELEMENTS:
        return None
    return array(tf.make_ndarray(op.get_attr("value")).astype(np.int64))


@_rule("Shape", "ShapeN")
def _shape(op: Any, values: Any) -> Any:
    return [None if v.dims is None else array(list(v.dims)) for v in values]


@_rule("Size")
def _size(op: Any, values: Any) -> Any:
    return None if values[0].dims is None else array(product(values[0].dims))


@_rule("Rank")
def _rank(op: Any, values: Any) -> Any:
    return None if values[0].dims is None else array(len(values[0].dims))


@_rule("Identity", "StopGradient", "PreventGradient", "Snapshot")
def _same(op: Any, values: Any) -> Any:
    return values[0].content


@_rule("Cast")
def _cast(op: Any, values: Any) -> Any:
    return values[0].content


@_rule("Pack")
def _pack(op: Any, values: Any) -> Any:
    parts = [v.content if isinstance(v.content, np.ndarray) else _unknown_of(v) for v in values]
    return np.stack(parts, axis=op.get_attr("axis"))


@_rule("ConcatV2")
def _concat(op: Any, values: Any) -> Any:
    parts = [
        v.content if isinstance(v.content, np.ndarray) else _unknown_of(v) for v in values[:-1]
    ]
    return np.concatenate(parts, axis=_ints(values[-1])[0])


def _unknown_of(value: Any) -> np.ndarray:
    shape = [int(d.value) for d in value.dims]
    if np.prod(shape, dtype=int) > _MAX_ELEMENTS:
        raise ValueError("large")
    return np.full(shape, None, dtype=object)


@_rule("StridedSlice")
def _strided_slice(op: Any, values: Any) -> Any:
    known = _known(values[0])
    begin, end, strides = map(_ints, values[1:4])
    masks = {
        name: int(op.get_attr(f"{name}_mask"))
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index: list[Any] = []
    for i, (b, e, s) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            index.append(Ellipsis)
        elif masks["new_axis"] & bit:
            index.append(None)
        elif masks["shrink_axis"] & bit:
            index.append(b)
        else:
            first = None if masks["begin"] & bit else b
            index.append(slice(first, None if masks["end"] & bit else e, s))
    return array(known[tuple(index)])


@_rule("Slice")
def _slice(op: Any, values: Any) -> Any:
    known, begin, size = _known(values[0]), _ints(values[1]), _ints(values[2])
    parts = [slice(b, None if n == -1 else b + n) for b, n in zip(begin, size, strict=True)]
    return known[tuple(parts)]


@_rule("GatherV2")
def _gather(op: Any, values: Any) -> Any:
    indices = np.array([int(d.value) for d in _known(values[1]).ravel()]).reshape(
        _known(values[1]).shape
    )
    return array(np.take(_known(values[0]), indices, axis=_ints(values[2])[0]))


@_rule("Reshape")
def _reshape(op: Any, values: Any) -> Any:
    return _known(values[0]).reshape(_ints(values[1]))


@_rule("ExpandDims")
def _expand(op: Any, values: Any) -> Any:
    return np.expand_dims(_known(values[0]), _ints(values[1])[0])


@_rule("Squeeze")
def _squeeze(op: Any, values: Any) -> Any:
    axes = tuple(op.get_attr("squeeze_dims")) or None
    return array(np.squeeze(_known(values[0]), axis=axes))


@_rule("Unpack")
def _unpack(op: Any, values: Any) -> Any:
    parts = np.moveaxis(_known(values[0]), op.get_attr("axis"), 0)
    return [array(part) for part in parts]


@_rule("Fill")
def _fill(op: Any, values: Any) -> Any:
    shape = _ints(values[0])
    if np.prod(shape, dtype=int) > _MAX_ELEMENTS:
        return None
    return np.full(shape, _known(values[1]).item(), dtype=object)


@_rule("Range")
def _range(op: Any, values: Any) -> Any:
    start, limit, delta = (_ints(v)[0] for v in values)
    return array(np.arange(start, limit, delta)) if limit - start <= _MAX_ELEMENTS * delta else None


@_rule("ReverseV2")
def _reverse(op: Any, values: Any) -> Any:
    return np.flip(_known(values[0]), tuple(_ints(values[1])))


@_rule("Prod")
def _prod(op: Any, values: Any) -> Any:
    known = _known(values[0])
    axes = [a % max(known.ndim, 1) for a in _ints(values[1])]
    if known.ndim == 0 or (known.ndim == 1 and axes == [0]):
        total = array(product(known.ravel()))
        return total.reshape([1] * known.ndim) if op.get_attr("keep_dims") else total
    return None


@_rule("DynamicStitch")
def _stitch(op: Any, values: Any) -> Any:
    half = len(values) // 2
    found: dict[int, Any] = {}
    for where, data in zip(values[:half], values[half:], strict=True):
        indices, elements = _ints(where), data.content
        for k, index in enumerate(indices):
            found[index] = elements.ravel()[k] if isinstance(elements, np.ndarray) else None
    return array([found[i] for i in range(len(found))])


@_rule("BroadcastArgs")
def _broadcast_args(op: Any, values: Any) -> Any:
    first, second = (list(_known(v)) for v in values)
    return array(broadcast(first, second))


def broadcast(first: Sequence[Dim | None], second: Sequence[Dim | None]) -> list[Dim | None]:
    """Returns the dimensions of the result of broadcasting two shapes."""
    rank = max(len(first), len(second))
    one: list[Any] = [ONE] * (rank - len(first)) + list(first)
    other: list[Any] = [ONE] * (rank - len(second)) + list(second)
    return [_wider(a, b) for a, b in zip(one, other, strict=True)]


def _wider(a: Dim | None, b: Dim | None) -> Dim | None:
    if a == ONE:
        return b
    if b == ONE:
        return a
    if a is None or b is None:
        return None
    if a.is_same(b):
        return b if a.value is not None and not a.symbols else a
    # If one size is a known number other than one, it is the size of the result.
    numbers = [d for d in (a, b) if d.value is not None]
    return numbers[0] if len(numbers) == 1 else None


@_rule("BroadcastGradientArgs")
def _broadcast_gradient(op: Any, values: Any) -> Any:
    first, second = (list(_known(v)) for v in values)
    if _are_same(first, second):
        return [Axes(frozenset(), frozenset())] * 2  # Nothing was broadcast.
    rank = max(len(first), len(second))
    sides: list[list[Any]] = [[ONE] * (rank - len(s)) + list(s) for s in (first, second)]
    results = []
    for given, own, other in ((first, *sides), (second, *sides[::-1])):
        certain, possible = set(range(rank - len(given))), set(range(rank - len(given)))
        for axis, (a, b) in enumerate(zip(own, other, strict=True)):
            if a == ONE and (b != ONE or len(first) != len(second)):
                # If the other size is one at run time, summing along this axis has no effect.
                certain.add(axis)
                possible.add(axis)
            elif a == ONE:
                possible.add(axis)
            elif b == ONE:
                pass  # If this size is one at run time, summing along this axis has no effect.
            elif a is None or (a.value is None and not (b is not None and a.is_same(b))):
                possible.add(axis)
        results.append(Axes(frozenset(certain), frozenset(possible)))
    return results


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        a is not None and b is not None and a.is_same(b) for a, b in zip(first, second, strict=True)
    )


@_rule("ConcatOffset")
def _concat_offset(op: Any, values: Any) -> Any:
    shapes = [_known(v) for v in values[1:]]
    axis = _ints(values[0])[0] % len(shapes[0])
    results = []
    offset: Dim | None = Dim(0)
    for shape in shapes:
        begin = array([0] * len(shape))
        begin[axis] = offset
        results.append(begin)
        size = shape[axis]
        offset = None if offset is None or size is None else _add(offset, size)
    return results


@_rule("Transpose")
def _transpose(op: Any, values: Any) -> Any:
    return np.transpose(_known(values[0]), _ints(values[1]))


@_rule("InvertPermutation")
def _invert_permutation(op: Any, values: Any) -> Any:
    return array(np.argsort(_ints(values[0])))


@_rule("ListDiff")
def _list_difference(op: Any, values: Any) -> Any:
    given, without = _ints(values[0]), set(_ints(values[1]))
    kept = [i for i, number in enumerate(given) if number not in without]
    return [array([given[i] for i in kept]), array(kept)]


@_rule("Split")
def _split(op: Any, values: Any) -> Any:
    return np.split(_known(values[1]), len(op.outputs), axis=_ints(values[0])[0])


@_rule("SplitV")
def _split_in_sizes(op: Any, values: Any) -> Any:
    known, sizes, axis = _known(values[0]), _ints(values[1]), _ints(values[2])[0]
    if -1 in sizes:
        sizes[sizes.index(-1)] = known.shape[axis] - sum(sizes) - 1
    return np.split(known, np.cumsum(sizes)[:-1], axis=axis)


@_rule("Tile")
def _tile(op: Any, values: Any) -> Any:
    return np.tile(_known(values[0]), _ints(values[1]))


@_rule("BroadcastTo")
def _broadcast_to(op: Any, values: Any) -> Any:
    shape = _ints(values[1])
    if np.prod(shape, dtype=int) > _MAX_ELEMENTS:
        return None
    return np.array(np.broadcast_to(_known(values[0]), shape))


@_rule("ZerosLike")
def _zeros_like(op: Any, values: Any) -> Any:
    return _repeated(0, values[0])


@_rule("OnesLike")
def _ones_like(op: Any, values: Any) -> Any:
    return _repeated(1, values[0])


def _repeated(number: int, like: Any) -> Any:
    shape = _unknown_of(like).shape
    return array(np.full(shape, number))


def _arithmetic(
    both: Callable[[Dim, Dim], Dim | None],
) -> Callable[[Any, Any], Any]:
    def compute(op: Any, values: Any) -> Any:
        one, other = np.broadcast_arrays(_known(values[0]), _known(values[1]))
        result = np.empty(one.shape, dtype=object)
        for index in np.ndindex(one.shape):
            a: Any = one[index]
            b: Any = other[index]
            result[index] = None if a is None or b is None else both(a, b)
        return result

    return compute


def _by_numbers(function: Callable[[int, int], int]) -> Callable[[Dim, Dim], Dim | None]:
    def both(a: Dim, b: Dim) -> Dim | None:
        one, other = a.value, b.value
        return None if one is None or other is None else Dim(int(function(one, other)))

    return both


def _add(a: Dim, b: Dim) -> Dim | None:
    if a == Dim(0) or b == Dim(0):
        return b if a == Dim(0) else a
    if a.symbols == b.symbols:
        return Dim(a.factor + b.factor, a.symbols if a.factor + b.factor else ())
    return _by_numbers(lambda x, y: x + y)(a, b)


def _subtract(a: Dim, b: Dim) -> Dim | None:
    return _add(a, Dim(-b.factor, b.symbols))


def _maximum(a: Dim, b: Dim) -> Dim | None:
    if a.is_same(b):
        return a
    # Unknown sizes are assumed to be at least one.
    for one, other in ((a, b), (b, a)):
        if one.symbols and one.factor >= 1 and not other.symbols and other.factor <= 1:
            return one
    return _by_numbers(max)(a, b)


def _floor_divide(a: Dim, b: Dim) -> Dim | None:
    if b.value == 0:
        return None
    exact = a.divided_by(b)
    return _by_numbers(lambda x, y: x // y)(a, b) if exact is None else exact


def _floor_modulo(a: Dim, b: Dim) -> Dim | None:
    if b.value == 0:
        return None
    exact = a.divided_by(b) if a.factor else None
    return _by_numbers(lambda x, y: x % y)(a, b) if exact is None else Dim(0)


def _equal(a: Dim, b: Dim) -> Dim | None:
    return Dim(1) if a.is_same(b) else _by_numbers(lambda x, y: x == y)(a, b)


def _not_equal(a: Dim, b: Dim) -> Dim | None:
    equal = _equal(a, b)
    return None if equal is None else Dim(1 - equal.factor)


for _name, _function in {
    "Mul": lambda a, b: a * b,
    "Add": _add,
    "Sub": _subtract,
    "Maximum": _maximum,
    "Minimum": _by_numbers(min),
    "FloorDiv": _floor_divide,
    "FloorMod": _floor_modulo,
    "Equal": _equal,
    "NotEqual": _not_equal,
    "Less": _by_numbers(lambda a, b: a < b),
    "Greater": _by_numbers(lambda a, b: a > b),
    "LessEqual": _by_numbers(lambda a, b: a <= b),
    "GreaterEqual": _by_numbers(lambda a, b: a >= b),
}.items():
    _RULES[_name] = _arithmetic(_function)


@_rule("AddV2")
def _add_to_each(op: Any, values: Any) -> Any:
    for axes, offset in (values, values[::-1]):
        if isinstance(axes.content, Axes):
            (by,) = _ints(offset)
            given = (axes.content.certain, axes.content.possible)
            return Axes(*(frozenset(a + by for a in some) for some in given))
    return _arithmetic(_add)(op, values)


@_rule("SelectV2")
def _select(op: Any, values: Any) -> Any:
    condition, yes, no = np.broadcast_arrays(*map(_known, values))
    result = np.empty(condition.shape, dtype=object)
    for index in np.ndindex(result.shape):
        chosen: Any = condition[index]
        if chosen is not None and chosen.value is not None:
            result[index] = yes[index] if chosen.value else no[index]
    return result


@_rule("Neg")
def _negative(op: Any, values: Any) -> Any:
    known = _known(values[0])
    return array([None if d is None else Dim(-d.factor, d.symbols) for d in known.ravel()]).reshape(
        known.shape
    )
