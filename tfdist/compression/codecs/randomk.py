"""Values chosen at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.codecs.hierarchical import HierarchicalCodec
from tfdist.compression.gradient import Gradient, Shape, count


@dataclasses.dataclass(frozen=True)
class RandomK(HierarchicalCodec):
    """Values at random places, the same on all workers, so that no index is sent and values sum.

    Of each of `ratio * n` equal parts of a gradient one value, 32 bits each. What is not sent is
    added to the next step's gradient; without, a value is multiplied by the size of its part, so
    that the sum is unbiased.

    Args:
        ratio: the share of the values that are sent, in (0, 1].
        error_feedback: whether what is not sent is added to the next step's gradient.

    Source: Stich et al., "Sparsified SGD with memory", 2018 (there any values, here one of each
    part: each is as likely to be sent).
    """

    payload = "summed"
    on_host = False

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` is above 0 and at most 1.", self.ratio, holds=0 < self.ratio <= 1)

    def bits_per_value(self, shape: Shape) -> float:
        return 32 * self._chosen(count(shape)) / max(1, count(shape))

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def sum_of_hosts(
        self, carriers: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        places = [self.places(count(g.shape), step, g.number) for g in gradients]
        sent = [self._take(g, *p) for g, p in zip(gradients, places, strict=True)]
        sums = carriers.all_reduce(sent)
        return [
            tf.reshape(tf.scatter_nd(p[:, None], s, [count(g.shape)]), g.shape)
            for g, s, (p, _) in zip(gradients, sums, places, strict=True)
        ]

    def places(self, values: int, step: tf.Tensor, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Which values of a gradient are sent in a step.

        Args:
            values: how many there are.
            step: an int64 scalar.
            number: of the gradient.

        Returns:
            Their indices, rising, int64; and of how many each is one, int64.
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

        # What is not finite shows, chosen or not, and is not kept.
        finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.cond(finite, take, lambda: tf.fill(tf.shape(places), float("nan")))

    def _chosen(self, values: int) -> int:
        return max(1, round(self.ratio * values)) if values else 0
