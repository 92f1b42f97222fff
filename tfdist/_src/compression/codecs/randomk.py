"""Values chosen at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.comm.spans import GraphSpan
from tfdist._src.compression.codecs.hierarchical import HierarchicalCodec
from tfdist._src.compression.gradient import Gradient, Shape, count


@dataclasses.dataclass(frozen=True)
class RandomK(HierarchicalCodec):
    """Values at random positions, the same on all workers, so that no indices need to be sent.

    Sends one value, 32 bits, of each of `ratio * n` equal parts of a gradient. The other values are
    added to the next step's gradient; without error feedback, a value is multiplied by the size of
    its part, so that the sum is unbiased.

    Args:
        ratio: the fraction of the values that is sent, in (0, 1].
        error_feedback: whether to add the values that are not sent to the next step's gradient.

    Source: Stich et al., "Sparsified SGD with memory", 2018 (with arbitrary values instead of one
    per part; all are equally likely to be sent).
    """

    payload = "summed"
    on_host = False

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)

    def bits_per_value(self, shape: Shape) -> float:
        return 32 * self._chosen(count(shape)) / max(1, count(shape))

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def sum_of_hosts(
        self, leaders: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        span = GraphSpan([g.value for g in gradients])
        places = [self.places(count(g.shape), step, g.number) for g in gradients]
        sent = [self._take(g, *p) for g, p in zip(gradients, places, strict=True)]
        span.end("compression", "encode by randomk", sent)
        sums = leaders.all_reduce(sent)
        span = GraphSpan(sums)
        totals = [
            tf.reshape(tf.scatter_nd(p[:, None], s, [count(g.shape)]), g.shape)
            for g, s, (p, _) in zip(gradients, sums, places, strict=True)
        ]
        span.end("compression", "decode by randomk", totals)
        return totals

    def places(self, values: int, step: tf.Tensor, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Chooses the values of a gradient that are sent in a step.

        Args:
            values: the number of values.
            step: the step, an int64 scalar.
            number: the gradient's number.

        Returns:
            Their indices in ascending order, int64, and the size of each one's part, int64.
        """
        parts = self._chosen(values)
        bounds = tf.range(parts + 1, dtype=tf.int64) * values // max(1, parts)
        sizes = bounds[1:] - bounds[:-1]
        # The same numbers on every kind of device.
        bits = tf.random.stateless_uniform(
            [parts], [step, tf.constant(number, tf.int64)], None, None, tf.uint32, alg="philox"
        )
        return bounds[:-1] + tf.cast(bits, tf.int64) % sizes, sizes

    def _take(self, gradient: Gradient, places: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        values = tf.reshape(gradient.value, [-1])

        def take() -> tf.Tensor:
            if not self.error_feedback:
                return tf.gather(values, places) * tf.cast(sizes, tf.float32)
            error = gradient.kept["error"]
            error.assign_add(values)
            taken = error.sparse_read(places)
            zeros = tf.zeros_like(taken)
            tf.raw_ops.ResourceScatterUpdate(resource=error.handle, indices=places, updates=zeros)
            return taken

        # Non-finite values show in the sum, chosen or not, and are not kept.
        finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.cond(finite, take, lambda: tf.fill(tf.shape(places), float("nan")))

    def _chosen(self, values: int) -> int:
        return max(1, round(self.ratio * values)) if values else 0
