"""The state that a sharded optimizer would have if it were not, put together from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.communicator import Communicator
from tfdist.internals.optimizer import blank_copy, forms, numbered
from tfdist.sharding.shard import Shard
from tfdist.sharding.sharded import sharded_by


class WholeSlot:
    """A slot of a whole variable, of which this rank has parts.

    Args:
        like: a variable of its shape and type.
        parts: the shards of its variable, each with its slot.
    """

    def __init__(self, like: Any, parts: Sequence[tuple[Shard, Any]]) -> None:
        self.shape, self.dtype, self.name = like.shape, like.dtype, like.name
        self._parts = list(parts)
        self._value: Any = None

    def assign(self, value: Any) -> None:
        """Gives this rank's parts their elements of a value."""
        for shard, slot in self._parts:
            slot.assign(shard.of(value))

    def keep(self, value: tf.Tensor) -> None:
        """Keeps the whole value, as the conversion to a tensor gives it."""
        self._value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self.shape, self.dtype) if self._value is None else self._value


class WholeState:
    """The variables of a sharded optimizer as those of an ordinary one.

    Args:
        optimizer: sharded and built.

    Attributes:
        blank: an ordinary optimizer like it, whose variables have no values.
        blanks: its variables.
        variables: what stands for each of them: a `WholeSlot`, or a variable of the optimizer.

    Raises:
        ValueError: one that is made like it has other variables.
    """

    def __init__(self, optimizer: Any) -> None:
        sharded = sharded_by(optimizer)
        assert sharded is not None
        self._sharded = sharded
        blank, owners = blank_copy(optimizer, sharded.variables)
        like, own_owners = blank_copy(optimizer, sharded.shards)
        # Keras does not track all that an optimizer makes inside of one that scales losses.
        shared = len(optimizer.variables) - sum(owner is not None for owner in own_owners)
        expected = _tracked(blank, owners, shared)
        found = _tracked(like, own_owners, shared)
        self.blank, self.blanks = blank, list(expected.values())
        self._counts = {number for owner, number in expected if owner is not None}
        everywhere = range(len(sharded.variables)), range(len(sharded.shards))
        slots = [{(i, n) for i in all_ for n in self._counts} for all_ in everywhere]
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
                "A sharded optimizer has, for each variable, the same slots of the variable's "
                "shape and type, and one made anew from its `get_config()` has them too. Received: "
                f"{type(optimizer).__name__}, with other ones. Train without shard_optimizer=True."
            )
        self._own = dict(zip(found, optimizer.variables, strict=True))
        shards: dict[int | None, list[int]] = {}
        for i, shard in enumerate(sharded.shards):
            shards.setdefault(shard.piece.variable, []).append(i)
        self._slots = {
            key: WholeSlot(
                slot, [(sharded.shards[i], self._own[i, key[1]]) for i in shards.get(key[0], [])]
            )
            for key, slot in expected.items()
            if key[0] is not None
        }
        self.variables = [self._slots.get(key) or self._own[key] for key in expected]

    def gather(self, communicator: Communicator, *, keep: bool) -> None:
        """Puts the slots together; all ranks call it.

        Args:
            communicator: of the ranks among which the optimizer is shared out.
            keep: whether this rank needs them.
        """
        for n in sorted(self._counts):
            values = [self._own[i, n] for i in range(len(self._sharded.shards))]

            def use(number: int, value: tf.Tensor, n: int = n) -> None:
                if keep:
                    self._slots[number, n].keep(value)

            self._sharded.gather(values, use, communicator=communicator)


def _tracked(
    copy: Any, owners: Sequence[int | None], shared: int
) -> dict[tuple[int | None, int], Any]:
    """The variables of a copy by their keys, with no more that are nobody's slots than given."""
    pairs = zip(numbered(owners), copy.variables, strict=True)
    return {key: v for key, v in pairs if key[0] is not None or key[1] < shared}


def whole_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer as if it were not sharded, to be assigned whole values."""
    if sharded_by(optimizer) is None:
        return list(optimizer.variables)
    return WholeState(optimizer).variables
