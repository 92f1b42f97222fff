"""A communicator that uses TensorFlow's own collectives: RING on CPUs, and NCCL on GPUs.

In TensorFlow, the participants of a collective find each other by an instance key. The key must be
the same on all participants, and different in every call. Here, each call increments a counter
variable and uses its value as the key. Because a graph does this each time it runs, the keys also
match in loops and conditionals, and if the participants trace a function at different times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.comm import native_ops, tokens
from tfdist._src.comm.buckets import reduce_in_buckets
from tfdist._src.comm.native_communicator import gather_strings
from tfdist._src.internals.graphs import is_in_loop
from tfdist.errors import UnsupportedError


class TensorFlowCommunicator:
    """Connects one device with the other devices of a group.

    Args:
        device: the full name of this participant's device.
        rank: the rank of the device in the group.
        size: the number of participants.
        group_key: a number that identifies the group. It must be the same on all participants.
        implementation: `"AUTO"`, `"RING"` or `"NCCL"`.
        timeout: the number of seconds for which a collective waits for the other participants; 0
            for no limit.
        bucket_bytes: the approximate size of the buckets into which tensors are packed, in bytes.
        places: for each rank, the position of its device if all devices are sorted by name.
            TensorFlow's gather concatenates tensors in the order of the device names. By default,
            the positions equal the ranks.

    Raises:
        UnsupportedError: in `broadcast`, TensorFlow's collectives do not support the tensor's type.
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
        places: Sequence[int] | None = None,
    ) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._group_key = group_key
        self._implementation = implementation.lower()
        self._timeout = timeout
        self._bucket_bytes = bucket_bytes
        self._places = range(size) if places is None else places
        host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
        self._host = host.to_string()
        self._membership = _membership(self._host, device, group_key)

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def lasting_name(self) -> str:
        return ""

    @property
    def across_workers(self) -> tuple[str, ...]:
        return ()

    def place(self) -> tuple[Any, Any]:
        return self._rank, self._size

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        with tf.device(self._device):
            summable = [native_ops.to_summable(t) for t in tensors]
            sums = reduce_in_buckets(summable, self._reduce, self._bucket_bytes)
            return [native_ops.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        part = tf.shape(tensor)[0] // self.size
        return self.all_reduce([tensor])[0][self.rank * part : (self.rank + 1) * part]

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        with tf.device(self._device):
            if tensor.dtype == tf.string:
                with tf.device(self._host):
                    return gather_strings(tensor, self.all_gather)
            bits = native_ops.to_bits(tensor)
            counts = self._gather(tf.shape(bits)[:1])
            most = tf.maximum(tf.reduce_max(counts), 1)
            padding = [[0, most - tf.shape(bits)[0]], *[[0, 0]] * (bits.shape.rank - 1)]
            blocks = self._gather(tf.pad(bits, padding))
            gathered = tf.concat(
                [blocks[i * most : i * most + counts[i]] for i in self._places], axis=0
            )
            return tf.ensure_shape(
                native_ops.from_bits(gathered, tensor.dtype), [None, *tensor.shape[1:]]
            )

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            raise UnsupportedError(
                f"A tensor of type {tensor.dtype.name} cannot be broadcast to the other workers. "
                "Create it outside of the strategy's scope."
            )
        with tf.device(self._device):
            bits = native_ops.to_bits(tensor)
            shape = bits.shape
            if self._rank != root:
                bits = tf.zeros_like(bits)
            bits = self._reduce(tf.reshape(bits, [-1]))
            return native_ops.from_bits(tf.reshape(bits, shape), tensor.dtype)

    def _reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        may_be_empty = not tensor.shape.num_elements()
        given = _with_an_element(tensor) if may_be_empty else tensor
        reduced = self._run(tf.raw_ops.CollectiveReduceV2, given, merge_op="Add", final_op="Id")
        if may_be_empty:
            reduced = tf.reshape(reduced[:-1], tf.shape(tensor))
        return tf.ensure_shape(reduced, tensor.shape)

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the tensors of all participants along the first axis.

        The tensors must have the same shape and at least one row.
        """
        gather = tf.raw_ops.CollectiveGatherV2
        if tensor.shape[1:].num_elements():
            return self._run(gather, tensor)
        everyone = tf.reshape(self._run(gather, _with_an_element(tensor)), [self._size, -1])
        rows, row = tf.shape(tensor)[:1], tf.shape(tensor)[1:]
        return tf.reshape(everyone[:, :-1], tf.concat([self._size * rows, row], axis=0))

    def _run(self, collective: Any, tensor: tf.Tensor, **settings: str) -> tf.Tensor:
        def run(tensor: tf.Tensor, instance: tf.Tensor, ordering: list[tf.Tensor]) -> tf.Tensor:
            return collective(
                input=tensor,
                group_size=self._size,
                group_key=self._group_key,
                instance_key=instance,
                ordering_token=ordering,
                communication_hint=self._implementation,
                timeout_seconds=self._timeout,
                **settings,
            )

        if not tf.executing_eagerly() and is_in_loop():
            # TensorFlow also compares the name of the loop that contains a collective. If one graph
            # contains the loops of two devices, the loops have different names, and the collectives
            # would not match. In a function that is not inlined, the collective is not part of a
            # loop.
            run = tf.function(run, autograph=False, experimental_attributes={"_noinline": True})
        return run(tensor, self._next_instance(), self._ordering())

    def _next_instance(self) -> tf.Tensor:
        with tf.device(self._host):
            tf.raw_ops.AssignAddVariableOp(resource=self._membership.counter, value=1)
            return tf.raw_ops.ReadVariableOp(resource=self._membership.counter, dtype=tf.int32)

    def _ordering(self) -> list[tf.Tensor]:
        # All ranks must start NCCL's collectives in the same order, so these use a single ordering
        # resource. With RING, several collectives can run at the same time.
        tokens.note_collective()
        ordering = self._membership.ordering
        self._membership.calls += 1
        concurrent = 1 if self._implementation == "nccl" else len(ordering)
        return [ordering[self._membership.calls % concurrent]]


def _with_an_element(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the elements of a tensor and a zero, since TensorFlow crashes on an empty tensor."""
    return tf.concat([tf.reshape(tensor, [-1]), tf.zeros([1], tensor.dtype)], axis=0)


@dataclass
class _Membership:
    """The state that all communicators with the same device and group share.

    Attributes:
        counter: the resource of a variable on the host that contains the last instance key.
        ordering: resources on the device. Each operation takes one of them as an input, and
            therefore runs on the device. Operations with the same resource run in program order.
        calls: the number of collective operations created so far.
    """

    counter: tf.Tensor
    ordering: list[tf.Tensor]
    calls: int = 0


_memberships: dict[tuple[str, int], _Membership] = {}
_CONCURRENT = 4


def _membership(host: str, device: str, group_key: int) -> _Membership:
    if (device, group_key) not in _memberships:
        counter = tokens.make(host, tf.int32)
        ordering = [tokens.make(device, tf.float32) for _ in range(_CONCURRENT)]
        _memberships[device, group_key] = _Membership(counter, ordering)
    return _memberships[device, group_key]
