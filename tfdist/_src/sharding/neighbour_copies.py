"""Copies of the slots that another rank alone holds, in case that it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import native_ops
from tfdist._src.comm.buckets import pack
from tfdist._src.comm.dtypes import from_bits, to_bits
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.sharding.layout import Bucket
from tfdist._src.sharding.shard import local_variables


class NeighbourCopies:
    """A copy of the slots of the rank before this one; that of rank 0 is the last one.

    Args:
        slots: for each kind of slot, this rank's, bucket by bucket.
        buckets: the buckets, each with the numbers of its slots among these.
        dtypes: the buckets' types.
        rank: this rank.
        communicator: over the ranks.

    Attributes:
        rank: whose slots are copied.
        stale: whether they have changed since, other than by a step.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[Any]],
        buckets: Sequence[tuple[Bucket, Sequence[int]]],
        dtypes: Sequence[tf.DType],
        rank: int,
        communicator: NativeCommunicator,
    ) -> None:
        ranks = communicator.size
        self.rank, self.stale = (rank - 1) % ranks, True
        self._communicator = communicator
        self._sent: dict[tf.DType, list[Any]] = {}
        self._places: dict[tuple[int, int], tuple[tf.DType, int, int]] = {}
        sizes: dict[tf.DType, int] = {}
        for kind, several in enumerate(slots):
            for number, ((bucket, own), dtype) in enumerate(zip(buckets, dtypes, strict=True)):
                self._sent.setdefault(dtype, []).extend(several[i] for i in own)
                start, stop = bucket.elements(self.rank)
                begin = sizes.get(dtype, 0)
                sizes[dtype] = begin + stop - start
                self._places[kind, number] = dtype, begin, sizes[dtype]
        with local_variables("CPU:0"):
            self._copies = {d: tf.Variable(tf.zeros([n], d)) for d, n in sizes.items()}

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that hold the copies."""
        return list(self._copies.values())

    def exchange(self) -> None:
        """Sends this rank's slots to the next rank, and keeps those of the one before."""
        for dtype, copy in self._copies.items():
            sent = [tf.zeros([0], dtype), *map(tf.convert_to_tensor, self._sent[dtype])]
            received = _pass_on(self._communicator, pack(sent))
            copy.assign(tf.ensure_shape(received, copy.shape))

    def renew(self) -> None:
        """Exchanges the copies once, outside of a step; called by all ranks."""
        self.exchange()
        self.stale = False

    def of(self, kind: int, bucket: int) -> tf.Tensor:
        """The other rank's slots of a kind in a bucket, end to end."""
        dtype, begin, end = self._places[kind, bucket]
        return self._copies[dtype][begin:end]


def _pass_on(group: NativeCommunicator, tensor: tf.Tensor) -> tf.Tensor:
    """Sends a vector to the next rank, and returns that of the one before, of any size."""
    rank, size = group.place()
    with tf.device(group.device):
        rows = tf.shape(tensor, tf.int64)[0]
        to = tf.one_hot((rank + 1) % size, size, rows, tf.constant(0, tf.int64), dtype=tf.int64)
        sent = tensor if tensor.dtype in native_ops.TYPES else to_bits(tensor)
        received, _ = native_ops.all_to_all(group.token, sent, to, group.name, "copies of shards")
        return received if sent is tensor else from_bits(received, tensor.dtype)
