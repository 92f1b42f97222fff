"""Codecs of TensorFlow operations, which sum what the hosts have summed within them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.codec import Codec, Gradient
from tfdist.compression.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class CarriedCodec(Codec):
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
        def sum_of_hosts(
            carriers: NativeCommunicator, places: list[int], values: list[tf.Tensor]
        ) -> list[tf.Tensor]:
            carried = [
                dataclasses.replace(gradients[i], value=value)
                for i, value in zip(places, values, strict=True)
            ]
            return self.sum_of_hosts(carriers, carried, step)

        return exchange.sum(
            [g.value for g in gradients], [g.number for g in gradients], sum_of_hosts
        )
