"""Graphs of random operations act on workers' rows as on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.global_view.simulation import check
from tests.harness.tiers import some

_MAX_ELEMENTS = 400  # Per row.
# The size of an axis: an integer, and whether it is multiplied by the number of rows.
Size = tuple[int, bool]
Shape = tuple[Size, ...]


class RandomProgram:
    """A random program of two operands, the same whenever it is traced.

    Args:
        seed: the seed of its choices.
        length: the number of its operations.
    """

    def __init__(self, seed: int, length: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shapes: list[Shape] = [((1, True), (4, False)), ((1, True), (3, False), (4, False))]
        self.steps: list[tuple[str, Callable[..., Any], list[int]]] = []
        while len(self.steps) < length:
            name, add = OPERATIONS[self.rng.integers(len(OPERATIONS))]
            made = add(self)
            if made is None:
                continue
            shape, function, operands = made
            if elements(shape) <= _MAX_ELEMENTS and sum(times for _, times in shape) <= 2:
                self.steps.append((name, function, operands))
                self.shapes.append(shape)

    def __str__(self) -> str:
        return "; ".join(f"{name}{operands}" for name, _, operands in self.steps)

    def __call__(self, *inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            rows = tf.shape(inputs[0])[0]
            values = list(inputs)
            for _, function, operands in self.steps:
                values.append(function(rows, *(values[i] for i in operands)))
            results = values[-4:]
            total = sum([tf.reduce_mean(tf.sin(r)) for r in results], tf.zeros([]))
        found = tape.gradient(total, inputs)
        return [*results, *(tf.convert_to_tensor(g) for g in found if g is not None)]

    def any(self) -> tuple[int, Shape]:
        """Returns a random tensor; late ones are more likely."""
        i = len(self.shapes) - 1 - int(self.rng.geometric(0.3) - 1) % len(self.shapes)
        return i, self.shapes[i]

    def axis(self, shape: Shape, rows: bool | None = None) -> int | None:
        """Returns a random axis, with rows or without; None if there is none."""
        axes = [a for a, (_, times) in enumerate(shape) if rows in (None, times)]
        return int(self.rng.choice(axes)) if axes else None

    def constant(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype("float32") / 2


def elements(shape: Shape) -> int:
    return int(np.prod([factor for factor, _ in shape], initial=1)) if shape else 1


def size(rows: Any, given: Size) -> Any:
    return given[0] * rows if given[1] else given[0]


def largest(x: Any) -> Any:
    """Returns the index of the largest element of the last axis, regardless of rounding errors."""
    return tf.argmax(tf.round(x * 8), axis=-1, output_type=tf.int32)


def unary(p: RandomProgram) -> Any:
    i, shape = p.any()
    functions = [tf.tanh, tf.sin, tf.abs, tf.negative, tf.sigmoid, tf.nn.softplus, tf.identity]
    function = functions[p.rng.integers(len(functions))]
    return shape, lambda rows, x: function(x), [i]


def binary(p: RandomProgram) -> Any:
    (i, one), (j, other) = p.any(), p.any()
    rank = max(len(one), len(other))
    a, b = (((1, False),) * (rank - len(s)) + s for s in (one, other))
    if any(x != y and (1, False) not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    shape = tuple(y if x == (1, False) else x for x, y in zip(a, b, strict=True))
    functions = [tf.add, tf.subtract, tf.maximum, lambda x, y: tf.tanh(x * y)]
    function = functions[p.rng.integers(len(functions))]
    return shape, lambda rows, x, y: function(x, y), [i, j]


def with_constant(p: RandomProgram) -> Any:
    i, shape = p.any()
    sizes = [1 if times or p.rng.random() < 0.3 else factor for factor, times in shape]
    while sizes and p.rng.random() < 0.3:
        sizes = sizes[1:]
    value = p.constant(*sizes)
    return shape, lambda rows, x: x * value + value, [i]


def reduction(p: RandomProgram) -> Any:
    i, shape = p.any()
    axes = [a for a in range(len(shape)) if p.rng.random() < 0.5]
    keep = bool(p.rng.random() < 0.5)
    functions = [tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min]
    function = functions[p.rng.integers(len(functions))]
    made = [(1, False) if a in axes else s for a, s in enumerate(shape) if keep or a not in axes]
    return tuple(made), lambda rows, x: tf.tanh(function(x, axes, keepdims=keep)), [i]


def transposed(p: RandomProgram) -> Any:
    i, shape = p.any()
    order = p.rng.permutation(len(shape)).tolist()
    return tuple(shape[a] for a in order), lambda rows, x: tf.transpose(x, order), [i]


def _shaped(shape: Shape, p: RandomProgram) -> Callable[..., Any]:
    unknown = int(p.rng.integers(-1, len(shape))) if shape else -1

    def function(rows: Any, x: Any) -> Any:
        sizes = [-1 if a == unknown else size(rows, s) for a, s in enumerate(shape)]
        return tf.reshape(x, sizes)

    return function


def merged(p: RandomProgram) -> Any:
    i, shape = p.any()
    if len(shape) < 2:
        return None
    a = int(p.rng.integers(len(shape) - 1))
    (m, first), (n, second) = shape[a], shape[a + 1]
    if first and second:
        return None
    made = (*shape[:a], (m * n, first or second), *shape[a + 2 :])
    return made, _shaped(made, p), [i]


def divided(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None:
        return None
    factor, times = shape[a]
    divisors = [n for n in range(1, factor + 1) if factor % n == 0]
    n = int(p.rng.choice(divisors))
    pair = [(n, False), (factor // n, times)]
    if p.rng.random() < 0.5:
        pair = pair[::-1]
    made = (*shape[:a], *pair, *shape[a + 1 :])
    return made, _shaped(made, p), [i]


def joined(p: RandomProgram) -> Any:
    (i, one), (j, other) = p.any(), p.any()
    if len(one) != len(other) or not one:
        return None
    a = int(p.rng.integers(len(one)))
    same = all(x == y for k, (x, y) in enumerate(zip(one, other, strict=True)) if k != a)
    if not same or one[a][1] != other[a][1]:
        return None
    made = (*one[:a], (one[a][0] + other[a][0], one[a][1]), *one[a + 1 :])
    return made, lambda rows, x, y: tf.concat([x, y], a), [i, j]


def stacked(p: RandomProgram) -> Any:
    (i, one), (j, other) = p.any(), p.any()
    if one != other:
        return None
    a = int(p.rng.integers(len(one) + 1))
    return (*one[:a], (2, False), *one[a:]), lambda rows, x, y: tf.stack([x, y], a), [i, j]


def halved(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None or shape[a][0] % 2:
        return None
    which = int(p.rng.integers(2))
    made = (*shape[:a], (shape[a][0] // 2, shape[a][1]), *shape[a + 1 :])
    return made, lambda rows, x: tf.split(x, 2, axis=a)[which], [i]


def sliced(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None or shape[a][0] < 2:
        return None
    factor, times = shape[a]
    first = int(p.rng.integers(factor))
    last = int(p.rng.integers(first, factor)) + 1
    made = (*shape[:a], (last - first, times), *shape[a + 1 :])
    before = (slice(None),) * a

    def function(rows: Any, x: Any) -> Any:
        unit = rows if times else 1
        return x[(*before, slice(first * unit, last * unit))]

    return made, function, [i]


def picked(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape, rows=False)
    if a is None:
        return None
    at = int(p.rng.integers(shape[a][0]))
    return (*shape[:a], *shape[a + 1 :]), lambda rows, x: x[(*(slice(None),) * a, at)], [i]


def taken(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape, rows=False)
    if a is None:
        return None
    where = p.rng.integers(0, shape[a][0], 2)
    made = (*shape[:a], (2, False), *shape[a + 1 :])
    return made, lambda rows, x: tf.gather(x, where, axis=a), [i]


def expanded(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = int(p.rng.integers(len(shape) + 1))
    return (*shape[:a], (1, False), *shape[a:]), lambda rows, x: tf.expand_dims(x, a), [i]


def repeated(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None:
        return None
    times = [2 if k == a else 1 for k in range(len(shape))]
    made = (*shape[:a], (shape[a][0] * 2, shape[a][1]), *shape[a + 1 :])
    if p.rng.random() < 0.5:
        return made, lambda rows, x: tf.tile(x, times), [i]
    return made, lambda rows, x: tf.repeat(x, 2, axis=a), [i]


def broadcast(p: RandomProgram) -> Any:
    i, shape = p.any()
    made = ((1, True), *shape) if p.rng.random() < 0.5 else ((2, False), *shape)
    return made, lambda rows, x: tf.broadcast_to(x, [size(rows, s) for s in made]), [i]


def product(p: RandomProgram) -> Any:
    # `tf.matmul` of such operands and its gradient corrupt memory in TensorFlow's kernels.
    i, shape = p.any()
    if len(shape) < 2 or shape[-1][1]:
        return None
    matrix = p.constant(shape[-1][0], 3)
    return (*shape[:-1], (3, False)), lambda rows, x: tf.tanh(tf.tensordot(x, matrix, 1)), [i]


def contraction(p: RandomProgram) -> Any:
    (i, one), (j, other) = p.any(), p.any()
    if len(one) != 2 or len(other) != 2 or one[0] != other[0]:
        return None
    return (one[1], other[1]), lambda rows, x, y: tf.tanh(tf.einsum("ki,kj->ij", x, y)), [i, j]


def normalized(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None or len(shape) > 4:  # TensorFlow's kernel fails with more axes.
        return None
    return shape, lambda rows, x: tf.nn.softmax(x, axis=a), [i]


def cumulated(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape)
    if a is None:
        return None
    if p.rng.random() < 0.5:
        return shape, lambda rows, x: tf.reverse(x, [a]), [i]
    return shape, lambda rows, x: tf.tanh(tf.cumsum(x, a) / 4), [i]


def padded(p: RandomProgram) -> Any:
    i, shape = p.any()
    a = p.axis(shape, rows=False)
    if a is None:
        return None
    around = [[1, 1] if k == a else [0, 0] for k in range(len(shape))]
    made = (*shape[:a], (shape[a][0] + 2, False), *shape[a + 1 :])
    return made, lambda rows, x: tf.pad(x, around), [i]


def segments(p: RandomProgram) -> Any:
    i, shape = p.any()
    if len(shape) < 2 or shape[-1][1]:
        return None

    def function(rows: Any, x: Any) -> Any:
        numbers = largest(x) % 3
        return tf.tanh(tf.math.unsorted_segment_sum(x, numbers, 3))

    return ((3, False), shape[-1]), function, [i]


def encoded(p: RandomProgram) -> Any:
    i, shape = p.any()
    if not shape or shape[-1][1]:
        return None
    table = p.constant(shape[-1][0], 2)

    def function(rows: Any, x: Any) -> Any:
        numbers = largest(x)
        return tf.gather(table, numbers) + tf.one_hot(numbers, 2)

    return (*shape[:-1], (2, False)), function, [i]


def chosen(p: RandomProgram) -> Any:
    i, shape = p.any()
    value = float(p.rng.normal())
    return shape, lambda rows, x: tf.where(x > value, x, value * tf.ones_like(x)), [i]


OPERATIONS = [
    (function.__name__, function)
    for function in (
        unary, binary, binary, with_constant, reduction, transposed, merged, divided, joined,
        joined, stacked, halved, sliced, picked, taken, expanded, repeated, broadcast, product,
        contraction, normalized, cumulated, padded, segments, encoded, chosen,
    )
]  # fmt: skip


def shares_of(rng: np.random.Generator) -> list[int]:
    """Returns the shares of one to four workers, some of them possibly empty."""
    shares = rng.integers(0, 5, rng.integers(1, 5)).tolist()
    return shares if sum(shares) > 1 else [*shares, 3]


@pytest.fixture(autouse=True)
def _as_written():
    """Graphs run as they are: TensorFlow's optimizer changes the values of some of them."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
    )


@pytest.mark.parametrize("seed", some(range(300), always=[0]))
def test_a_random_graph_acts_on_rows_as_on_the_whole_batch(seed):
    rng = np.random.default_rng([seed, 1])
    program, shares = RandomProgram(seed, int(rng.integers(5, 31))), shares_of(rng)
    inputs = [
        rng.normal(size=(sum(shares), *(n for n, _ in shape[1:]))).astype("float32")
        for shape in program.shapes[:2]
    ]
    print(seed, shares, program)
    check(program, inputs, shares, static=bool(rng.integers(2)), tolerance=1e-4)
