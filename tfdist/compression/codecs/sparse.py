"""Codecs that send few values of a gradient, each with its index."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.codecs.hierarchical import HierarchicalCodec
from tfdist.compression.gradient import Gradient, Shape, count

_ROW_BITS = 64


@dataclasses.dataclass(frozen=True)
class Sparsifier(HierarchicalCodec):
    """A codec whose hosts choose values, each for itself, and send them to all with their indices.

    All add them up in the same order. Values that are not finite are taken for the largest, and
    sent as they are.

    Attributes:
        error_feedback: whether what is not sent is added to the next step's gradient.
    """

    payload = "gathered"

    error_feedback = True

    @abc.abstractmethod
    def density(self, step: Any) -> Any:
        """The share of a gradient's values that are sent in a step; None where that depends."""

    def bits_per_value(self, shape: Shape) -> float:
        density = self.density(None)
        if density is None:
            return _ROW_BITS
        values = max(1, count(shape))
        return _ROW_BITS * float(_chosen(density, values)) / values

    def compresses(self, shape: Shape) -> bool:
        return count(shape) < 2**31

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def sum_of_hosts(
        self, carriers: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        sums: list[Any] = [None] * len(gradients)
        with tf.device(carriers.host):
            for bucket in carriers.plan([g.value for g in gradients]):
                some = [gradients[i] for i in bucket]
                rows = carriers.all_gather(self.select(some, step, carriers.size))
                for i, value in zip(bucket, scatter(rows, [g.shape for g in some]), strict=True):
                    sums[i] = value
        return sums

    def select(self, gradients: Sequence[Gradient], step: tf.Tensor, hosts: int) -> tf.Tensor:
        """Chooses values, and keeps the others.

        Args:
            gradients: of this host.
            step: so many were compressed before.
            hosts: how many there are.

        Returns:
            For each value a row, int32: its index among the values of all gradients, and its bits.
        """
        density = self.density(step)
        counts = [0 if density is None else _chosen(density, count(g.shape)) for g in gradients]
        return native.load_ops().tfdist_select(
            tensors=[g.value for g in gradients],
            errors=[g.kept["error"].handle for g in gradients] if self.error_feedback else [],
            counts=tf.cast(tf.stack(counts), tf.int64),
            scales=tf.stack([self.scale(g, hosts) for g in gradients]),
            **self.selection(gradients),
        )

    def scale(self, gradient: Gradient, hosts: int) -> Any:
        """A factor to multiply a gradient with first, a float32 scalar."""
        return tf.ones([])

    def selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        """What else `TfdistSelect` takes."""
        return {"momenta": []}


def scatter(rows: tf.Tensor, shapes: Sequence[Shape]) -> list[tf.Tensor]:
    """Adds up rows.

    Args:
        rows: as from `Sparsifier.select`, of all hosts.
        shapes: of the gradients.

    Returns:
        For each shape a gradient, zero where no row has a value.
    """
    return list(
        native.load_ops().tfdist_scatter(
            rows=rows, N=len(shapes), shapes=[tf.TensorShape(s).as_proto() for s in shapes]
        )
    )


def _chosen(density: Any, values: int) -> Any:
    """How many of so many values are sent, at least one."""
    if isinstance(density, float):
        return max(1, round(density * values)) if values else 0
    wanted = tf.cast(tf.round(tf.cast(density, tf.float64) * values), tf.int64)
    return tf.clip_by_value(wanted, min(1, values), values)
