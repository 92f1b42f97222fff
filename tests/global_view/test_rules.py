"""Each family of operations acts on workers' rows as on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.global_view.simulation import analyze, check, gathers, trace
from tests.harness.tiers import some

_ROWS = 11
SHARES = [(4, 4, 3), (6, 5), (11, 0), (0, 5, 0, 6), (11,)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


def constant(*shape: int, seed: int = 7) -> tf.Tensor:
    return tf.constant(normal(*shape, seed=seed))


def rows_of(x: Any) -> Any:
    """Returns the number of rows, as a program computes it."""
    return tf.shape(x)[0]


def classes(x: Any) -> Any:
    """Returns a number from 0 to 2 for each row."""
    return tf.argmax(x[:, :3], axis=-1, output_type=tf.int32)


def _rows_of_unknown_rank(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, size=2, infer_shape=False)
    both = array.write(0, x).write(1, 2.0 * x).concat()
    return tf.reshape(both, [2, -1, 4])[1]


X, S, IMAGE = (_ROWS, 4), (_ROWS, 5, 4), (_ROWS, 6, 6, 3)
Program = Callable[..., Any]

# Programs that gather no rows: the shapes of their operands, and the functions.
ROWWISE: dict[str, tuple[list[tuple[int, ...]], Program]] = {
    # Elementwise operations with broadcasting.
    "of equal ranks": ([X, X], lambda x, y: x * y + x / (2 + y * y)),
    "by a vector": ([S, (_ROWS, 4)], lambda x, y: x * constant(4) + y[:, None]),
    "by a column": ([X, (_ROWS, 1)], lambda x, y: x - y),
    "by a row": ([X], lambda x: tf.maximum(x, constant(1, 4)) * constant(1, 1)),
    "of a higher rank": ([X], lambda x: x * constant(3, 1, 4)),
    "with rows behind": ([X, X], lambda x, y: tf.transpose(x) * tf.transpose(y) + constant(4, 1)),
    "chosen": ([X, X], lambda x, y: tf.where(x > y, x, 2.0 * y) + tf.where(x > 0, x, 0.0)),
    "clipped": ([X], lambda x: tf.clip_by_value(x, -0.5, 0.5) + tf.clip_by_norm(x, 1.0, axes=[1])),
    "cast": ([X], lambda x: tf.cast(tf.cast(x * 3, tf.int32) % 2, tf.float32) * x),
    "special": ([X], lambda x: tf.math.lgamma(x * x + 1) + tf.math.erf(x) + tf.math.bessel_i0(x)),
    # Sums of integers wrap around, and quotients of integers are rounded.
    "sums that wrap around": (
        [X],
        lambda x: [
            tf.cast(tf.reduce_sum(tf.cast(tf.abs(x) * 40, kind)), tf.float32)
            for kind in (tf.uint8, tf.int8, tf.uint16, tf.int32)
        ],
    ),
    "rounded sums": (
        [X],
        lambda x: [
            tf.raw_ops.Div(x=tf.reduce_sum(tf.cast(x * 10, tf.int32), axis), y=7)
            for axis in (0, None)
        ],
    ),
    # Reductions.
    "means": ([X], lambda x: (x - tf.reduce_mean(x)) / tf.math.reduce_std(x, axis=0)),
    "sums": ([S], lambda x: [tf.reduce_sum(x, a) for a in (0, 1, 2, [0, 1], [1, 2], None)]),
    "kept sums": ([S], lambda x: [tf.reduce_sum(x, a, keepdims=True) * x for a in (0, [0, 2])]),
    "maxima": ([S], lambda x: [tf.reduce_max(x, a) for a in (0, 1, [0, 2])]),
    "minima": ([S], lambda x: [x - tf.reduce_min(x, a, keepdims=True) for a in (0, 1, [0, 2])]),
    "products": ([S], lambda x: [tf.reduce_prod(x, a) for a in (1, 2, [1, 2])]),
    "any and all": (
        [X],
        lambda x: [f(x > -1, a) for f in (tf.reduce_any, tf.reduce_all) for a in (0, 1, None)],
    ),
    "norms": ([X], lambda x: [tf.norm(x), tf.nn.l2_loss(x), tf.nn.l2_normalize(x, 1)]),
    "log sums": ([X], lambda x: [tf.reduce_logsumexp(x, 1), tf.reduce_logsumexp(x, 0)]),
    # Shapes.
    "merged": ([S], lambda x: tf.reshape(x, [-1, 4]) @ constant(4, 2)),
    "merged and split": ([S], lambda x: tf.reshape(tf.reshape(x, [-1, 4]) ** 2, tf.shape(x))),
    "merged with rows behind": (
        [S],
        lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [5, -1]) * 2.0,
    ),
    "merged with rows in the middle": (
        [S],
        lambda x: tf.reshape(
            tf.tanh(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1])), [5, rows_of(x), 4]
        ),
    ),
    "flat": ([S], lambda x: tf.reshape(x, [-1]) ** 2),
    "flat and back": ([S], lambda x: tf.reshape(tf.reshape(x, [-1]), [rows_of(x), 2, 10])),
    "of heads": (
        [S],
        lambda x: tf.transpose(tf.reshape(x, [rows_of(x), 5, 2, 2]), [0, 2, 1, 3]),
    ),
    "permuted": ([S], lambda x: tf.transpose(tf.transpose(x, [2, 0, 1]), [0, 2, 1])),
    "reversed order": ([X], lambda x: tf.transpose(tf.transpose(x)) + x),
    "expanded": ([X], lambda x: [tf.squeeze(tf.expand_dims(x, a) * 2.0, a) for a in (0, 1, -1)]),
    "squeezed": ([(_ROWS, 1, 4, 1)], lambda x: tf.squeeze(x, [1]) ** 2),
    "tiled": ([X], lambda x: [tf.tile(x, [1, 3]) ** 2, tf.tile(x[:, None], [1, 2, 1])]),
    "tiled rows": ([X], lambda x: tf.reduce_sum(tf.tile(x, [3, 1]) ** 2)),
    "repeated": ([X], lambda x: tf.repeat(x, 3, axis=0) ** 2),
    "repeated in rows": ([X], lambda x: tf.repeat(x, 2, axis=1) ** 2),
    "broadcast": ([X], lambda x: tf.broadcast_to(x, [3, rows_of(x), 4]) * constant(3, 1, 1)),
    "filled": ([X], lambda x: x * tf.fill([rows_of(x), 4], 2.0) + tf.ones_like(x)),
    "filled twice": (
        [X],
        lambda x: tf.reshape(tf.ones([2 * rows_of(x), 4]), [-1, 2, 4]) * x[:, None],
    ),
    "with a token": (
        [S],
        lambda x: tf.concat([tf.broadcast_to(constant(1, 1, 4), [rows_of(x), 1, 4]), x], 1),
    ),
    "stacked": ([X, X], lambda x, y: [tf.stack([x, y], a) ** 2 for a in (0, 1, 2)]),
    "unstacked": ([S], lambda x: sum(tf.unstack(x, axis=1))),
    "concatenated": ([X, (_ROWS, 2)], lambda x, y: tf.concat([x, y, x], 1) ** 2),
    "split": (
        [X],
        lambda x: [a * b for a, b in [tf.split(x, 2, axis=1), tf.split(x, [1, 3], 1)[:1] * 2]],
    ),
    "sizes": ([X], lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x) * rows_of(x), tf.float32)),
    # Slices of repetitions of the rows.
    "two views": (
        [X, X],
        lambda x, y: (lambda z: z[: rows_of(x)] * z[rows_of(x) :])(tf.concat([x, y], 0) ** 2),
    ),
    "halves": ([X, X], lambda x, y: (lambda a, b: a * b)(*tf.split(tf.concat([x, y], 0) ** 2, 2))),
    "three views": (
        [X, X],
        lambda x, y: (
            lambda z: z[rows_of(x) : 2 * rows_of(x)] * z[: rows_of(x)] + z[2 * rows_of(x) :]
        )(tf.concat([x, y, x], 0) ** 2),
    ),
    "one view sliced": (
        [X, X],
        lambda x, y: tf.slice(tf.concat([x, y], 0) ** 2, [rows_of(x), 1], [rows_of(x), 2]),
    ),
    # Slices within rows.
    "sliced": ([S], lambda x: [x[:, 1:3] ** 2, x[:, ::2], x[:, 0], x[..., -1], x[:, None, :, 1:]]),
    "less the first row": ([X], lambda x: x - x[0]),
    "sliced from rows behind": ([S], lambda x: tf.transpose(x, [1, 2, 0])[1:, 0] ** 2),
    "taken": ([S], lambda x: tf.gather(x, [0, 2, 2], axis=1) ** 2),
    "looked up": ([X], lambda x: tf.gather(constant(3, 2), classes(x)) * x[:, :1]),
    "looked up in rows": (
        [S],
        lambda x: tf.gather(x, tf.argmax(x, axis=1, output_type=tf.int32), axis=1, batch_dims=1),
    ),
    "picked": ([X], lambda x: tf.gather_nd(constant(3, 2), classes(x)[:, None]) * x[:, :2]),
    "one hot": ([X], lambda x: [tf.one_hot(classes(x), 3, axis=a) * 2.0 for a in (0, 1, -1)]),
    "padded": (
        [S],
        lambda x: [
            tf.pad(x, [[0, 0], [1, 2], [0, 0]]) ** 2,
            tf.pad(x, [[0, 0], [0, 0], [1, 1]], "REFLECT") ** 2,
        ],
    ),
    "cumulated": ([S], lambda x: [tf.cumsum(x, 1) ** 2, tf.math.cumprod(x, 2), tf.reverse(x, [1])]),
    "rolled": ([S], lambda x: tf.roll(x, 1, axis=1) * x),
    "sorted in rows": ([X], lambda x: [tf.sort(x, axis=1), tf.math.top_k(x, 2)[0]]),
    # Contractions.
    "dense": ([X], lambda x: x @ constant(4, 3) @ constant(3, 2)),
    "batched": ([S, (_ROWS, 4, 2)], lambda x, y: tf.matmul(x, y)),
    "batched with a matrix": (
        [S],
        lambda x: tf.matmul(x, constant(4, 2)) + tf.matmul(x, x, transpose_b=True)[..., :2],
    ),
    "covariances": ([X, X], lambda x, y: tf.matmul(x, y, transpose_a=True)),
    "tensordot": ([S], lambda x: tf.tensordot(x, constant(4, 3, 2), 1)),
    "attention": (
        [(_ROWS, 5, 2, 3), (_ROWS, 4, 2, 3)],
        lambda q, k: tf.einsum(
            "bhqk,bkhd->bqhd", tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", q, k)), k
        ),
    ),
    # Segments.
    "segments": ([X], lambda x: tf.math.unsorted_segment_sum(x, classes(x), 3)),
    "segment means": ([X], lambda x: tf.math.unsorted_segment_mean(x, classes(x), 3)),
    "largest of segments": ([X], lambda x: tf.math.unsorted_segment_max(x, classes(x), 3)),
    "scattered": ([X], lambda x: tf.scatter_nd(classes(x)[:, None], x, [3, 4])),
    "scattered onto": (
        [X],
        lambda x: tf.tensor_scatter_nd_add(constant(3, 4), classes(x)[:, None], x),
    ),
    "scattered in slices": (
        [X],
        lambda x: tf.tensor_scatter_nd_update(tf.transpose(x), [[1]], [x[:, 0]]) * 2.0,
    ),
    "counts": (
        [X],
        lambda x: (
            tf.cast(tf.math.bincount(classes(x), minlength=3, maxlength=3), tf.float32)
            * tf.reduce_sum(x)
        ),
    ),
    # Matrices.
    "matrices": (
        [(_ROWS, 3, 3)],
        lambda x: (
            tf.linalg.inv(x @ tf.transpose(x, [0, 2, 1]) + tf.eye(3)) + tf.linalg.diag(x[:, 0])
        ),
    ),
    "diagonals": ([(_ROWS, 3, 3)], lambda x: tf.linalg.diag_part(x)),
    "determinants": ([(_ROWS, 3, 3)], lambda x: tf.linalg.det(x)),
    "cholesky": (
        [(_ROWS, 3, 3)],
        lambda x: tf.linalg.cholesky(x @ tf.transpose(x, [0, 2, 1]) + 3 * tf.eye(3)),
    ),
    # Losses.
    "softmax": ([X, X], lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x)),
    "sparse": ([X], lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(classes(x), x)),
    "in the best": (
        [X],
        lambda x: tf.cast(tf.math.in_top_k(classes(x), x, 2), tf.float32) * x[:, 0],
    ),
    # Images.
    "convolved": ([IMAGE], lambda x: tf.nn.conv2d(x, constant(3, 3, 3, 2), 2, "SAME")),
    "convolved, dilated": (
        [IMAGE],
        lambda x: tf.nn.convolution(x, constant(2, 2, 3, 2), dilations=2),
    ),
    "convolved by channels": (
        [IMAGE],
        lambda x: tf.nn.depthwise_conv2d(x, constant(3, 3, 3, 2), [1, 1, 1, 1], "VALID"),
    ),
    "convolved backwards": (
        [IMAGE],
        lambda x: tf.nn.conv2d_transpose(x, constant(3, 3, 2, 3), [rows_of(x), 12, 12, 2], 2),
    ),
    "convolved in three": (
        [(_ROWS, 4, 4, 4, 2)],
        lambda x: tf.nn.conv3d(x, constant(2, 2, 2, 2, 3), [1] * 5, "SAME"),
    ),
    "pooled": (
        [IMAGE],
        lambda x: [tf.nn.max_pool2d(x, 2, 2, "SAME"), tf.nn.avg_pool2d(x, 3, 2, "SAME")],
    ),
    "pooled in three": (
        [(_ROWS, 4, 4, 4, 2)],
        lambda x: [tf.nn.max_pool3d(x, 2, 2, "SAME"), tf.nn.avg_pool3d(x, 2, 2, "SAME")],
    ),
    "resized": (
        [IMAGE],
        lambda x: [tf.image.resize(x, [4, 9], m) for m in ("bilinear", "nearest", "bicubic")],
    ),
    "patches": (
        [IMAGE],
        lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"),
    ),
    "depths": ([IMAGE], lambda x: tf.nn.depth_to_space(tf.nn.space_to_depth(x, 2) ** 2, 2)),
    "biased": ([IMAGE], lambda x: tf.nn.bias_add(x, constant(3)) ** 2),
    "spectra": ([(_ROWS, 8)], lambda x: tf.abs(tf.signal.rfft(x))),
    "normalized": (
        [IMAGE],
        lambda x: tf.compat.v1.nn.fused_batch_norm(
            x, constant(3), constant(3), constant(3), tf.ones([3]), is_training=False
        )[0],
    ),
}

# Programs with coupled rows: shapes and program as above, and the types of the operations that
# gather the rows.
COUPLED: dict[str, tuple[list[tuple[int, ...]], Program, set[str]]] = {
    "pairs": ([X, X], lambda x, y: tf.matmul(x, y, transpose_b=True) ** 2, {"MatMul"}),
    "pairs of views": (
        [X, X],
        lambda x, y: (lambda z: tf.matmul(z, z, transpose_b=True))(tf.concat([x, y], 0)),
        {"MatMul", "Mul", "Slice"},
    ),
    "differences of pairs": ([X], lambda x: x[:, None] - x[None], {"Sub"}),
    "sorted": ([X], lambda x: tf.sort(x, axis=0), {"TopKV2"}),
    "neighbors": ([X], lambda x: x[1:] - x[:-1], {"StridedSlice", "StridedSliceGrad"}),
    "rows in another order": ([X], lambda x: tf.reverse(x, [0]) * x, {"ReverseV2"}),
    "from the end": (
        [X],
        lambda x: [tf.concat([x, 2.0 * x], 0)[-_ROWS:], tf.concat([x, 2.0 * x], 0)[: 1 - _ROWS]],
        {"StridedSlice", "StridedSliceGrad"},
    ),
    "diagonal": (
        [X],
        lambda x: tf.linalg.diag_part(tf.matmul(x, x, transpose_b=True)),
        {"MatMul", "MatrixDiagPartV3", "MatrixSetDiagV3"},
    ),
    "beyond the last row": (
        [X],
        lambda x: tf.cumsum(x[: 2 * _ROWS], 0),
        {"Cumsum", "StridedSlice", "StridedSliceGrad"},
    ),
    "of unknown rank": ([X], lambda x: _rows_of_unknown_rank(x), {"Reshape", "TensorListSetItem"}),
    "running sums": ([X], lambda x: tf.cumsum(x, 0), {"Cumsum"}),
    "masked rows": ([X], lambda x: tf.boolean_mask(x, x[:, 0] > 0), {"GatherV2", "Where"}),
    "split over rows": ([X], lambda x: tf.reshape(tf.transpose(x), [rows_of(x), 4]), {"Reshape"}),
    "rows of others": ([X], lambda x: tf.gather(x, classes(x)), {"GatherV2", "ResourceGather"}),
    "fixed number": ([X], lambda x: x * constant(_ROWS, 1), {"Mul"}),
}


def differentiated(program: Program) -> Program:
    """Returns a program that also computes the gradients of the results' mean squares."""

    def run(*x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = tf.nest.flatten(program(*x))
            floating = [r for r in results if r.dtype.is_floating]
            total = sum([tf.reduce_mean(tf.square(r + 0.1)) for r in floating], tf.zeros([]))
        found = tape.gradient(total, x)
        results += [tf.convert_to_tensor(g) for g in found if g is not None]
        return [tf.convert_to_tensor(r) for r in results]

    return run


def inputs_of(shapes: Any) -> list[np.ndarray]:
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


_SETTINGS = [(shares, static) for shares in SHARES for static in (False, True)]
_ALL = [(name, *setting) for name in [*ROWWISE, *COUPLED] for setting in _SETTINGS]
_DEFAULT = [_ALL[i] for i in range(0, len(_ALL), 43)]


@pytest.mark.parametrize(("name", "shares", "static"), some(_ALL, always=_DEFAULT))
def test_operations_act_on_rows_as_on_the_whole_batch(name, shares, static):
    shapes, program, *coupling = ROWWISE.get(name) or COUPLED[name]
    tolerance = 1e-4 if name in ("matrices", "special", "cholesky") else 1e-5
    _, analysis = check(
        differentiated(program), inputs_of(shapes), list(shares), static=static, tolerance=tolerance
    )
    assert_gathers(name, analysis, coupling)


@pytest.mark.parametrize("static", some([False, True], always=[]))
def test_only_coupled_rows_are_gathered(static):
    for name, (shapes, program, *coupling) in {**ROWWISE, **COUPLED}.items():
        inputs = inputs_of(shapes)
        concrete = trace(differentiated(program), inputs, static=static)
        assert_gathers(name, analyze(concrete, inputs, static=static), coupling)


def assert_gathers(name, analysis, coupling):
    found = set(gathers(analysis))
    (allowed,) = coupling or [set()]
    assert found <= allowed, name
    if name != "fixed number":
        assert bool(found) == bool(allowed), name
