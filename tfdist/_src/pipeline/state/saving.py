"""Saving and loading of a PipelineModel, in the format of the ordinary model.

The file is the one that a single process would write. To save, the workers send their values to
the chief, variable by variable, where Keras saves the full model. To load, each worker has Keras
load the full model and keeps only its part.
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

from tfdist._src.internals.variables import (
    deferred_variables,
    free_value,
    has_value,
    set_value_on_cpu,
)
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.error_propagation import propagating_errors
from tfdist._src.pipeline.state.full_state import FullOptimizer, Piece, Placement
from tfdist._src.sharding.full_state import FullState, full_variables
from tfdist._src.sharding.sharded import sharded_by


def compile_arguments(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `keras.Model.compile`, by name."""
    names = list(inspect.signature(keras.Model.compile).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Files:
    """Saves and loads a PipelineModel.

    Args:
        model: the ordinary model.
        partition: its partition into stages.
        strategy: the strategy, which places the stages.
    """

    def __init__(self, model: keras.Model, partition: Partition, strategy: HybridStrategy) -> None:
        self._model = model
        self._strategy = strategy
        self._placement = Placement(partition, strategy)
        # Without the metrics' variables, which a compiled model has too.
        held = {id(v) for stage in partition.stages for v in stage.variables}
        self._variables = [v for v in model.variables if id(v) in held]

    @contextlib.contextmanager
    def full_model(self, optimizer: Any, compiled: Mapping[str, Any]) -> Iterator[Any]:
        """The full model, with all its values on the chief; collective over all workers.

        The values of other workers are freed at the end of the context.

        Args:
            optimizer: this worker's optimizer; None for a model that is not compiled.
            compiled: the arguments that the model was compiled with.

        Yields:
            The full model on the chief, None elsewhere.
        """
        group, mesh = self._strategy.extended.group, self._strategy.extended.mesh
        group.exchange("saving a PipelineModel, which all workers must do together", "")
        borrowed: list[Any] = []
        chiefs = group.topology.rank in mesh.pipeline_of(0)
        held = self._gather_optimizer(optimizer, keep=chiefs)
        try:
            # The chief's pipeline holds all values.
            if chiefs:
                pieces = self._placement.pieces(self._variables)
                if optimizer is not None:
                    pieces += self._optimizer_pieces(optimizer, held, compiled)
                for piece in pieces:
                    value = self._collect(piece, [mesh.pipeline_rank_of(0)])
                    if group.topology.is_chief and not has_value(piece.variable):
                        set_value_on_cpu(piece.variable, value)
                        borrowed.append(piece.variable)
            yield self._model if group.topology.is_chief else None
        finally:
            for variable in borrowed:
                free_value(variable)
            self._model.optimizer = None

    def held(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """This worker's variables, named by their numbers in the full model and its optimizer.

        Args:
            optimizer: this worker's optimizer; None for a model that is not compiled.

        Returns:
            Those of the model, and those of the optimizer: a variable or a `FullSlot` by name.
        """
        pieces = self._placement.pieces(self._variables)
        slots = []
        if optimizer is not None:
            full = full_variables(optimizer)
            slots = self._full_optimizer(optimizer, optimizer.built, full).pieces()
        return _local("model", pieces), _local("optimizer", slots)

    def load(self, path: Any, optimizer: Any, **options: Any) -> bool:
        """Loads this worker's values from a file of the full model.

        Args:
            path: the file.
            optimizer: this worker's optimizer, whose state is loaded if it is built; or None.
            **options: options of `keras.Model.load_weights`.

        Returns:
            Whether the file contains the optimizer's state.

        Raises:
            ValueError: the file is from another model; nothing is loaded.
        """
        return self._receive(path, optimizer, self._placement.pieces(self._variables), options)

    def load_optimizer(self, path: Any, optimizer: Any) -> None:
        """Loads the state of this worker's optimizer, which must be built, from a file.

        Raises:
            ValueError: the file has no state for such an optimizer; nothing is loaded.
        """
        with warnings.catch_warnings():
            # Keras warns about what is an error here.
            warnings.simplefilter("ignore")
            taken = self._receive(path, optimizer, [], {})
        if not taken:
            raise ValueError(
                "The file must hold the state of an optimizer of the same class. Received: "
                f"{os.fspath(path)!r}, without a state for {type(optimizer).__name__}. Compile the "
                "model as it was when the file was saved, or start with a new optimizer."
            )

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """The weights of the full model; collective over all workers."""
        everywhere = range(self._strategy.pipeline_size)
        pieces = self._placement.pieces(self._model.weights)
        return [self._collect(piece, everywhere) for piece in pieces]

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Sets this worker's values from the weights of the full model.

        Raises:
            ValueError: the weights do not match the model; nothing is set.
        """
        weights = list(weights)
        shapes = [tuple(np.shape(value)) for value in weights]
        if shapes != [tuple(v.shape) for v in self._model.weights]:
            raise ValueError(
                "The weights must be those of the full model, in the order of `get_weights()`. "
                f"Received: {len(weights)} arrays for the {len(self._model.weights)} weights of "
                f"{self._model.name!r}, of shapes {_first_difference(shapes, self._model.weights)}."
                " Use the `get_weights()` of a model with the same layers."
            )
        for piece, value in zip(self._placement.pieces(self._model.weights), weights, strict=True):
            if piece.local is not None:
                piece.local.assign(value)

    def _collect(self, piece: Piece, to: Collection[int]) -> Any:
        with propagating_errors(self._strategy):
            return piece.collect(self._strategy, to)

    def _gather_optimizer(self, optimizer: Any, *, keep: bool) -> list[Any]:
        """The variables of this worker's optimizer, unsharded."""
        if sharded_by(optimizer) is None:
            return [] if optimizer is None else list(optimizer.variables)
        state = FullState(optimizer)
        extended = self._strategy.extended
        with extended.group.naming_lost_workers():
            state.gather(extended.workers, keep=keep)
        return state.variables

    def _optimizer_pieces(
        self, optimizer: Any, held: Sequence[Any], compiled: Mapping[str, Any]
    ) -> list[Piece]:
        # A worker with nothing to train never builds its optimizer.
        built = max(self._exchange(optimizer.built))
        error: ValueError | None = None
        try:
            full_optimizer = self._full_optimizer(optimizer, bool(built), held)
        except ValueError as problem:
            error = problem
        # Exchanged before raising, as the other workers would wait for this one.
        failed = self._exchange(error is not None)
        if any(failed):
            raise error or ValueError(
                "All workers must be able to save their optimizers. Received: an error on pipeline "
                f"rank {failed.index(1)}. Its own error says what to do."
            )
        with deferred_variables():
            self._model.compile(**{**compiled, "optimizer": full_optimizer.optimizer})
        return full_optimizer.pieces()

    def _full_optimizer(self, optimizer: Any, built: bool, held: Sequence[Any]) -> FullOptimizer:
        trained = self._model.trainable_variables
        return FullOptimizer(optimizer, trained, self._placement, built, held)

    def _exchange(self, flag: bool) -> list[int]:
        flags = self._strategy.pipeline_communicator.all_gather(tf.constant([int(flag)]))
        return [int(flag) for flag in flags]

    def _receive(
        self, path: Any, optimizer: Any, pieces: list[Piece], options: Mapping[str, Any]
    ) -> bool:
        state = []
        if optimizer is not None:
            held = full_variables(optimizer)
            full_optimizer = self._full_optimizer(optimizer, optimizer.built, held)
            state = full_optimizer.pieces()
            self._model.optimizer = full_optimizer.optimizer
        try:
            # Keras creates another optimizer to compare with.
            with deferred_variables(), _CapturedAssignments([*pieces, *state]) as captured:
                self._model.load_weights(path, **options)
        except ValueError as error:
            lines = [line for line in str(error).splitlines() if line]
            reason = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
            raise ValueError(
                "A weights file must be from a model with the same layers. Received: "
                f"{os.fspath(path)!r} for {self._model.name!r}: {reason} "
                "Load a file saved from this model, or pass `skip_mismatch=True`."
            ) from error
        finally:
            self._model.optimizer = None
        captured.assign_to([*pieces, *state])
        return any(id(piece.variable) in captured.assigned for piece in state)


def _local(prefix: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    return {f"{prefix}/{i}": p.local for i, p in enumerate(pieces) if p.local is not None}


class _CapturedAssignments(keras.StatelessScope):  # type: ignore[misc]
    """Captures assignments to this worker's pieces; within it, no variable changes.

    Args:
        pieces: the values of the full state.

    Attributes:
        assigned: the ids of all variables that were assigned to.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(initialize_variables=False)
        self._local = {id(piece.variable) for piece in pieces if piece.local is not None}
        self.assigned: set[int] = set()

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Captures a value if this worker holds it."""
        self.assigned.add(id(update[0]))
        if id(update[0]) in self._local:
            super().add_update(update)

    def assign_to(self, pieces: Iterable[Piece]) -> None:
        """Assigns the captured values to this worker's variables."""
        for piece in pieces:
            value = self.get_current_value(piece.variable)
            if value is not None and piece.local is not None:
                piece.local.assign(value)


def _first_difference(shapes: list[tuple[int, ...]], weights: list[Any]) -> str:
    for shape, weight in zip(shapes, weights, strict=False):
        if shape != tuple(weight.shape):
            return f"{shape} where {weight.path!r} has {tuple(weight.shape)}"
    return "that agree up to the shorter list's end"
