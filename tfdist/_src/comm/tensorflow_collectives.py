"""A communicator over TensorFlow's collectives: RING on CPUs, NCCL on GPUs.

TensorFlow matches the participants of a collective by an instance key. It must be the same on all
participants, and new in every call. A graph reads the key from a counter variable when it runs. So
the keys match even if the participants trace a function at different times, and in loops and
conditionals.
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
    """One device's handle on a group of devices.

    Args:
        device: the full name of the participating device.
        rank: its rank in the group.
        size: the number of participants.
        group_key: a number that identifies the group, the same on all of its members.
        implementation: `"AUTO"`, `"RING"` or `"NCCL"`.
        timeout: seconds that a collective waits for the other participants; 0 for no limit.
        bucket_bytes: tensors are packed into buckets of about this size.
        places: for each rank, its position among the participants sorted by device name, which is
            the order in which TensorFlow gathers; by default the rank.

    Raises:
        UnsupportedError: TensorFlow's collectives do not support an operation.
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
        """Concatenates tensors of the same shape with at least one row."""
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
            # TensorFlow also matches participants by the name of the enclosing loop, and the loops
            # of two devices in one graph differ in name. In a function that is not inlined, the
            # collective has no enclosing loop.
            run = tf.function(run, autograph=False, experimental_attributes={"_noinline": True})
        return run(tensor, self._next_instance(), self._ordering())

    def _next_instance(self) -> tf.Tensor:
        with tf.device(self._host):
            tf.raw_ops.AssignAddVariableOp(resource=self._membership.counter, value=1)
            return tf.raw_ops.ReadVariableOp(resource=self._membership.counter, dtype=tf.int32)

    def _ordering(self) -> list[tf.Tensor]:
        # NCCL must launch in the same order on all ranks; RING can run several collectives at once.
        tokens.note_collective()
        ordering = self._membership.ordering
        self._membership.calls += 1
        concurrent = 1 if self._implementation == "nccl" else len(ordering)
        return [ordering[self._membership.calls % concurrent]]


def _with_an_element(tensor: tf.Tensor) -> tf.Tensor:
    """The elements of a tensor and a zero, because TensorFlow crashes if there are no elements."""
    return tf.concat([tf.reshape(tensor, [-1]), tf.zeros([1], tensor.dtype)], axis=0)


@dataclass
class _Membership:
    """A device's membership in a group, shared by all communicators of the device and the group.

    Attributes:
        counter: the last instance key, a resource on the host.
        ordering: resources on the device. An operation that holds one of them runs on that device;
            operations that hold the same resource run in order.
        calls: the number of operations created so far.
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
