"""Codecs of TensorFlow operations, which sum what the hosts have summed within them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.codecs.codec import Codec
from tfdist.compression.gradient import Gradient
from tfdist.compression.transport import Exchange


@dataclasses.dataclass(frozen=True)
class HierarchicalCodec(Codec):
    """A codec that compresses the sums of hosts, each carried by one of the host's workers."""

    @abc.abstractmethod
    def sum_of_hosts(
        self, carriers: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums over the workers that carry the same gradients, one of each host.

        Args:
            carriers: their communicator.
            gradients: the sums of this host.
            step: as for `sum`.

        Returns:
            The sums, bitwise equal on all carriers.
        """

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        def sum_of_hosts(carried: list[Gradient]) -> list[tf.Tensor]:
            assert exchange.carriers is not None
            return self.sum_of_hosts(exchange.carriers, carried, step)

        return exchange.host.sum(gradients, sum_of_hosts)
