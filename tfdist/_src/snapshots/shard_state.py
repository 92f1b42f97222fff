"""A sharded optimizer's state on this worker, and the assignment of shards to workers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src import sharding
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.internals.optimizer import inner_optimizer
from tfdist._src.keras.optimizers.sharded_optimizers import rebuild
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import GroupLostError, UnsupportedError


@dataclass(frozen=True)
class HeldShards:
    """The shards that a worker holds from one division of the state among ranks.

    Attributes:
        generation: the generation of the group for which the state was divided.
        size: the number of ranks in the division.
        ranks: the ranks that these shards belong to: first the worker's own rank, then the rank
            from which the worker has copied a shard.
        steps: the committed step that these shards belong to.
        redoable: whether the worker can also produce the shards of the next step.
    """

    generation: int
    size: int
    ranks: tuple[int, ...]
    steps: int
    redoable: bool = False


@dataclass(frozen=True)
class ShardSource:
    """The workers that can send all shards of a division.

    Attributes:
        generation: the generation of the division.
        senders: for each rank of the division, the worker that sends the shards of this rank.
    """

    generation: int
    senders: tuple[int, ...]


def find_shards(held: Sequence[Sequence[HeldShards]], steps: int) -> ShardSource | None:
    """Finds the workers that together hold all shards of one division.

    If all shards of several divisions are held, the latest division is used.

    Args:
        held: the shards of each worker, in rank order.
        steps: the committed step that the shards must belong to.

    Returns:
        The workers; None if every division has lost shards.

    Example:
        >>> first, third = HeldShards(2, 3, (0, 2), 7), HeldShards(2, 3, (2, 1), 7)
        >>> find_shards([[first], [third], []], steps=7).senders
        (0, 1, 1)
    """
    sources: dict[tuple[int, int], dict[int, int]] = {}
    for copies in (False, True):
        for worker, several in enumerate(held):
            for one in several:
                if steps not in (one.steps, one.steps + one.redoable):
                    continue
                found = sources.setdefault((one.generation, one.size), {})
                for rank in one.ranks[1:] if copies else one.ranks[:1]:
                    found.setdefault(rank, worker)
    for (generation, size), found in sorted(sources.items(), reverse=True):
        if len(found) == size:
            return ShardSource(generation, tuple(found[rank] for rank in range(size)))
    return None


class ShardState:
    """The slots of a sharded optimizer that this worker holds.

    When the group changes, the slots are divided again. This worker keeps its previous slots until
    all workers have their new slots.

    Args:
        model: the model in training.
        callbacks: all callbacks of the call of `fit`.
        copies: the number of other workers from which each worker copies the slots, 0 or 1.
        joins: whether this worker joins a running job, and has not received its slots yet.
    """

    def __init__(
        self, model: keras.Model, callbacks: Sequence[Any], copies: int, *, joins: bool
    ) -> None:
        self._callbacks = callbacks
        self._model, self._extended = model, extended_of(model.distribute_strategy)
        self._keeps_copies = copies > 0
        self._now: _Division | None = None
        self._is_whole = not joins  # whether the current slots are complete
        self._before: list[_Division] = []
        self._steps: int | None = None  # the committed step of the slots while training pauses
        self._redoable = False

    def begin(self) -> None:
        """Makes training recoverable, once the optimizer has its variables.

        Raises:
            UnsupportedError: several optimizers are sharded, or `SwapEMAWeights` is used.
        """
        if self._now is None and sharding.sharded_by(self._model.optimizer) is not None:
            self._check_alone()
            if any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in self._callbacks):
                raise UnsupportedError(
                    "Elastic cannot undo a partial exchange of weights by SwapEMAWeights among "
                    "workers that shard their optimizer. Omit SwapEMAWeights and set the "
                    "optimizer's `ema_overwrite_frequency`, or train without "
                    "`shard_optimizer=True`."
                )
            self._extended.progress.redoable = True
            self._divide()
            self._model.make_train_function(force=True)

    def batch_begins(self) -> None:
        """Updates the copies of other workers' slots, if slots were set outside of a step.

        All workers must call this method.
        """
        if self._now is None:
            return
        self.drop_earlier()
        self._is_whole = True
        if self._now.copies is not None and self._now.copies.stale:
            self._now.copies.renew()

    def held(self) -> tuple[HeldShards, ...] | None:
        """Describes this worker's shards to the other workers; None if there is no sharding.

        Raises:
            UnsupportedError: several optimizers are sharded.
        """
        if self._now is None:
            return None
        self._check_alone()
        if self._steps is None:
            progress = self._extended.progress
            self._steps, self._redoable = progress.committed_steps, progress.has_undone
        if self._is_whole and self._now not in self._before:
            self._before.append(self._now)
        steps, redoable = self._steps, self._redoable
        return tuple(
            HeldShards(one.generation, one.ranks, one.holds, steps, redoable)
            for one in self._before
        )

    @contextlib.contextmanager
    def redistributing(self) -> Iterator[None]:
        """Divides the slots among the ranks of the current group.

        Within this context, the workers agree on the source of the shards. If shards are lost, the
        shards that this worker held before are dropped.
        """
        if self._now is not None:
            self._redistribute(self._now)
        try:
            yield
        except GroupLostError:
            self._before.clear()
            raise

    def _redistribute(self, now: _Division) -> None:
        topology = self._extended.group.topology
        self._is_whole = False
        if (now.rank, now.ranks) == (topology.rank, topology.size):
            self._now = dataclasses.replace(now, generation=topology.generation)
            return
        rebuild(self._model.optimizer)
        self._divide()
        self._extended.traces_know_group = True

    def receive_slots(self, source: ShardSource, steps: int) -> None:
        """Receives this worker's slots in the new division.

        All workers must call this method.

        Args:
            source: the workers that send the shards.
            steps: the committed step that all workers continue from.
        """
        now, workers = self._now, self._extended.workers
        assert now is not None
        if self._redoable and steps != self._steps:
            self._extended.progress.redo()
        self._steps, self._redoable = steps, False
        mine = next((d for d in self._before if d.generation == source.generation), None)
        me = self._extended.group.topology.rank
        for kind, number in now.kinds_and_buckets:
            parts = []
            first, end = now.elements(number, now.rank)
            for rank, sender in enumerate(source.senders):
                start, stop = now.elements(number, rank, ranks=len(source.senders))
                if start == stop:
                    continue
                if sender == me:
                    assert mine is not None
                    value = mine.read(rank, kind, number)
                else:
                    value = tf.zeros([stop - start], now.sharded.dtypes[number])
                given = workers.broadcast(value, sender)
                parts.append(given[max(first - start, 0) : max(end - start, 0)])
            now.assign(kind, number, tf.concat(parts, axis=0))
        if now.copies is not None:
            now.copies.renew()
        self._is_whole = True
        # When this sum completes, every worker knows that all workers have their slots.
        workers.all_reduce([tf.zeros([])], "shards are taken over")

    def drop_earlier(self) -> None:
        """Drops the shards of earlier divisions, before training continues."""
        self._before.clear()
        self._steps = None

    def end(self) -> None:
        """Disables the work for recovery in later steps, as if the group could not lose workers."""
        if self._now is not None:
            self._extended.progress.redoable = False
            self._now.sharded.copies = None
            self._model.train_function = None

    def _divide(self) -> None:
        """Records how the slots are divided, after the optimizer has been built."""
        sharded, optimizer = sharding.sharded_by(self._model.optimizer), self._model.optimizer
        assert sharded is not None
        slots = sharding.FullState(optimizer).own
        if self._keeps_copies and sharded.ranks > 1:
            communicator = self._extended.workers
            assert isinstance(communicator, CoreCommunicator)
            sharded.copies = sharding.PreviousRankCopies(
                slots, sharded.buckets, sharded.dtypes, sharded.rank, communicator
            )
        self._now = _Division(self._extended.group.generation, sharded, slots)

    def _check_alone(self) -> None:
        trained = {id(variable) for variable in self._model.trainable_variables}
        for optimizer in sharding.sharded_optimizers():
            others = sharding.trained_by(optimizer)
            if optimizer is not inner_optimizer(self._model.optimizer) and any(
                id(variable) in trained for variable in others
            ):
                raise UnsupportedError(
                    "Elastic transfers only the shards of the model's own optimizer. Received: "
                    f"{optimizer.name!r}, which is sharded and also trains "
                    f"variables of {self._model.name!r}. Train without `shard_optimizer=True`."
                )


@dataclasses.dataclass(frozen=True, eq=False)
class _Division:
    """This worker's part of one division of the slots among ranks.

    Attributes:
        generation: the generation of the group for which the slots were divided.
        sharded: the variables of the optimizer, with their division into buckets and shards.
        slots: for each kind of slot, such as a momentum, this rank's slots.
    """

    generation: int
    sharded: sharding.ShardedVariables
    slots: list[list[Any]]

    @property
    def copies(self) -> sharding.PreviousRankCopies | None:
        return self.sharded.copies

    @property
    def rank(self) -> int:
        return self.sharded.rank

    @property
    def ranks(self) -> int:
        return self.sharded.ranks

    @property
    def holds(self) -> tuple[int, ...]:
        """The ranks with slots that this worker holds, including copies."""
        copies = self.copies
        return (self.rank,) if copies is None or copies.stale else (self.rank, copies.rank)

    @property
    def kinds_and_buckets(self) -> list[tuple[int, int]]:
        """All pairs of the index of a kind of slot and the index of a bucket."""
        return [(k, b) for k in range(len(self.slots)) for b in range(len(self.sharded.buckets))]

    def elements(self, number: int, rank: int, ranks: int | None = None) -> tuple[int, int]:
        """Returns the start and the end of a rank's shard in a bucket, as indices of elements."""
        bucket, _ = self.sharded.buckets[number]
        return dataclasses.replace(bucket, ranks=ranks or self.ranks).elements(rank)

    def read(self, rank: int, kind: int, number: int) -> tf.Tensor:
        """Returns the slots of one kind that a rank has in one bucket, concatenated."""
        if rank == self.rank:
            _, own = self.sharded.buckets[number]
            return tf.concat([tf.convert_to_tensor(self.slots[kind][i]) for i in own], axis=0)
        assert self.copies is not None
        return self.copies.of(kind, number)

    def assign(self, kind: int, number: int, values: tf.Tensor) -> None:
        """Sets the slots of one kind that this rank has in one bucket."""
        _, own = self.sharded.buckets[number]
        for i in own:
            range_ = self.sharded.shards[i].range
            self.slots[kind][i].assign(values[range_.offset : range_.offset + range_.size])
