"""Model variables of which each rank updates its shard, and the collectives this takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import traces
from tfdist._src.comm.buckets import pack, plan
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.native_communicator import BUCKET_BYTES, FIRST_BYTES
from tfdist._src.internals.keras import BaseOptimizer
from tfdist._src.internals.optimizer import inner_optimizer, strategy_of, trainable_variables_of
from tfdist._src.sharding.elementwise import is_stateless
from tfdist._src.sharding.layout import Bucket, cut
from tfdist._src.sharding.neighbour_copies import NeighbourCopies
from tfdist._src.sharding.shard import Shard
from tfdist._src.strategy.reduction import all_gather_slices
from tfdist._src.strategy.step import equal_everywhere, gathered_parts


class ShardedVariables:
    """The variables that an optimizer trains, sharded among the ranks.

    The gradients of a bucket are reduce-scattered as soon as they are available, and its updated
    elements are all-gathered. Together these transfer as many bytes as an all-reduce.

    Args:
        variables: the model variables.
        communicator: over the replicas.
        device: this replica's device.

    Attributes:
        variables: the model variables.
        shards: this rank's shards, bucket by bucket.
        buckets: the buckets, each with the numbers of its shards.
        ranks: among how many ranks the variables are sharded.
        rank: this rank.
        copies: keeps a copy of another rank's slots, if there is to be one.
        unbuilt: the variables that the optimizer had before it was built for the shards.
    """

    copies: NeighbourCopies | None = None
    unbuilt: Sequence[Any] = ()

    def __init__(self, variables: Sequence[Any], communicator: Communicator, device: str) -> None:
        self.variables = list(variables)
        self._communicator = communicator
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        bytes_ = getattr(communicator, "bucket_bytes", BUCKET_BYTES)
        first = min(bytes_, FIRST_BYTES)
        groups = plan(specs, bytes_, first_bytes=first, alone_bytes=bytes_)
        sizes = [int(spec.shape.num_elements()) for spec in specs]
        with traces.unnoted():  # For other numbers everything is built and traced anew.
            self.rank, self.ranks = communicator.rank, communicator.size
        self.buckets: list[tuple[Bucket, list[int]]] = []
        self.shards: list[Shard] = []
        for bucket in cut(sizes, groups, self.ranks):
            pieces = bucket.pieces(self.rank)
            first_shard = len(self.shards)
            self.shards += [Shard(self.variables[p.variable], p, device) for p in pieces]
            self.buckets.append((bucket, list(range(first_shard, len(self.shards)))))

        self._owners = {id(key): s.variable for s in self.shards for key in (s, s.value)}

    @property
    def dtypes(self) -> list[tf.DType]:
        """The types of the buckets."""
        return [tf.as_dtype(self.variables[b.variables[0]].dtype) for b, _ in self.buckets]

    def note_set(self) -> None:
        """Records that something else than a step has set slots, on all ranks."""
        if self.copies is not None:
            self.copies.stale = True

    def owner_of(self, variable: Any) -> Any:
        """The model variable that a shard is part of; any other variable itself."""
        return self._owners.get(id(variable), variable)

    def refresh(self) -> None:
        """Copies the variables' values, which may have been assigned, to the shards."""
        for shard in self.shards:
            shard.assign(shard.of(shard.variable))

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums gradients over the ranks.

        Args:
            gradients: this replica's gradient of each variable: a tensor, `tf.IndexedSlices` or
                None.

        Returns:
            For each of `shards`, its elements of the sum.
        """
        results: list[Any] = [None] * len(self.shards)
        dense = [None if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        for bucket, shard_numbers in self.buckets:
            if all(dense[i] is None for i in bucket.variables):
                continue
            total = self._communicator.reduce_scatter(self._flatten(bucket, dense))
            for number in shard_numbers:
                piece = self.shards[number].piece
                if dense[piece.variable] is not None:
                    results[number] = total[piece.offset : piece.offset + piece.size]
        sparse = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        slices = {i: all_gather_slices(self._communicator, g) for i, g in sparse.items()}
        for number, shard in enumerate(self.shards):
            if shard.piece.variable in slices:
                results[number] = shard.of_slices(slices[shard.piece.variable])
        return results

    def of(self, values: Sequence[Any]) -> list[Any]:
        """For each of `shards`, its elements of its variable's full value, or None for None."""
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
        before_last: Callable[[], Sequence[Any]] = list,
    ) -> None:
        """Gathers full values from all ranks' shards, bucket by bucket.

        Args:
            values: for each of `shards`, its value.
            use: called with the number of each variable and its full value.
            numbers: the variables to gather; all by default.
            communicator: an alternative communicator over the same ranks.
            before_last: returns the operations that must precede this rank's last contribution.
        """
        communicator = communicator or self._communicator
        several = [
            (bucket, shard_numbers, wanted)
            for bucket, shard_numbers in self.buckets
            if (wanted := [n for n in bucket.variables if numbers is None or n in numbers])
        ]
        for bucket, shard_numbers, wanted in several:
            dtype = tf.as_dtype(self.variables[bucket.variables[0]].dtype)
            parts = [tf.convert_to_tensor(values[number]) for number in shard_numbers]
            padding = bucket.shard_size - sum(self.shards[n].piece.size for n in shard_numbers)
            if padding:
                parts.append(tf.zeros([padding], dtype))
            # A worker without a shard of the bucket takes part with zeros.
            (part,) = gathered_parts([parts[0] if len(parts) == 1 else pack(parts)])
            last = bucket is several[-1][0]
            with tf.control_dependencies(before_last() if last else []):
                full = communicator.all_gather(part)
            (full,) = equal_everywhere([full])
            full = tf.ensure_shape(full, [bucket.shard_size * bucket.ranks])
            sizes = [*bucket.sizes, bucket.padding] if bucket.padding else list(bucket.sizes)
            flats = [full] if len(sizes) == 1 else tf.split(full, sizes)
            for number, flat in zip(bucket.variables, flats, strict=False):
                if number in wanted:
                    use(number, tf.reshape(flat, self.variables[number].shape))

    def publish(
        self,
        values: Sequence[Any],
        numbers: set[int] | None = None,
        *,
        announce: Callable[[Sequence[tf.Tensor]], None] = lambda gathered: None,
        **how: Any,
    ) -> None:
        """Assigns the variables, on all ranks, the values gathered from the ranks' shards.

        Args:
            values: for each of `shards`, its value.
            numbers: the variables to assign; all by default.
            announce: called with all that has been gathered, before any of it is assigned.
            **how: passed to `gather`.
        """
        gathered: dict[int, tf.Tensor] = {}
        self.gather(values, gathered.__setitem__, numbers, **how)
        announce(list(gathered.values()))
        for number, value in gathered.items():
            self.variables[number].assign(value)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks."""
        return self._communicator.all_reduce([tensor])[0]

    def _flatten(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor:
        """The gradients of a bucket laid end to end, with zeros for missing ones."""
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
    """Records the sharded variables that an optimizer was built for."""
    _sharded[optimizer] = sharded


def sharded_by(optimizer: Any) -> ShardedVariables | None:
    """The sharded variables an optimizer was built for; None if it is unsharded or unbuilt."""
    # A model's `optimizer` attribute may be anything.
    if not isinstance(optimizer, BaseOptimizer):
        return None
    return _sharded.get(inner_optimizer(optimizer))


def sharded_optimizers() -> list[Any]:
    """All optimizers that were built for sharded variables."""
    return list(_sharded)


def may_shard(optimizer: Any) -> bool:
    """Whether an optimizer belongs to a strategy that shards optimizer state."""
    extended = getattr(strategy_of(optimizer), "extended", None)
    return bool(getattr(extended, "shards_optimizers", False))


def is_sharded(optimizer: Any) -> bool:
    """Whether an existing optimizer is sharded among the ranks."""
    return may_shard(optimizer) and not is_stateless(optimizer)


def trained_by(optimizer: Any) -> list[Any]:
    """The model variables that an optimizer was built for."""
    sharded = sharded_by(optimizer)
    if sharded is not None:
        return list(sharded.variables)
    return trainable_variables_of(inner_optimizer(optimizer))
