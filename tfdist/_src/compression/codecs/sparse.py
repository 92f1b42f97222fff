"""Codecs that send a few values of a gradient with their indices."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.codecs.hierarchical import HierarchicalCodec
from tfdist._src.compression.gradient import Gradient, Shape, count
from tfdist._src.compression.host_leaders import HostLeaders
from tfdist._src.compression.transport import Exchange

_ROW_BITS = 64


@dataclasses.dataclass(frozen=True)
class Sparsifier(HierarchicalCodec):
    """A codec whose hosts choose values independently and send them with their indices to all.

    All hosts sum them in the same order. Non-finite values count as the largest and are sent
    unchanged.

    Attributes:
        error_feedback: whether to add the values that are not sent to the next step's gradient.
    """

    payload = "gathered"

    error_feedback = True

    @abc.abstractmethod
    def density(self, step: Any) -> Any:
        """The fraction of a gradient's values that is sent in a step; None if it varies."""

    def bits_per_value(self, shape: Shape) -> float:
        density = self.density(None)
        if density is None:
            return _ROW_BITS
        values = max(1, count(shape))
        return _ROW_BITS * float(_chosen(density, values)) / values

    def runs_on(self, exchange: Exchange, device: str) -> str:
        return (self._leaders_in(exchange) or exchange.workers).device

    def _leaders_in(self, exchange: Exchange) -> NativeCommunicator | None:
        return exchange.encoded_leaders

    def _host_in(self, exchange: Exchange) -> HostLeaders:
        return exchange.encoded_host

    def devices(self, exchange: Exchange) -> HostLeaders:
        return exchange.encoded_devices

    def compresses(self, shape: Shape) -> bool:
        return count(shape) < 2**31

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def sum_of_hosts(
        self, leaders: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        sums: list[Any] = [None] * len(gradients)
        with tf.device(leaders.device):
            for bucket in leaders.plan([g.value for g in gradients]):
                some = [gradients[i] for i in bucket]
                _, hosts = leaders.place()
                rows = leaders.all_gather(self.select(some, step, hosts, leaders.name))
                totals = scatter(rows, [g.shape for g in some], leaders.name)
                for i, total in zip(bucket, totals, strict=True):
                    sums[i] = total
        return sums

    def select(
        self, gradients: Sequence[Gradient], step: tf.Tensor, hosts: Any, communicator: str = ""
    ) -> tf.Tensor:
        """Selects the values to send, and stores the others in the error variables.

        Args:
            gradients: the gradients of this host.
            step: the number of compressed steps so far.
            hosts: the number of hosts.
            communicator: the name of that of the hosts; for gradients on a GPU.

        Returns:
            A float32 row for each value: the bits of its int32 index among the values of all
            gradients, and the value.
        """
        scales = [self.scale(g, hosts) for g in gradients]
        with tf.device("CPU:0"):  # Where the number of rows is known without waiting for a GPU.
            density = self.density(step)
            counts = [0 if density is None else _chosen(density, count(g.shape)) for g in gradients]
            counts, scales = tf.cast(tf.stack(counts), tf.int64), tf.stack(scales)
        return native.load_ops().tfdist_select(
            tensors=[g.value for g in gradients],
            errors=[g.kept["error"].handle for g in gradients] if self.error_feedback else [],
            counts=counts,
            scales=scales,
            communicator=communicator,
            **self.selection(gradients),
        )

    def scale(self, gradient: Gradient, hosts: Any) -> Any:
        """A factor applied to a gradient first."""
        return 1.0

    def selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        """Further arguments of `TfdistSelect`."""
        return {"momenta": []}


def scatter(rows: tf.Tensor, shapes: Sequence[Shape], communicator: str = "") -> list[tf.Tensor]:
    """Sums rows into gradients.

    Args:
        rows: the rows of all hosts, as from `Sparsifier.select`.
        shapes: the shapes of the gradients.
        communicator: as for `Sparsifier.select`.

    Returns:
        A gradient for each shape; zero where no row has a value.
    """
    return list(
        native.load_ops().tfdist_scatter(
            rows=rows,
            N=len(shapes),
            shapes=[tf.TensorShape(s).as_proto() for s in shapes],
            communicator=communicator,
        )
    )


def _chosen(density: Any, values: int) -> Any:
    """The number of values to send, at least one."""
    if isinstance(density, float):
        return max(1, round(density * values)) if values else 0
    wanted = tf.cast(tf.round(tf.cast(density, tf.float64) * values), tf.int64)
    return tf.clip_by_value(wanted, min(1, values), values)
