"""A communicator over TensorFlow's own collectives: RING on CPUs, NCCL on GPUs.

Each collective carries an instance key that must be the same on all participants and new for
every call. The key comes from a counter variable in the graph, so that functions which the
participants trace at different times, loops and conditionals keep in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.collective import dtypes, tokens
from tfdist.collective.buckets import reduce_in_buckets
from tfdist.collective.strings import gather_strings
from tfdist.errors import UnsupportedError


class TensorFlowCommunicator:
    """One device's handle on a group of devices.

    Args:
        device: the device that takes part, by its full name.
        rank: its position in the group.
        size: the number of participants.
        group_key: a number that names the group, the same for all of its members.
        implementation: `"AUTO"`, `"RING"` or `"NCCL"`.
        timeout: seconds that a collective waits for the others; 0 for ever.
        bucket_bytes: tensors are packed into buckets of about this size.

    Raises:
        UnsupportedError: on an operation that TensorFlow's collectives cannot carry.
    """

    def __init__(
        self,
        device: str,
        *,
        rank: int,
        size: int,
        group_key: int,
        implementation: str = "AUTO",
        timeout: float = 0.0,
        bucket_bytes: int = 4 << 20,
    ) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._group_key = group_key
        self._implementation = implementation.lower()
        self._timeout = timeout
        self._bucket_bytes = bucket_bytes
        host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
        self._host = host.to_string()
        self._place = _place(self._host, device, group_key)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        with tf.device(self._device):
            summable = [dtypes.to_summable(t) for t in tensors]
            sums = reduce_in_buckets(summable, self._reduce, self._bucket_bytes)
            return [dtypes.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        part = tf.shape(tensor)[0] // self.size
        return self.all_reduce([tensor])[0][self.rank * part : (self.rank + 1) * part]

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        with tf.device(self._device):
            if tensor.dtype == tf.string:
                with tf.device(self._host):
                    return gather_strings(tensor, self.all_gather)
            bits = dtypes.to_bits(tensor)
            counts = self._gather(tf.shape(bits)[:1])
            most = tf.reduce_max(counts)
            missing = [[0, most - tf.shape(bits)[0]], *[[0, 0]] * (bits.shape.rank - 1)]
            blocks = self._gather(tf.pad(bits, missing))
            gathered = tf.concat(
                [blocks[i * most : i * most + counts[i]] for i in range(self._size)], axis=0
            )
            return tf.ensure_shape(
                dtypes.from_bits(gathered, tensor.dtype), [None, *tensor.shape[1:]]
            )

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            raise UnsupportedError(
                f"A tensor of type {tensor.dtype.name} cannot be broadcast to the other workers. "
                "Create it outside of the strategy's scope."
            )
        with tf.device(self._device):
            bits = dtypes.to_bits(tensor)
            shape = bits.shape
            if self._rank != 0:
                bits = tf.zeros_like(bits)
            bits = self._reduce(tf.reshape(bits, [-1]))
            return dtypes.from_bits(tf.reshape(bits, shape), tensor.dtype)

    def _reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=self._size,
            group_key=self._group_key,
            instance_key=self._next_instance(),
            ordering_token=self._ordering(),
            merge_op="Add",
            final_op="Id",
            communication_hint=self._implementation,
            timeout_seconds=self._timeout,
        )
        return tf.ensure_shape(reduced, tensor.shape)

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveGatherV2(
            input=tensor,
            group_size=self._size,
            group_key=self._group_key,
            instance_key=self._next_instance(),
            ordering_token=self._ordering(),
            communication_hint=self._implementation,
            timeout_seconds=self._timeout,
        )

    def _next_instance(self) -> tf.Tensor:
        with tf.device(self._host):
            tf.raw_ops.AssignAddVariableOp(resource=self._place.counter, value=1)
            return tf.raw_ops.ReadVariableOp(resource=self._place.counter, dtype=tf.int32)

    def _ordering(self) -> list[tf.Tensor]:
        # NCCL must launch in one order on all ranks; RING may run several at a time.
        tokens.note_use()
        ordering = self._place.ordering
        self._place.calls += 1
        concurrent = 1 if self._implementation == "nccl" else len(ordering)
        return [ordering[self._place.calls % concurrent]]


@dataclass
class _Place:
    """A device's place in a group, shared by all communicators that stand on it.

    Attributes:
        counter: the last instance key, a resource on the host.
        ordering: resources on the device; an operation that holds one stays on that device, and
            operations that hold the same one run in order.
        calls: how many operations have been made.
    """

    counter: tf.Tensor
    ordering: list[tf.Tensor]
    calls: int = 0


_places: dict[tuple[str, int], _Place] = {}
_CONCURRENT = 4


def _place(host: str, device: str, group_key: int) -> _Place:
    if (device, group_key) not in _places:
        counter = tokens.make(host, tf.int32)
        ordering = [tokens.make(device, tf.float32) for _ in range(_CONCURRENT)]
        _places[device, group_key] = _Place(counter, ordering)
    return _places[device, group_key]
