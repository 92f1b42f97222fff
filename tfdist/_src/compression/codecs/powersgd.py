"""PowerSGD, a codec that sends two thin matrices instead of a gradient."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.comm.tracing import GraphSpan
from tfdist._src.compression.codecs.codec import HierarchicalCodec
from tfdist._src.compression.transport import Gradient, Shape, count


@dataclasses.dataclass(frozen=True)
class PowerSGD(HierarchicalCodec):
    """Approximates a gradient by a matrix of low rank, by one step of subspace iteration.

    Each host treats its gradient as an `m * n` matrix `M`. The last axis of the gradient is the
    axis of the columns. With an `n * rank` matrix `Q`, which the hosts keep from step to step, they
    compute `P = orthogonal(sum of M Q)` and then `Q = sum of M^T P`. The sums are over all hosts.
    The result is `P Q^T`, an approximation of the sum of all `M`. Each host adds its approximation
    error to its gradient in the next step.

    A value takes `32 * rank * (1 / m + 1 / n)` bits. Gradients that would not become smaller are
    summed exactly.

    All workers need the same kind of processor, because the last bits of a matrix product depend on
    the processor.

    Args:
        rank: the rank of the approximation, which is the number of columns of `P` and `Q`. At least
            1.

    Source: Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed
    optimization", 2019.
    """

    _payload = "summed"
    _on_host = False

    rank: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`rank` must be >= 1.", self.rank, holds=self.rank >= 1)

    def bits_per_value(self, shape: Shape) -> float:
        rows, columns = matrix(shape)
        return 32 * self.rank * (rows + columns) / max(1, rows * columns)

    def compresses(self, shape: Shape) -> bool:
        rows, columns = matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),), "query": (matrix(shape)[1], self.rank)}

    def first(self, name: str, shape: Shape) -> tf.Tensor:
        if name == "query":
            return tf.random.stateless_normal(shape, [0, 0], alg="philox")
        return super().first(name, shape)

    def _sum_of_hosts(
        self, leaders: CoreCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        span = GraphSpan([g.value for g in gradients])
        matrices = [_with_error(g) for g in gradients]
        queries = [g.kept["query"].read_value() for g in gradients]
        lefts = list(map(tf.matmul, matrices, queries))
        span.end("compression", "encode by powersgd, left", lefts)
        lefts = leaders.all_reduce(lefts)
        span = GraphSpan(lefts)
        lefts = [tf.linalg.qr(_scaled(left))[0] for left in lefts]
        rights = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, lefts, strict=True)]
        span.end("compression", "encode by powersgd, right", rights)
        rights = leaders.all_reduce(rights)
        span = GraphSpan(rights)
        _, hosts = leaders.place()
        totals = [
            _approximate(g, left, right, hosts)
            for g, left, right in zip(gradients, lefts, rights, strict=True)
        ]
        span.end("compression", "decode by powersgd", totals)
        return totals


def matrix(shape: Shape) -> tuple[int, int]:
    """Returns the numbers of rows and columns if a gradient is treated as a matrix."""
    return math.prod(shape[:-1]), math.prod(shape[-1:])


def _with_error(gradient: Gradient) -> tf.Tensor:
    error = gradient.kept["error"]
    error.assign_add(tf.reshape(gradient.value, [-1]))
    return tf.reshape(error.read_value(), matrix(gradient.shape))


def _scaled(factor: tf.Tensor) -> tf.Tensor:
    # Only the directions of the columns matter. The values are scaled so that their squares cannot
    # overflow float32.
    return tf.math.divide_no_nan(factor, tf.reduce_max(tf.abs(factor)))


def _approximate(gradient: Gradient, left: tf.Tensor, right: tf.Tensor, hosts: Any) -> tf.Tensor:
    error, query = gradient.kept["error"], gradient.kept["query"]
    total = tf.matmul(left, right, transpose_b=True)

    def keep() -> None:
        # Computes `error -= total / hosts` in place.
        tf.raw_ops.ResourceApplyGradientDescent(
            var=error.handle,
            alpha=tf.cast(1 / tf.cast(hosts, tf.float64), tf.float32),
            delta=tf.reshape(total, [-1]),
        )
        query.assign(tf.where(tf.reduce_any(right != 0), _scaled(right), query))

    def forget() -> None:
        without = error.read_value() - tf.reshape(gradient.value, [-1])
        error.assign(tf.where(tf.math.is_finite(without), without, tf.zeros_like(without)))

    # All hosts take the same branch, because `right` is a sum over the hosts.
    tf.cond(tf.reduce_all(tf.math.is_finite(right)), keep, forget)
    return tf.reshape(total, gradient.shape)
