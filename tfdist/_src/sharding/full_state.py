"""The full (unsharded) state of a sharded optimizer, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.internals.optimizer import blank_copy, forms, numbered
from tfdist._src.sharding.shard import Shard
from tfdist._src.sharding.sharded import ShardedVariables, sharded_by


class FullSlot:
    """A full slot, of which this rank holds some shards.

    Args:
        sharded: the variables that the optimizer is built for.
        like: a variable of the same shape and type.
        parts: this rank's shards of the variable, each with its slot.
    """

    def __init__(
        self, sharded: ShardedVariables, like: Any, parts: Sequence[tuple[Shard, Any]]
    ) -> None:
        self._sharded = sharded
        self.shape, self.dtype, self.name = like.shape, like.dtype, like.name
        self._parts = list(parts)
        self._value: Any = None

    @property
    def parts(self) -> list[tuple[int, Any, Callable[[Any], None]]]:
        """This rank's shards of the flattened slot.

        Returns:
            For each the first element, the variable, and what assigns it.
        """

        def assigns(slot: Any) -> Callable[[Any], None]:
            def assign(value: Any) -> None:
                slot.assign(value)
                self._sharded.note_set()

            return assign

        return [(shard.piece.start, slot, assigns(slot)) for shard, slot in self._parts]

    def assign(self, value: Any) -> None:
        """Assigns this rank's shards their elements of a full value."""
        for shard, slot in self._parts:
            slot.assign(shard.of(value))
        self._sharded.note_set()

    def keep(self, value: tf.Tensor) -> None:
        """Stores the full value, which the conversion to a tensor returns."""
        self._value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self.shape, self.dtype) if self._value is None else self._value


class FullState:
    """The variables of a sharded optimizer, as an unsharded one has them.

    Args:
        optimizer: sharded and built.

    Attributes:
        blank: the unsharded counterpart, whose variables have no values.
        blanks: its variables.
        variables: for each of these, a `FullSlot` or a variable of `optimizer`.

    Raises:
        ValueError: the counterpart has different slots.
    """

    def __init__(self, optimizer: Any) -> None:
        sharded = sharded_by(optimizer)
        assert sharded is not None
        self._sharded = sharded
        blank, owners = blank_copy(optimizer, sharded.variables)
        like, shard_owners = blank_copy(optimizer, sharded.shards)
        # Keras does not track every variable that the inner optimizer of a loss scaler creates.
        shared = len(optimizer.variables) - sum(owner is not None for owner in shard_owners)
        expected = _tracked(blank, owners, shared)
        found = _tracked(like, shard_owners, shared)
        self.blank, self.blanks = blank, list(expected.values())
        self._slot_indices = {index for owner, index in expected if owner is not None}
        ranges = range(len(sharded.variables)), range(len(sharded.shards))
        slots = [{(i, n) for i in indices for n in self._slot_indices} for indices in ranges]
        if (
            forms(optimizer.variables) != forms(found.values())
            or slots != [{key for key in keys if key[0] is not None} for keys in (expected, found)]
            or any(
                forms([slot]) != forms([sharded.variables[owner]])
                for (owner, _), slot in expected.items()
                if owner is not None
            )
        ):
            raise ValueError(
                "A sharded optimizer must have the same slots for every variable, each of the "
                "variable's shape and type, and a copy made from its `get_config()` must have them "
                f"too. Received: {type(optimizer).__name__}, whose slots differ. Train without "
                "shard_optimizer=True."
            )
        self._local = dict(zip(found, optimizer.variables, strict=True))
        shards: dict[int | None, list[int]] = {}
        for i, shard in enumerate(sharded.shards):
            shards.setdefault(shard.piece.variable, []).append(i)
        self._slots = {
            key: FullSlot(
                sharded,
                slot,
                [(sharded.shards[i], self._local[i, key[1]]) for i in shards.get(key[0], [])],
            )
            for key, slot in expected.items()
            if key[0] is not None
        }
        self.variables = [self._slots.get(key) or self._local[key] for key in expected]

    @property
    def own(self) -> list[list[Any]]:
        """For each kind of slot, this rank's slots in the order of the shards."""
        several = range(len(self._sharded.shards))
        return [[self._local[i, n] for i in several] for n in sorted(self._slot_indices)]

    def gather(self, communicator: Communicator, *, keep: bool) -> None:
        """Gathers the full slots; called by all ranks.

        Args:
            communicator: over the ranks among which the optimizer is sharded.
            keep: whether this rank needs the slots.
        """
        for n, values in zip(sorted(self._slot_indices), self.own, strict=True):

            def use(number: int, value: tf.Tensor, n: int = n) -> None:
                if keep:
                    self._slots[number, n].keep(value)

            self._sharded.gather(values, use, communicator=communicator)


def _tracked(
    copy: Any, owners: Sequence[int | None], shared: int
) -> dict[tuple[int | None, int], Any]:
    """The variables of a copy by their keys: all slots, and the first `shared` other variables."""
    pairs = zip(numbered(owners), copy.variables, strict=True)
    return {key: v for key, v in pairs if key[0] is not None or key[1] < shared}


def full_variables(optimizer: Any) -> list[Any]:
    """An optimizer's variables as if it were unsharded, for assigning full values."""
    if sharded_by(optimizer) is None:
        return list(optimizer.variables)
    return FullState(optimizer).variables
