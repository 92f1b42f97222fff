"""Every function of `keras.ops` and `keras.ops.image` computes on workers as on the whole batch.

A program applies a function to the rows of a batch, along each axis if it takes one, and returns
the result and the gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.enumeration.training import fractions, integers, numbers
from tests.global_view.simulation import check

ROWS = 11
SHARES = [(4, 4, 3), (11, 0), (0, 5, 0, 6)]

Program = tuple[Callable[..., Any], tuple[np.ndarray, ...]]


X, Y = numbers(ROWS, 4), numbers(ROWS, 4, seed=1)
P, Q = fractions(ROWS, 4), fractions(ROWS, 4, seed=1)
K, J = integers(6, ROWS, 4, low=1), integers(6, ROWS, 4, low=1, seed=1)
B, C = X > 0, Y > 0
S, IMAGE = numbers(ROWS, 8, 3), numbers(ROWS, 6, 6, 4)
_HALF = numbers(ROWS, 3, 3)
M = np.einsum("nij,nkj->nik", _HALF, _HALF) + 2 * np.eye(3, dtype="float32")
V = numbers(ROWS)
HOLES = np.where(fractions(ROWS, 4, seed=2) < 0.3, np.float32("nan"), X).astype("float32")


def _named(names: str, *operands: np.ndarray) -> dict[str, Program]:
    """Programs that apply functions to whole operands."""
    return {name: (getattr(ops, name), operands) for name in names.split()}


def _along(names: str, axes: Sequence[Any], *operands: np.ndarray, **options: Any) -> Any:
    """Programs that apply functions along each axis."""
    return {
        f"{name}/{axis}": (
            functools.partial(_on_axis, getattr(ops, name), axis, options),
            operands,
        )
        for name in names.split()
        for axis in axes
    }


def _on_axis(function: Callable[..., Any], axis: Any, options: Any, *operands: Any) -> Any:
    return function(*operands, axis=axis, **options)


def _each(name: str, *operands: np.ndarray, **programs: Callable[..., Any]) -> Any:
    """Programs that use a function in several ways, by the names of the ways."""
    return {f"{name}/{use}": (program, operands) for use, program in programs.items()}


AXES = (None, 0, 1)

PROGRAMS: dict[str, Program] = {
    **_named("abs absolute angle arcsin arccos arctan arcsinh arctanh cbrt ceil celu conj", P),
    **_named("conjugate copy cos cosh deg2rad elu erf erfc erfinv exp exp2 expm1 fabs", P),
    **_named("floor gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh i0 imag", P),
    **_named("isreal leaky_relu log log10 log1p", P),
    **_named("isfinite isinf isnan isneginf isposinf nan_to_num", HOLES),
    **_named("log2 log_sigmoid negative rad2deg real relu relu6 round", X),
    **_named("rsqrt sigmoid sign signbit silu sin sinc sinh soft_shrink softplus softsign", P),
    **_named("sparse_plus sparse_sigmoid sqrt square squareplus swish tan tanh tanh_shrink", P),
    **_named("reciprocal", P),
    **_named("trunc selu stop_gradient ones_like zeros_like empty_like ravel", X),
    **_named("convert_to_tensor", X),
    "arccosh": (lambda x: ops.arccosh(1 + x), (P,)),
    **_named(
        "add subtract multiply divide true_divide divide_no_nan arctan2 maximum minimum", X, Y
    ),
    **_named("power hypot logaddexp logaddexp2 fmax fmin heaviside nextafter", P, Q),
    **_named("ldexp", X, K),
    **_named("equal not_equal greater greater_equal less less_equal isclose allclose", X, Y),
    **_named("mod fmod floor_divide", X, P),
    **_named("bitwise_and bitwise_or bitwise_xor gcd lcm left_shift right_shift", K, J),
    **_named("bitwise_left_shift bitwise_right_shift", K, J),
    **_named("bitwise_invert bitwise_not", K),
    **_named("logical_and logical_or logical_xor", B, C),
    **_named("logical_not", B),
    **_named("cdist", S, S[:, ::-1]),
    **_named("polar", P, Q),
    **_along("all any count_nonzero", AXES, B),
    **_along("amax amin argmax argmin average max min mean median prod ptp std sum var", AXES, X),
    **_along("logsumexp norm flip argsort sort cumsum cumprod nancumsum nancumprod", AXES[1:], X),
    **_along("logsumexp norm flip cumsum cumprod", [None], X),
    **_along("nanargmax nanargmin nanmax nanmean nanmin nanprod nanstd", AXES, HOLES),
    **_along("nansum nanvar", AXES, HOLES),
    **_along("nanmedian", [None], HOLES),
    **_along("nanpercentile nanquantile", [None], HOLES, q=0.3),
    **_along("normalize softmax log_softmax sparsemax diff trapezoid", [0, 1], X),
    **_along("glu", [1], X),
    **_along("expand_dims", [0, 1, 2], X),
    **_each(
        "concatenate",
        X,
        Y,
        rows=lambda *x: ops.concatenate(x, 0),
        last=lambda *x: ops.concatenate(x, 1),
    ),
}


def _of_list(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: function(list(operands))


PROGRAMS |= {
    **_each(
        "adaptive_average_pool",
        IMAGE,
        images=lambda x: ops.adaptive_average_pool(x, 2, "channels_last"),
    ),
    **_each(
        "adaptive_max_pool", IMAGE, images=lambda x: ops.adaptive_max_pool(x, 2, "channels_last")
    ),
    **_each(
        "append",
        X,
        Y,
        rows=lambda x, y: ops.append(x, y, 0),
        features=lambda x, y: ops.append(x, y, 1),
        flat=lambda x, y: ops.append(x, y),
    ),
    **_each(
        "arange", X, rows=lambda x: x * ops.cast(ops.arange(ops.shape(x)[0]), "float32")[:, None]
    ),
    **_each("argpartition", X, features=lambda x: ops.sort(ops.argpartition(x, 2)[:, :2])),
    **_each("array", X, itself=lambda x: ops.array(x)),
    **_each("array_split", X, features=lambda x: ops.array_split(x, 3, axis=1)),
    **_each("average", X, P, weights=lambda x, w: ops.average(x, weights=w)),
    **_each(
        "average_pool", S, steps=lambda x: ops.average_pool(x, 2, 2, data_format="channels_last")
    ),
    **_each("max_pool", S, steps=lambda x: ops.max_pool(x, 2, 2, data_format="channels_last")),
    **_each(
        "batch_normalization",
        X,
        batch=lambda x: ops.batch_normalization(x, *ops.moments(x, [0]), axis=-1),
    ),
    **_each("binary_crossentropy", P, Q, rows=lambda x, y: ops.binary_crossentropy(x, y)),
    **_each("categorical_crossentropy", P, Q, rows=lambda x, y: ops.categorical_crossentropy(x, y)),
    **_each(
        "sparse_categorical_crossentropy",
        K[:, 0] % 4,
        Q,
        rows=lambda x, y: ops.sparse_categorical_crossentropy(x, y),
    ),
    **_each(
        "bincount",
        K,
        rows=lambda x: ops.bincount(x, minlength=7),
        batch=lambda x: ops.bincount(ops.reshape(x, (-1,)), minlength=7),
    ),
    **_each(
        "broadcast_to",
        V,
        columns=lambda x: ops.broadcast_to(x[:, None], (ops.shape(x)[0], 3)),
        outside=lambda x: ops.broadcast_to(x, (2, ops.shape(x)[0])),
    ),
    **_each("cast", X, half=lambda x: ops.cast(ops.cast(x * 3, "int32"), "float32") * x),
    **_each("saturate_cast", X, bytes=lambda x: ops.saturate_cast(x * 300, "uint8")),
    **_each("cholesky", M, lower=ops.cholesky, upper=lambda x: ops.cholesky(x, True)),
    **_each("cholesky_inverse", M, each=lambda x: ops.cholesky_inverse(ops.cholesky(x))),
    **_each("clip", X, both=lambda x: ops.clip(x, -0.5, 0.4)),
    **_each(
        "cond", X, Y, batch=lambda x, y: ops.cond(ops.sum(x) > 0, lambda: x + y, lambda: x - y)
    ),
    **_each(
        "conv",
        S,
        steps=lambda x: ops.conv(x, numbers(2, 3, 2), data_format="channels_last"),
        strided=lambda x: ops.conv(x, numbers(2, 3, 2), 2, "same", "channels_last"),
    ),
    **_each(
        "conv_transpose",
        S,
        steps=lambda x: ops.conv_transpose(x, numbers(2, 2, 3), 2, data_format="channels_last"),
    ),
    **_each(
        "depthwise_conv",
        S,
        steps=lambda x: ops.depthwise_conv(x, numbers(2, 3, 2), data_format="channels_last"),
    ),
    **_each(
        "separable_conv",
        S,
        steps=lambda x: ops.separable_conv(
            x, numbers(2, 3, 2), numbers(1, 6, 2), data_format="channels_last"
        ),
    ),
    **_each("correlate", V, X[:, 0], same=lambda x, y: ops.correlate(x, y, "same")),
    **_each("cross", S[:, 0], S[:, 1], rows=ops.cross),
    **_each(
        "ctc_loss",
        K % 3 + 1,
        numbers(ROWS, 9, 5),
        rows=lambda t, p: ops.ctc_loss(
            t, p, ops.zeros_like(t[:, 0]) + 3, ops.zeros_like(t[:, 0]) + 9
        ),
    ),
    **_each(
        "ctc_decode",
        numbers(ROWS, 9, 5),
        greedy=lambda x: ops.ctc_decode(x, ops.zeros_like(ops.cast(x[:, 0, 0], "int32")) + 9)[1],
    ),
    **_each("custom_gradient", X, halves=lambda x: _halving(x)),
    **_each("depth_to_space", IMAGE, each=lambda x: ops.depth_to_space(x, 2)),
    **_each("space_to_depth", IMAGE, each=lambda x: ops.space_to_depth(x, 2)),
    **_named("det inv logdet slogdet", M),
    **_each("matrix_rank", M, each=lambda x: ops.matrix_rank(x)),
    **_each("pinv", M, each=lambda x: ops.pinv(x)),
    **_each("qr", M, each=lambda x: ops.abs(ops.qr(x)[1])),
    **_each("svd", M, values=lambda x: ops.svd(x, compute_uv=False)),
    **_each("eigh", M, values=lambda x: ops.eigh(x)[0]),
    **_each("eig", M, values=lambda x: ops.sort(ops.real(ops.eig(x)[0]))),
    **_each("solve", M, _HALF, each=ops.solve),
    **_each("solve_triangular", M, _HALF, each=lambda a, b: ops.solve_triangular(a, b, True)),
    **_each("lstsq", X, Y, batch=lambda a, b: ops.lstsq(a, b)),
    **_each("diag", V, rows=lambda x: ops.diag(x) + ops.diag(x[:, None] * x[None, :])),
    **_each("diagflat", V, rows=ops.diagflat),
    **_each("diagonal", M, each=lambda x: ops.diagonal(x, axis1=1, axis2=2)),
    **_each("trace", M, each=lambda x: ops.trace(x, axis1=1, axis2=2)),
    **_each("digitize", X, each=lambda x: ops.digitize(x, np.array([-0.5, 0.1, 0.6], "float32"))),
    **_each(
        "dot",
        X,
        features=lambda x: ops.dot(x, numbers(4, 3)),
        rows=lambda x: ops.dot(ops.transpose(x), x),
    ),
    **_each("inner", X, Y, rows=ops.inner),
    **_each("outer", V, X[:, 1], rows=ops.outer),
    **_each("vdot", X, Y, all=ops.vdot),
    **_each(
        "matmul",
        X,
        Y,
        rows=lambda x, y: ops.matmul(x, ops.transpose(y)),
        features=lambda x, y: ops.matmul(ops.transpose(x), y),
    ),
    **_each(
        "einsum",
        X,
        Y,
        pairs=lambda x, y: ops.einsum("ni,mi->nm", x, y),
        features=lambda x, y: ops.einsum("ni,nj->ij", x, y),
        each=lambda x, y: ops.einsum("ni,nj->nij", x, y),
        transposed=lambda x, y: ops.einsum("ni,nj->jn", x, y),
    ),
    **_each(
        "tensordot",
        X,
        Y,
        rows=lambda x, y: ops.tensordot(x, y, [[0], [0]]),
        features=lambda x, y: ops.tensordot(x, y, [[1], [1]]),
    ),
    **_each(
        "dot_product_attention",
        numbers(ROWS, 4, 2, 3),
        each=lambda x: ops.dot_product_attention(x, x, x, is_causal=True),
    ),
    **_each("extract_sequences", S[..., 0], each=lambda x: ops.extract_sequences(x, 4, 2)),
    **_each("unfold", IMAGE, each=lambda x: ops.unfold(x, 2)),
    **_each("fft", S, each=lambda x: ops.fft((x, x * 2))),
    **_each("fft2", S, each=lambda x: ops.fft2((x, x * 2))),
    **_each("ifft2", S, each=lambda x: ops.ifft2((x, x * 2))),
    **_each("rfft", S[..., 0], each=lambda x: ops.rfft(x)),
    **_each("irfft", S[..., 0], each=lambda x: ops.irfft(ops.rfft(x))),
    **_each("stft", S[..., 0], each=lambda x: ops.stft(x, 4, 2, 4)),
    **_each("istft", S[..., 0], each=lambda x: ops.istft(ops.stft(x, 4, 2, 4), 4, 2, 4)),
    **_named("fliplr flipud", X),
    **_each("vander", V, rows=lambda x: ops.vander(x, 3)),
    **_each("fori_loop", X, sums=lambda x: ops.fori_loop(0, 3, lambda i, v: v + ops.mean(v, 0), x)),
    **_each("full", X, rows=lambda x: ops.full((ops.shape(x)[0], 4), 2.0) * x),
    **_each("full_like", X, rows=lambda x: ops.full_like(x, 2.0) * x),
    **_each("zeros", X, rows=lambda x: ops.zeros((ops.shape(x)[0], 4)) + x),
    **_each("ones", X, rows=lambda x: ops.ones((ops.shape(x)[0], 4)) + x),
    **_each("empty", X, rows=lambda x: ops.shape(ops.empty((ops.shape(x)[0], 4)))[0] + 0 * K[0]),
    **_each("eye", X, pairs=lambda x: ops.eye(ops.shape(x)[0]) @ x),
    **_each("identity", X, pairs=lambda x: ops.identity(ops.shape(x)[0]) @ x),
    **_each("tri", X, pairs=lambda x: ops.tri(ops.shape(x)[0]) @ x),
    **_each(
        "tril",
        X,
        pairs=lambda x: ops.tril(x @ ops.transpose(x)),
        each=lambda x: ops.tril(x[:, None] * x[:, :, None]),
    ),
    **_each(
        "triu",
        X,
        pairs=lambda x: ops.triu(x @ ops.transpose(x)),
        each=lambda x: ops.triu(x[:, None] * x[:, :, None]),
    ),
    **_each("blackman", X, window=lambda x: x * ops.blackman(4)),
    **_each("hamming", X, window=lambda x: x * ops.hamming(4)),
    **_each("hanning", X, window=lambda x: x * ops.hanning(4)),
    **_each("kaiser", X, window=lambda x: x * ops.kaiser(4, 2.0)),
    **_each("geomspace", X, each=lambda x: x * ops.geomspace(1.0, 8.0, 4)),
    **_each("linspace", V, each=lambda x: ops.linspace(x, x * 2, 3)),
    **_each("logspace", P[:, 0], each=lambda x: ops.logspace(x, x * 2, 3)),
    **_each(
        "get_item",
        X,
        column=lambda x: ops.get_item(x, (slice(None), 1)),
        row=lambda x: ops.get_item(x, 2),
        backward=lambda x: ops.get_item(x, slice(None, None, -2)),
    ),
    **_each("histogram", X, batch=lambda x: ops.histogram(x[:, 0], 4, (-2.0, 2.0))),
    **_each("hsplit", X, features=lambda x: ops.hsplit(x, 2)),
    **_each("dsplit", IMAGE, features=lambda x: ops.dsplit(x, 2)),
    **_each("vsplit", S, rows=lambda x: ops.vsplit(ops.transpose(x, (1, 0, 2)), 2)),
    **_each("split", X, features=lambda x: ops.split(x, 2, axis=1)),
    **_each("hstack", X, Y, rows=_of_list(ops.hstack)),
    **_each("vstack", X, Y, rows=_of_list(ops.vstack)),
    **_each("dstack", X, Y, rows=_of_list(ops.dstack)),
    **_each("stack", X, Y, rows=_of_list(ops.stack), last=lambda x, y: ops.stack([x, y], -1)),
    **_each("in_top_k", K[:, 0] % 4, X, rows=lambda t, p: ops.in_top_k(t, p, 2)),
    **_each("jvp", X, each=lambda x: ops.jvp(ops.tanh, (x,), (x * 2,))),
    **_each("layer_normalization", X, each=lambda x: ops.layer_normalization(x, axis=-1)),
    **_each("rms_normalization", X, each=lambda x: ops.rms_normalization(x, axis=-1)),
    **_each("map", X, rows=lambda x: ops.map(lambda row: ops.cumsum(row) * 2, x)),
    **_each("vectorized_map", X, rows=lambda x: ops.vectorized_map(lambda r: ops.cumsum(r) * 2, x)),
    **_each("meshgrid", V, rows=lambda x: ops.meshgrid(x, np.arange(3, dtype="float32"))),
    **_each("moments", X, rows=lambda x: ops.moments(x, [0]), all=lambda x: ops.moments(x, [0, 1])),
    **_each("moveaxis", S, behind=lambda x: ops.moveaxis(x, 0, 2)),
    **_each("swapaxes", S, behind=lambda x: ops.swapaxes(x, 0, 1)),
    **_each("transpose", S, behind=lambda x: ops.transpose(x)),
    **_each("rot90", S, each=lambda x: ops.rot90(x, axes=(1, 2)), rows=lambda x: ops.rot90(x)),
    **_each("rearrange", S, each=lambda x: ops.rearrange(x, "n t c -> n (t c)")),
    **_each("multi_hot", K, each=lambda x: ops.multi_hot(x, 7)),
    **_each(
        "one_hot", K, each=lambda x: ops.one_hot(x, 7), first=lambda x: ops.one_hot(x, 7, axis=0)
    ),
    **_each("nonzero", K % 2, where=lambda x: ops.nonzero(x)),
    **_each(
        "pad",
        X,
        rows=lambda x: ops.pad(x, [[1, 2], [0, 0]]),
        each=lambda x: ops.pad(x, [[0, 0], [1, 2]], "reflect"),
    ),
    **_along("percentile quantile", AXES, P, q=0.3),
    **_each("psnr", P, Q, batch=lambda x, y: ops.psnr(x, y, 1.0)),
    **_each(
        "repeat",
        X,
        rows=lambda x: ops.repeat(x, 2, axis=0),
        features=lambda x: ops.repeat(x, 2, axis=1),
        flat=lambda x: ops.repeat(x, 2),
    ),
    **_each(
        "reshape", S, flat=lambda x: ops.reshape(x, (-1, 4)), all=lambda x: ops.reshape(x, (-1,))
    ),
    **_each(
        "roll",
        X,
        rows=lambda x: ops.roll(x, 2, axis=0),
        features=lambda x: ops.roll(x, 1, axis=1),
        flat=lambda x: ops.roll(x, 3),
    ),
    **_each(
        "scan",
        X,
        rows=lambda x: ops.scan(lambda c, row: (c + row, c * 0.5), ops.zeros(4), x),
        steps=lambda x: ops.scan(
            lambda c, v: (c + v, c * 0.5), ops.zeros_like(x[:, 0]), ops.transpose(x)
        ),
    ),
    **_each("scatter", K[:, :1], X, batch=lambda i, x: ops.scatter(i, x, (7, 4))),
    **_each(
        "scatter_update", X, columns=lambda x: ops.scatter_update(x, [[0, 1], [3, 2]], ops.ones(2))
    ),
    **_each(
        "searchsorted",
        X,
        each=lambda x: ops.searchsorted(np.array([-0.5, 0.1], "float32"), x[:, 0]),
    ),
    **_each("segment_sum", X, K, batch=lambda x, i: ops.segment_sum(x, i[:, 0], 7)),
    **_each("segment_prod", X, K, batch=lambda x, i: ops.segment_prod(x, i[:, 0], 7)),
    **_each("segment_max", X, K, batch=lambda x, i: _small(ops.segment_max(x, i[:, 0], 7))),
    **_each("segment_min", X, K, batch=lambda x, i: _small(ops.segment_min(x, i[:, 0], 7))),
    **_each("select", X, Y, each=lambda x, y: ops.select([x > 0, y > 0], [x, y * 2], 3.0)),
    **_each(
        "slice",
        X,
        columns=lambda x: ops.slice(x, (0, 1), (ops.shape(x)[0], 2)),
        rows=lambda x: ops.slice(x, (1, 1), (3, 2)),
    ),
    **_each(
        "slice_update",
        X,
        rows=lambda x: ops.slice_update(ops.stop_gradient(x), (1, 1), ops.ones((3, 2))),
    ),
    **_each("squeeze", V[:, None], last=lambda x: ops.squeeze(x, 1)),
    **_each(
        "switch",
        X,
        batch=lambda x: ops.switch(ops.cast(ops.sum(x) > 0, "int32"), [ops.sin, ops.cos], x),
    ),
    **_each(
        "take",
        X,
        K,
        columns=lambda x, i: ops.take(x, [1, 3], axis=1),
        rows=lambda x, i: ops.take(x, [1, 3, 9], axis=0),
        batch=lambda x, i: ops.take(x, i[:, 0], axis=0),
        flat=lambda x, i: ops.take(x, [1, 30]),
    ),
    **_each(
        "take_along_axis",
        X,
        K % 4,
        columns=lambda x, i: ops.take_along_axis(x, i, 1),
        rows=lambda x, i: ops.take_along_axis(x, i, 0),
    ),
    **_each("threshold", X, each=lambda x: ops.threshold(x, 0.2, -1.0)),
    **_each("tile", X, rows=lambda x: ops.tile(x, (2, 1)), features=lambda x: ops.tile(x, (1, 2))),
    **_each("top_k", X, each=lambda x: ops.top_k(x, 2), batch=lambda x: ops.top_k(x[:, 0], 3)),
    **_each("unique", K, batch=lambda x: ops.unique(ops.reshape(x, (-1,)))),
    **_each("unravel_index", K, each=lambda x: ops.unravel_index(x, (3, 4))),
    **_each("unstack", X, features=lambda x: ops.unstack(x, 4, axis=1)),
    **_each("view", X, bits=lambda x: ops.view(x, "int32")),
    **_each("view_as_complex", S[..., :2], each=lambda x: ops.abs(ops.view_as_complex(x))),
    **_each("view_as_real", P, Q, each=lambda x, y: ops.view_as_real(ops.polar(x, y))),
    **_each(
        "where",
        X,
        Y,
        each=lambda x, y: ops.where(x > y, x, y * 2),
        batch=lambda x, y: ops.where(ops.sum(x) > 0, x, y),
    ),
    **_each(
        "while_loop",
        X,
        batch=lambda x: ops.while_loop(
            lambda v: ops.mean(ops.abs(v)) > 0.2, lambda v: (v * 0.7,), (x,)
        ),
    ),
    **_each("shape", X, rows=lambda x: x / ops.cast(ops.shape(x)[0], "float32")),
    **_each("size", X, all=lambda x: x / ops.cast(ops.size(x), "float32")),
}


def _small(x):
    """Replaces the extreme values of empty segments by zeros."""
    return ops.where(ops.abs(x) < 1e6, x, 0.0)


@ops.custom_gradient
def _halving(x):
    def grad(*args, upstream=None):
        return (args[0] if upstream is None else upstream) * 0.5

    return ops.sin(x), grad


# `keras.ops.image`, where each row is an image.

RGB = fractions(ROWS, 6, 7, 3)
TRANSFORMS = np.eye(3, dtype="float32").ravel()[:8] + 0.03 * numbers(ROWS, 8, seed=2)
COORDINATES = 4 * fractions(2, 5)
CORNERS = np.array([[0, 0], [6, 0], [0, 5], [6, 5]], "float32") + 0.2 * numbers(ROWS, 4, 2)

PROGRAMS |= {
    "image.affine_transform": (lambda x, t: ops.image.affine_transform(x, t), (RGB, TRANSFORMS)),
    "image.affine_transform/nearest": (
        lambda x, t: ops.image.affine_transform(x, t, "nearest", "reflect"),
        (RGB, TRANSFORMS),
    ),
    "image.crop_images": (lambda x: ops.image.crop_images(x, 1, 2, 1, 1), (RGB,)),
    "image.elastic_transform": (lambda x: ops.image.elastic_transform(x, 3.0, 1.0, seed=1), (RGB,)),
    "image.extract_patches": (lambda x: ops.image.extract_patches(x, 3, 2), (RGB,)),
    "image.extract_patches_3d": (
        lambda x: ops.image.extract_patches_3d(x[:, None], (1, 2, 2)),
        (RGB,),
    ),
    "image.gaussian_blur": (lambda x: ops.image.gaussian_blur(x), (RGB,)),
    "image.hsv_to_rgb": (lambda x: ops.image.hsv_to_rgb(x), (RGB,)),
    "image.map_coordinates/rows": (
        lambda x: ops.vectorized_map(
            lambda image: ops.image.map_coordinates(image[..., 0], COORDINATES, 1), x
        ),
        (RGB,),
    ),
    "image.map_coordinates/whole": (
        lambda x: ops.image.map_coordinates(x[..., 0, 0], COORDINATES, 1),
        (RGB,),
    ),
    "image.pad_images": (lambda x: ops.image.pad_images(x, 1, 2, 1, 0), (RGB,)),
    "image.perspective_transform": (
        lambda x, start, end: ops.image.perspective_transform(x, start, end),
        (RGB, CORNERS, 0.8 * CORNERS + 0.1 * numbers(ROWS, 4, 2, seed=4)),
    ),
    **{
        f"image.resize/{how}": (
            lambda x, how=how: ops.image.resize(x, (4, 9), how, antialias=how == "bicubic"),
            (RGB,),
        )
        for how in ("bilinear", "nearest", "bicubic", "lanczos3")
    },
    "image.resize/cropped": (
        lambda x: ops.image.resize(x, (4, 4), crop_to_aspect_ratio=True),
        (RGB,),
    ),
    "image.resize/padded": (
        lambda x: ops.image.resize(x, (4, 4), pad_to_aspect_ratio=True),
        (RGB,),
    ),
    "image.rgb_to_grayscale": (lambda x: ops.image.rgb_to_grayscale(x), (RGB,)),
    "image.rgb_to_hsv": (lambda x: ops.image.rgb_to_hsv(x), (RGB,)),
    "image.scale_and_translate": (
        lambda x: ops.image.scale_and_translate(
            x,
            (ops.shape(x)[0], 8, 9, 3),
            ops.convert_to_tensor([1.3, 1.2]),
            ops.convert_to_tensor([0.4, -0.2]),
            (1, 2),
            "linear",
        ),
        (RGB,),
    ),
    "image.sobel_edges": (lambda x: ops.image.sobel_edges(x), (RGB,)),
    "image.ssim": (lambda x, y: ops.image.ssim(x, y, filter_size=3), (RGB, RGB[::-1].copy())),
}

# These functions need the number of rows during tracing, when `fit` knows it for arrays.
OF_A_KNOWN_SIZE = (
    *("gcd", "lcm", "lstsq/batch", "tri/pairs", "unfold/each", "unravel_index/each"),
    "image.map_coordinates/whole",
)
WITHOUT_A_PROGRAM = {
    # These return facts that Keras knows during tracing, and compute nothing.
    *("convert_to_numpy", "dtype", "is_tensor", "ndim"),
    # Keras also fails in one process, as for the other axes of `nanmedian` and similar functions.
    *("associative_scan", "bartlett", "corrcoef", "fold", "isin", "kron", "lu_factor", "vectorize"),
}


def _step(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a program that computes the same results, and the gradients of a sum of them."""

    def step(*operands: Any) -> list[Any]:
        differentiable = [x for x in operands if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(differentiable)
            results = [tf.convert_to_tensor(r) for r in tf.nest.flatten(program(*operands))]
            total = tf.zeros([])
            for r in results:
                if r.dtype.is_floating:
                    total += tf.reduce_sum(tf.sin(r) * tf.sin(r))
                elif r.dtype.is_complex:
                    total += tf.reduce_sum(tf.abs(r))
        gradients = tape.gradient(total, differentiable, unconnected_gradients="zero")
        return [*results, *map(tf.convert_to_tensor, gradients)]

    return step


@pytest.mark.exhaustive
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_of_rows(name, shares):
    program, operands = PROGRAMS[name]
    check(_step(program), operands, shares, static=name in OF_A_KNOWN_SIZE)


def test_every_function_has_a_program():
    functions = {
        f"{prefix}{name}"
        for prefix, module in (("", ops), ("image.", ops.image))
        for name, value in vars(module).items()
        if inspect.isfunction(value)
    }
    assert functions - {name.partition("/")[0] for name in PROGRAMS} == WITHOUT_A_PROGRAM
