"""Codecs of TensorFlow operations, which compress the sums of hosts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.gradient import Gradient
from tfdist._src.compression.host_leaders import HostLeaders
from tfdist._src.compression.transport import Exchange


@dataclasses.dataclass(frozen=True)
class HierarchicalCodec(Codec):
    """A codec that compresses the sums of hosts, each exchanged by one leader per host."""

    def _leaders_in(self, exchange: Exchange) -> NativeCommunicator | None:
        """The communicator of the leaders; None for a worker that leads none."""
        return exchange.leaders

    def _host_in(self, exchange: Exchange) -> HostLeaders:
        """How the workers of a host divide gradients."""
        return exchange.host

    @abc.abstractmethod
    def sum_of_hosts(
        self, leaders: NativeCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums over the leaders of the same gradients, one per host.

        Args:
            leaders: their communicator.
            gradients: the sums of this host.
            step: as for `sum`.

        Returns:
            The sums, bitwise identical on all leaders.
        """

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        def sum_of_hosts(host_sums: list[Gradient]) -> list[tf.Tensor]:
            leaders = self._leaders_in(exchange)
            assert leaders is not None
            return self.sum_of_hosts(leaders, host_sums, step)

        return self._host_in(exchange).sum(gradients, sum_of_hosts)
