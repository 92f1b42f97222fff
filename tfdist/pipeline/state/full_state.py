"""The values of a whole model and its optimizer, of which each worker of a pipeline holds some."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.internals.optimizer import blank_copy, forms, numbered
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.sharding.sharded import trained_by

_Key: TypeAlias = tuple[int | None, int]
"""Which of the model's trainable variables a slot belongs to, and the how manieth it is of its."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One value of the whole.

    Attributes:
        variable: of the whole model, or of the optimizer for the whole model.
        own: the variable, or `WholeSlot`, with the value on this worker; None where it is not.
        places: in the pipeline, of the workers that have the value.
    """

    variable: keras.Variable
    own: Any
    places: tuple[int, ...]

    def collect(self, strategy: HybridStrategy, to: Collection[int]) -> Any:
        """The value as an array; all workers of a pipeline call it together.

        Args:
            strategy: the pipeline's.
            to: the places that need the value; None may be returned at others.
        """
        if set(to) <= set(self.places):
            return None if self.own is None else tf.convert_to_tensor(self.own).numpy()
        with tf.device("CPU:0"):
            blank = tf.zeros(self.variable.shape, self.variable.dtype)
            value = blank if self.own is None else tf.convert_to_tensor(self.own)
        communicator: Any = strategy.pipeline_communicator
        return communicator.broadcast(value, self.places[0]).numpy()


class Places:
    """Which workers of a pipeline hold which variables.

    Args:
        partition: of the model.
        strategy: where its stages are.
    """

    def __init__(self, partition: Partition, strategy: HybridStrategy) -> None:
        self.mine = strategy.place
        self._of: dict[int, tuple[int, ...]] = {}
        for stage in partition.stages:
            place = strategy.rank_of(stage.index)
            for variable in stage.variables:
                before = self._of.get(id(variable), ())
                self._of[id(variable)] = tuple(dict.fromkeys((*before, place)))

    def of(self, variable: keras.Variable) -> tuple[int, ...]:
        """The places of those that hold a variable."""
        return self._of[id(variable)]

    def pieces(self, variables: Iterable[keras.Variable]) -> list[Piece]:
        """The values of some of the model's variables."""
        return [Piece(v, v if self.mine in self.of(v) else None, self.of(v)) for v in variables]


class FullOptimizer:
    """Tells which variable of an optimizer for the whole model this worker's optimizer has.

    Args:
        own: this worker's optimizer.
        trained: the variables of the whole model that are trained.
        places: where they are.
        built: whether the optimizer is built on the workers that train any of them.
        variables: those of this worker's optimizer, each of whole variables of the model.

    Attributes:
        optimizer: for the whole model; its variables have no values.

    Raises:
        ValueError: this worker's has been built for other variables, or has other slots than one
            that is made like it.
    """

    def __init__(
        self,
        own: Any,
        trained: Sequence[Any],
        places: Places,
        built: bool,
        variables: Sequence[Any],
    ) -> None:
        self._variables = list(variables)
        self._own, self._trained, self._places, self._built = own, trained, places, built
        here = [v for v in trained if places.mine in places.of(v)]
        # It may have been built in another order.
        order = trained_by(own) if own.built else here
        if {id(v) for v in order} != {id(v) for v in here}:
            raise ValueError(
                "The variables that an optimizer trains stay the same. Received: a model of which "
                "other layers are trainable than before. Compile it again."
            )
        self.optimizer, owners = blank_copy(own, trained if built else None)
        self._keys = numbered(owners)
        like, owners = blank_copy(own, order if built else None)
        numbers = {id(v): i for i, v in enumerate(trained)}
        keys = numbered(None if n is None else numbers[id(order[n])] for n in owners)
        self._positions = {key: i for i, key in enumerate(keys)}
        found, expected = forms(self._variables), forms(like.variables)
        shared = {key for key in keys if key[0] is None}
        if (here and own.built == built and found != expected) or not shared >= {
            key for key in self._keys if key[0] is None
        }:
            raise ValueError(
                "An optimizer that is made anew from its `get_config()` has the same variables, "
                f"named after the model's. Received: {type(own).__name__}, with other ones."
            )

    def pieces(self) -> list[Piece]:
        """The values of the variables of `optimizer`, in their order."""
        # A worker with nothing to train builds no optimizer and does not count its steps.
        trains = tuple(sorted({p for v in self._trained for p in self._places.of(v)})) or (0,)
        pieces = []
        for key, variable in zip(self._keys, self.optimizer.variables, strict=True):
            places = trains if key[0] is None else self._places.of(self._trained[key[0]])
            held = self._own.built == self._built and key in self._positions
            own = self._variables[self._positions[key]] if held else None
            pieces.append(Piece(variable, own, places))
        return pieces
