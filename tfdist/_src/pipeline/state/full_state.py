"""The values of a full model and its optimizer, of which each worker of a pipeline holds some."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._src.internals.optimizer import blank_copy, forms, numbered
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.sharding.sharded import trained_by

_Key: TypeAlias = tuple[int | None, int]
"""A slot's model variable (its number among the trainable ones), and its index among its slots."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One value of the full state.

    Attributes:
        variable: a variable of the full model, or of the optimizer for the full model.
        local: the variable or `FullSlot` with the value on this worker; None if it has none.
        ranks: the pipeline ranks that hold the value.
    """

    variable: keras.Variable
    local: Any
    ranks: tuple[int, ...]

    def collect(self, strategy: HybridStrategy, to: Collection[int]) -> Any:
        """The value as an array; collective over the workers of a pipeline.

        Args:
            strategy: the pipeline's strategy.
            to: the pipeline ranks that need the value; the others may get None.
        """
        if set(to) <= set(self.ranks):
            return None if self.local is None else tf.convert_to_tensor(self.local).numpy()
        with tf.device("CPU:0"):
            blank = tf.zeros(self.variable.shape, self.variable.dtype)
            value = blank if self.local is None else tf.convert_to_tensor(self.local)
        communicator: Any = strategy.pipeline_communicator
        return communicator.broadcast(value, self.ranks[0]).numpy()


class Placement:
    """Which workers of a pipeline hold which variables.

    Args:
        partition: the model's partition.
        strategy: the strategy, which places the stages.
    """

    def __init__(self, partition: Partition, strategy: HybridStrategy) -> None:
        self.pipeline_rank = strategy.pipeline_rank
        self._ranks: dict[int, tuple[int, ...]] = {}
        for stage in partition.stages:
            rank = strategy.pipeline_rank_of(stage.index)
            for variable in stage.variables:
                before = self._ranks.get(id(variable), ())
                self._ranks[id(variable)] = tuple(dict.fromkeys((*before, rank)))

    def ranks_of(self, variable: keras.Variable) -> tuple[int, ...]:
        """The pipeline ranks that hold a variable."""
        return self._ranks[id(variable)]

    def pieces(self, variables: Iterable[keras.Variable]) -> list[Piece]:
        """The values of some of the model's variables."""
        return [
            Piece(v, v if self.pipeline_rank in self.ranks_of(v) else None, self.ranks_of(v))
            for v in variables
        ]


class FullOptimizer:
    """Maps the variables of an optimizer for the full model to those of this worker's optimizer.

    Args:
        own: this worker's optimizer.
        trained: the trainable variables of the full model.
        placement: the ranks that hold them.
        built: whether the optimizer is built on the workers that train any of them.
        variables: the variables of this worker's optimizer, unsharded.

    Attributes:
        optimizer: the optimizer for the full model; its variables have no values.

    Raises:
        ValueError: this worker's optimizer was built for other variables, or has other slots than
            a copy made from its config.
    """

    def __init__(
        self,
        own: Any,
        trained: Sequence[Any],
        placement: Placement,
        built: bool,
        variables: Sequence[Any],
    ) -> None:
        self._variables = list(variables)
        self._own, self._trained, self._placement, self._built = own, trained, placement, built
        here = [v for v in trained if placement.pipeline_rank in placement.ranks_of(v)]
        # The optimizer may have been built in another order.
        order = trained_by(own) if own.built else here
        if {id(v) for v in order} != {id(v) for v in here}:
            raise ValueError(
                "The variables that an optimizer trains must not change. Received: a model with "
                "other trainable layers than when the optimizer was built. Compile it again."
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
                "An optimizer recreated from its `get_config()` must have the same variables, "
                f"named after the model's. Received: {type(own).__name__}, with different ones."
            )

    def pieces(self) -> list[Piece]:
        """The values of the variables of `optimizer`, in order."""
        # A worker with nothing to train does not build its optimizer and counts no steps.
        trains = tuple(sorted({p for v in self._trained for p in self._placement.ranks_of(v)})) or (
            0,
        )
        pieces = []
        for key, variable in zip(self._keys, self.optimizer.variables, strict=True):
            ranks = trains if key[0] is None else self._placement.ranks_of(self._trained[key[0]])
            held = self._own.built == self._built and key in self._positions
            local = self._variables[self._positions[key]] if held else None
            pieces.append(Piece(variable, local, ranks))
        return pieces
