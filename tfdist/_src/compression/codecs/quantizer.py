"""Codecs that run in the core and use fewer bits per value."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist._src.comm.compressed import compressed_all_reduce
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.gradient import Gradient, Shape, count
from tfdist._src.compression.host_leaders import HostLeaders
from tfdist._src.compression.transport import Exchange
from tfdist._src.native.encoding import Encoding


@dataclasses.dataclass(frozen=True)
class Quantizer(Codec):
    """A codec that runs in the core: fewer bits per value, encoded while being sent.

    On GPUs, the core encodes there.

    Each host decodes the values of its shard of the gradients, sums them in float32, encodes the
    sum and sends it to all hosts: two errors for any number of hosts, and the same bits everywhere.

    Attributes:
        error_feedback: whether to add what is lost to the next step's gradient.
    """

    payload = "sharded"

    error_feedback = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.encoding  # Validates the settings.

    @property
    @abc.abstractmethod
    def encoding(self) -> Encoding:
        """How values are encoded."""

    @property
    def follows_hosts(self) -> bool:
        return self.error_feedback

    def bits_per_value(self, shape: Shape) -> float:
        return self.encoding.bits_per_value

    def runs_on(self, exchange: Exchange, device: str) -> str:
        if self.error_feedback:
            return (exchange.encoded_leaders or exchange.workers).device
        return exchange.encoded.device

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def devices(self, exchange: Exchange) -> HostLeaders:
        # The core sums those of GPUs, too, unless something of their sum is kept.
        return HostLeaders() if self._of_all_gpus(exchange) else exchange.encoded_devices

    def _of_all_gpus(self, exchange: Exchange) -> NativeCommunicator | None:
        return None if self.kept((1,)) else exchange.of_all_gpus

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        def sum_among(
            group: NativeCommunicator | None, some: Sequence[Gradient]
        ) -> list[tf.Tensor]:
            assert group is not None
            return compressed_all_reduce(
                group,
                [g.value for g in some],
                self.encoding,
                [g.kept["error"] for g in some] if self.error_feedback else [],
                step,
                within_hosts=exchange.within_hosts,
            )

        if self.error_feedback:
            # The error of a gradient stays with its leader, whatever else is sent with it.
            leaders = exchange.encoded_leaders
            return exchange.encoded_host.sum(gradients, lambda mine: sum_among(leaders, mine))
        return sum_among(self._of_all_gpus(exchange) or exchange.encoded, gradients)
