"""A model's variables, of which each rank keeps its share up to date, and what crosses ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.buckets import pack, plan
from tfdist.collective.communicator import Communicator
from tfdist.collective.native_communicator import BUCKET_BYTES, FIRST_BYTES
from tfdist.internals.keras import BaseOptimizer
from tfdist.internals.optimizer import inner_optimizer, strategy_of, trainable_variables_of
from tfdist.sharding.elementwise import keeps_nothing
from tfdist.sharding.layout import Bucket, cut
from tfdist.sharding.shard import Shard
from tfdist.strategies.reduction import all_gather_slices


class ShardedVariables:
    """The variables that an optimizer trains, shared out among the ranks.

    The gradients of a bucket are summed by a reduce-scatter as soon as they exist, and its updated
    elements spread by an all-gather. Together these carry what an all-reduce does.

    Args:
        variables: the model's.
        communicator: of the replicas.
        device: this replica's.

    Attributes:
        variables: the model's.
        shards: this rank's, those of one bucket after the other.
    """

    def __init__(self, variables: Sequence[Any], communicator: Communicator, device: str) -> None:
        self.variables = list(variables)
        self._communicator = communicator
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        bytes_ = getattr(communicator, "bucket_bytes", BUCKET_BYTES)
        first = min(bytes_, FIRST_BYTES)
        groups = plan(specs, bytes_, first_bytes=first, alone_bytes=bytes_)
        sizes = [int(spec.shape.num_elements()) for spec in specs]
        self._buckets: list[tuple[Bucket, list[int]]] = []
        self.shards: list[Shard] = []
        for bucket in cut(sizes, groups, communicator.size):
            pieces = bucket.pieces(communicator.rank)
            first_shard = len(self.shards)
            self.shards += [Shard(self.variables[p.variable], p, device) for p in pieces]
            self._buckets.append((bucket, list(range(first_shard, len(self.shards)))))

        self._owners = {id(key): s.variable for s in self.shards for key in (s, s.value)}

    def owner_of(self, variable: Any) -> Any:
        """The model's variable that a shard is part of; any other one is its own."""
        return self._owners.get(id(variable), variable)

    def refresh(self) -> None:
        """Takes the variables' values, which anyone may have assigned."""
        for shard in self.shards:
            shard.assign(shard.of(shard.variable))

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums gradients over the ranks.

        Args:
            gradients: for each variable this replica's, a tensor, `tf.IndexedSlices` or None.

        Returns:
            For each of `shards` its elements of the sum.
        """
        results: list[Any] = [None] * len(self.shards)
        dense = [None if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        for bucket, own in self._buckets:
            if all(dense[i] is None for i in bucket.variables):
                continue
            share = self._communicator.reduce_scatter(self._lay(bucket, dense))
            for number in own:
                piece = self.shards[number].piece
                if dense[piece.variable] is not None:
                    results[number] = share[piece.at : piece.at + piece.size]
        sparse = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        slices = {i: all_gather_slices(self._communicator, g) for i, g in sparse.items()}
        for number, shard in enumerate(self.shards):
            if shard.piece.variable in slices:
                results[number] = shard.of_slices(slices[shard.piece.variable])
        return results

    def of(self, values: Sequence[Any]) -> list[Any]:
        """For each of `shards` its elements of a value, or of None, of its whole variable."""
        results: list[Any] = []
        for shard in self.shards:
            value = values[shard.piece.variable]
            if isinstance(value, tf.IndexedSlices):
                results.append(shard.of_slices(value))
            else:
                results.append(None if value is None else shard.of(value))
        return results

    def gather(
        self,
        values: Sequence[Any],
        use: Callable[[int, tf.Tensor], Any],
        numbers: set[int] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """Puts whole values together from all ranks' parts, bucket by bucket.

        Args:
            values: for each of `shards` this rank's part.
            use: is called with the number of each variable and its whole value.
            numbers: of the variables whose values are wanted; all by default.
            communicator: another one of the same ranks.
        """
        communicator = communicator or self._communicator
        for bucket, own in self._buckets:
            wanted = [n for n in bucket.variables if numbers is None or n in numbers]
            if not wanted:
                continue
            dtype = tf.as_dtype(self.variables[bucket.variables[0]].dtype)
            parts = [tf.convert_to_tensor(values[number]) for number in own]
            missing = bucket.share - sum(self.shards[number].piece.size for number in own)
            if missing:
                parts.append(tf.zeros([missing], dtype))
            whole = communicator.all_gather(parts[0] if len(parts) == 1 else pack(parts))
            whole = tf.ensure_shape(whole, [bucket.share * bucket.ranks])
            sizes = [*bucket.sizes, bucket.padding] if bucket.padding else list(bucket.sizes)
            flats = [whole] if len(sizes) == 1 else tf.split(whole, sizes)
            for number, flat in zip(bucket.variables, flats, strict=False):
                if number in wanted:
                    use(number, tf.reshape(flat, self.variables[number].shape))

    def publish(self, values: Sequence[Any], numbers: set[int] | None = None, **how: Any) -> None:
        """Gives the variables, on all ranks, the values whose parts the ranks hold.

        Args:
            values: for each of `shards` its part.
            numbers: of the variables that get them; all by default.
            **how: as for `gather`.
        """
        self.gather(values, lambda n, value: self.variables[n].assign(value), numbers, **how)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks."""
        return self._communicator.all_reduce([tensor])[0]

    def _lay(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor:
        """The gradients of a bucket one after the other, zero where there is none."""
        flats = []
        dtype = tf.as_dtype(self.variables[bucket.variables[0]].dtype)
        for number, size in zip(bucket.variables, bucket.sizes, strict=True):
            gradient = gradients[number]
            if gradient is None:
                flats.append(tf.zeros([size], dtype))
            else:
                flat = tf.reshape(tf.cast(gradient, dtype), [-1])
                flats.append(tf.ensure_shape(flat, [size]))
        if bucket.padding:
            flats.append(tf.zeros([bucket.padding], dtype))
        return flats[0] if len(flats) == 1 else pack(flats)


_sharded: weakref.WeakKeyDictionary[Any, ShardedVariables] = weakref.WeakKeyDictionary()


def note_sharded(optimizer: Any, sharded: ShardedVariables) -> None:
    """Remembers what an optimizer has been built for."""
    _sharded[optimizer] = sharded


def sharded_by(optimizer: Any) -> ShardedVariables | None:
    """What an optimizer has been built for; None for one that is not sharded, or not built."""
    # A model's attribute of this name may be anything.
    if not isinstance(optimizer, BaseOptimizer):
        return None
    return _sharded.get(inner_optimizer(optimizer))


def may_shard(optimizer: Any) -> bool:
    """Whether an optimizer is of a strategy that shares out what optimizers keep."""
    extended = getattr(strategy_of(optimizer), "extended", None)
    return bool(getattr(extended, "shards_optimizers", False))


def is_sharded(optimizer: Any) -> bool:
    """Whether an optimizer that is made already is shared out among the ranks."""
    return may_shard(optimizer) and not keeps_nothing(optimizer)


def trained_by(optimizer: Any) -> list[Any]:
    """The model's variables that an optimizer was built for."""
    sharded = sharded_by(optimizer)
    if sharded is not None:
        return list(sharded.variables)
    return trainable_variables_of(inner_optimizer(optimizer))
