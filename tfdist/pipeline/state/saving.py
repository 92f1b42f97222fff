"""Saving and loading of a model in stages, as the ordinary model that it is made of.

The file is the one that a single process would write. For saving, the workers send what they hold
to the chief, variable by variable, and Keras saves the whole model there. For loading, each worker
lets Keras load the whole model and keeps what is its own.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.internals.variables import deferred_variables, has_value, lend_value, take_value
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.runtime.error_propagation import propagating_errors
from tfdist.pipeline.state.full_state import FullOptimizer, Piece, Places
from tfdist.sharding.full_state import WholeState, whole_variables
from tfdist.sharding.sharded import sharded_by


def compile_arguments(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is compiled with, by name."""
    names = list(inspect.signature(keras.Model.compile).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Files:
    """What a model in stages is saved to and loaded from.

    Args:
        whole: the ordinary model.
        partition: its stages.
        strategy: where they are.
    """

    def __init__(self, whole: keras.Model, partition: Partition, strategy: HybridStrategy) -> None:
        self._whole = whole
        self._strategy = strategy
        self._places = Places(partition, strategy)
        # Those of metrics, if it has been compiled, are no part of it.
        held = {id(v) for stage in partition.stages for v in stage.variables}
        self._variables = [v for v in whole.variables if id(v) in held]

    @contextlib.contextmanager
    def gathered(self, optimizer: Any, compiled: Mapping[str, Any]) -> Iterator[Any]:
        """The whole model with all its values, on the chief, while it lasts; all workers call it.

        Args:
            optimizer: this worker's; None for a model that is not compiled.
            compiled: what the model is compiled with.

        Returns:
            The model; None on all workers but the chief.
        """
        group, mesh = self._strategy.extended.group, self._strategy.extended.mesh
        group.exchange("saving a model in stages, which all workers do together", "")
        lent: list[Any] = []
        chiefs = group.topology.rank in mesh.pipeline_of(0)
        held = self._gather_shares(optimizer, keep=chiefs)
        try:
            # The chief's pipeline has it all.
            if chiefs:
                pieces = self._places.pieces(self._variables)
                if optimizer is not None:
                    pieces += self._optimizer_pieces(optimizer, held, compiled)
                for piece in pieces:
                    value = self._collect(piece, [mesh.place_of(0)])
                    if group.topology.is_chief and not has_value(piece.variable):
                        lend_value(piece.variable, value)
                        lent.append(piece.variable)
            yield self._whole if group.topology.is_chief else None
        finally:
            for variable in lent:
                take_value(variable)
            self._whole.optimizer = None

    def load(self, path: Any, optimizer: Any, **options: Any) -> bool:
        """Takes this worker's values from a file of the whole model.

        Args:
            path: the file.
            optimizer: this worker's, whose state is taken where it is built; or None.
            **options: of `keras.Model.load_weights`.

        Returns:
            Whether the file has the optimizer's state.

        Raises:
            ValueError: the file is another model's; nothing is taken.
        """
        return self._receive(path, optimizer, self._places.pieces(self._variables), options)

    def load_optimizer(self, path: Any, optimizer: Any) -> None:
        """Takes the state of this worker's optimizer, which is built, from a file.

        Raises:
            ValueError: the file has none of such an optimizer; nothing is taken.
        """
        with warnings.catch_warnings():
            # Keras warns of what is an error here.
            warnings.simplefilter("ignore")
            taken = self._receive(path, optimizer, [], {})
        if not taken:
            raise ValueError(
                "An optimizer's state belongs to an optimizer of the same kind. Received: "
                f"{os.fspath(path)!r}, without a state for {type(optimizer).__name__}. Compile the "
                "model as it was when the file was saved, or begin with a new optimizer."
            )

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """The weights of the whole model; all workers call it together."""
        everywhere = range(self._strategy.pipeline_size)
        pieces = self._places.pieces(self._whole.weights)
        return [self._collect(piece, everywhere) for piece in pieces]

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Takes this worker's values from the weights of the whole model.

        Raises:
            ValueError: they are another model's; nothing is taken.
        """
        weights = list(weights)
        shapes = [tuple(np.shape(value)) for value in weights]
        if shapes != [tuple(v.shape) for v in self._whole.weights]:
            raise ValueError(
                "The weights are those of the whole model, in the order of `get_weights()`. "
                f"Received: {len(weights)} arrays for the {len(self._whole.weights)} weights of "
                f"{self._whole.name!r}, of shapes {_first_difference(shapes, self._whole.weights)}."
                " Take them from `get_weights()` of a model of the same layers."
            )
        for piece, value in zip(self._places.pieces(self._whole.weights), weights, strict=True):
            if piece.own is not None:
                piece.own.assign(value)

    def _collect(self, piece: Piece, to: Collection[int]) -> Any:
        with propagating_errors(self._strategy, self._strategy.abort):
            return piece.collect(self._strategy, to)

    def _gather_shares(self, optimizer: Any, *, keep: bool) -> list[Any]:
        """The variables of this worker's optimizer, whole where the workers beside share it out."""
        if sharded_by(optimizer) is None:
            return [] if optimizer is None else list(optimizer.variables)
        state = WholeState(optimizer)
        extended = self._strategy.extended
        with extended.group.naming_lost_workers():
            state.gather(extended.workers, keep=keep)
        return state.variables

    def _optimizer_pieces(
        self, optimizer: Any, held: Sequence[Any], compiled: Mapping[str, Any]
    ) -> list[Piece]:
        # A worker with nothing to train never builds its own.
        built = max(self._exchange(optimizer.built))
        error: ValueError | None = None
        try:
            whole_optimizer = self._whole_optimizer(optimizer, bool(built), held)
        except ValueError as problem:
            error = problem
        # Otherwise the others would wait for one that has failed.
        failed = self._exchange(error is not None)
        if any(failed):
            raise error or ValueError(
                "All workers can save their optimizers, or none does. Received: an error at place "
                f"{failed.index(1)} of the pipeline, which says there what to do."
            )
        with deferred_variables():
            self._whole.compile(**{**compiled, "optimizer": whole_optimizer.optimizer})
        return whole_optimizer.pieces()

    def _whole_optimizer(self, optimizer: Any, built: bool, held: Sequence[Any]) -> FullOptimizer:
        trained = self._whole.trainable_variables
        return FullOptimizer(optimizer, trained, self._places, built, held)

    def _exchange(self, flag: bool) -> list[int]:
        flags = self._strategy.pipeline_communicator.all_gather(tf.constant([int(flag)]))
        return [int(flag) for flag in flags]

    def _receive(
        self, path: Any, optimizer: Any, pieces: list[Piece], options: Mapping[str, Any]
    ) -> bool:
        state = []
        if optimizer is not None:
            held = whole_variables(optimizer)
            whole_optimizer = self._whole_optimizer(optimizer, optimizer.built, held)
            state = whole_optimizer.pieces()
            self._whole.optimizer = whole_optimizer.optimizer
        try:
            # Keras makes an optimizer of its own to compare with.
            with deferred_variables(), _Receiving([*pieces, *state]) as received:
                self._whole.load_weights(path, **options)
        except ValueError as error:
            lines = [line for line in str(error).splitlines() if line]
            reason = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
            raise ValueError(
                "A file of weights belongs to a model of the same layers. Received: "
                f"{os.fspath(path)!r} for {self._whole.name!r}: {reason} "
                "Load the file that was saved of this model, or pass `skip_mismatch=True`."
            ) from error
        finally:
            self._whole.optimizer = None
        received.keep([*pieces, *state])
        return any(id(piece.variable) in received.offered for piece in state)


class _Receiving(keras.StatelessScope):  # type: ignore[misc]
    """What is assigned while it lasts reaches no variable; what is this worker's is noted.

    Args:
        pieces: of the whole.

    Attributes:
        offered: the ids of all variables that were assigned to.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(initialize_variables=False)
        self._own = {id(piece.variable) for piece in pieces if piece.own is not None}
        self.offered: set[int] = set()

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Notes a value, unless it is another worker's."""
        self.offered.add(id(update[0]))
        if id(update[0]) in self._own:
            super().add_update(update)

    def keep(self, pieces: Iterable[Piece]) -> None:
        """Gives pieces the values that they got."""
        for piece in pieces:
            value = self.get_current_value(piece.variable)
            if value is not None and piece.own is not None:
                piece.own.assign(value)


def _first_difference(shapes: list[tuple[int, ...]], weights: list[Any]) -> str:
    for shape, weight in zip(shapes, weights, strict=False):
        if shape != tuple(weight.shape):
            return f"{shape} where {weight.path!r} has {tuple(weight.shape)}"
    return "that agree as far as they go"
