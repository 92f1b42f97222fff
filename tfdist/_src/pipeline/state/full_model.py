"""Methods of `PipelineModel` that concern the full model: files, weights and the summary.

A saved file is the same as if a single process had saved the model. To save a model, the workers
send their values to the chief, one variable after another, and Keras saves the full model on the
chief. To load a model, every worker calls Keras's method that loads the full model, but keeps only
the values of its own variables.
"""

import contextlib
import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.internals.optimizer import blank_copy, forms, numbered
from tfdist._src.internals.variables import (
    deferred_variables,
    free_value,
    has_value,
    set_value_on_cpu,
)
from tfdist._src.keras.saving.compression_files import load_state
from tfdist._src.keras.saving.files import PipelineModelBase
from tfdist._src.pipeline.partition.cut import Partition, summary
from tfdist._src.pipeline.partition.profiler import estimate
from tfdist._src.pipeline.placement.strategy import HybridStrategy, pipeline_extended_of
from tfdist._src.pipeline.runtime.channels import propagating_errors
from tfdist._src.sharding import FullState, full_variables, sharded_by, trained_by
from tfdist._src.strategy.extended import extended_of

_Key: TypeAlias = tuple[int | None, int]
"""Identifies an optimizer variable: the number of a trainable variable, and an index of its slots.

The number is None for variables that belong to no trainable variable, such as the step counter.
"""


@dataclasses.dataclass(frozen=True)
class StateEntry:
    """A variable in the state of the full model, and where its value is stored.

    Attributes:
        variable: a variable of the full model, or of the optimizer for the full model. It may have
            no value on this worker.
        local: the variable or `FullSlot` that stores the value on this worker; None if this worker
            does not store the value.
        ranks: the pipeline ranks that store the value.
    """

    variable: keras.Variable
    local: Any
    ranks: tuple[int, ...]

    def collect(self, strategy: HybridStrategy, to: Collection[int]) -> Any:
        """Returns the value as an array; all workers of a pipeline must call it together.

        Args:
            strategy: the pipeline's strategy.
            to: the pipeline ranks that need the value. On other ranks, the result may be None.
        """
        if set(to) <= set(self.ranks):
            return None if self.local is None else tf.convert_to_tensor(self.local).numpy()
        with tf.device("CPU:0"):
            blank = tf.zeros(self.variable.shape, self.variable.dtype)
            value = blank if self.local is None else tf.convert_to_tensor(self.local)
        communicator: Any = strategy.pipeline_communicator
        return communicator.broadcast(value, self.ranks[0]).numpy()


class Placement:
    """Determines which ranks of a pipeline hold which variables.

    Args:
        partition: the model's partition into stages.
        strategy: the strategy, which assigns the stages to ranks.
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
        """Returns the pipeline ranks that hold a given variable of the model."""
        return self._ranks[id(variable)]

    def entries(self, variables: Iterable[keras.Variable]) -> list[StateEntry]:
        """Returns the entries of some variables of the model."""
        return [
            StateEntry(v, v if self.pipeline_rank in self.ranks_of(v) else None, self.ranks_of(v))
            for v in variables
        ]


class FullOptimizer:
    """An optimizer for the full model, and how its variables correspond to this worker's optimizer.

    Args:
        own: this worker's optimizer, which is built for the variables of this worker's stages.
        trained: the trainable variables of the full model.
        placement: the placement of the model's variables on ranks.
        built: whether the optimizer is built on the workers with trainable variables. Workers
            without trainable variables never build their optimizers.
        variables: the variables of this worker's optimizer. If the optimizer is sharded, these are
            the full variables.

    Attributes:
        optimizer: the optimizer for the full model. Its variables have no values.

    Raises:
        ValueError: this worker's optimizer was built for other variables than the trainable
            variables of its stages, or an optimizer made from its config has other variables.
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
        # The optimizer may have been built with the same variables in another order.
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

    def entries(self) -> list[StateEntry]:
        """Returns the entries of all variables of `optimizer`, in order."""
        # A worker without trainable variables does not build its optimizer. So the values of shared
        # variables, such as the iteration count, are taken from the other workers.
        trains = tuple(sorted({p for v in self._trained for p in self._placement.ranks_of(v)})) or (
            0,
        )
        entries = []
        for key, variable in zip(self._keys, self.optimizer.variables, strict=True):
            ranks = trains if key[0] is None else self._placement.ranks_of(self._trained[key[0]])
            held = self._own.built == self._built and key in self._positions
            local = self._variables[self._positions[key]] if held else None
            entries.append(StateEntry(variable, local, ranks))
        return entries


def compile_arguments(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns positional and keyword arguments of `keras.Model.compile` by their names."""
    names = list(inspect.signature(keras.Model.compile).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Files:
    """Saves and loads a PipelineModel.

    Args:
        model: the ordinary model from which the PipelineModel was made.
        partition: the partition of this model into stages.
        strategy: the strategy, which assigns the stages to ranks.
    """

    def __init__(self, model: keras.Model, partition: Partition, strategy: HybridStrategy) -> None:
        self._model = model
        self._strategy = strategy
        self._placement = Placement(partition, strategy)
        # If the ordinary model is compiled, its variables include the variables of its metrics. No
        # stage uses these, so they are left out.
        held = {id(v) for stage in partition.stages for v in stage.variables}
        self._variables = [v for v in model.variables if id(v) in held]

    @contextlib.contextmanager
    def full_model(self, optimizer: Any, compiled: Mapping[str, Any]) -> Iterator[Any]:
        """Collects all values of the full model on the chief, within this context.

        All workers must enter this context together. At the end of the context, the chief frees the
        values that it received from other workers.

        Args:
            optimizer: this worker's optimizer; None if the model is not compiled.
            compiled: the arguments with which the model was compiled.

        Yields:
            The full model on the chief, and None on the other workers.
        """
        extended = pipeline_extended_of(self._strategy)
        group, mesh = extended.group, extended.mesh
        group.exchange("saving a PipelineModel, which all workers must do together", "")
        borrowed: list[Any] = []
        chiefs = group.topology.rank in mesh.pipeline_of(0)
        held = self._gather_optimizer(optimizer, keep=chiefs)
        try:
            # Only the chief's pipeline takes part, since it holds all values.
            if chiefs:
                entries = self._placement.entries(self._variables)
                if optimizer is not None:
                    entries += self._optimizer_entries(optimizer, held, compiled)
                for entry in entries:
                    value = self._collect(entry, [mesh.pipeline_rank_of(0)])
                    if group.topology.is_chief and not has_value(entry.variable):
                        set_value_on_cpu(entry.variable, value)
                        borrowed.append(entry.variable)
            yield self._model if group.topology.is_chief else None
        finally:
            for variable in borrowed:
                free_value(variable)
            self._model.optimizer = None

    def held(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the variables that this worker holds, with names that are unique in the model.

        A name contains the index of the variable in the full model, such as `"model/3"`, or its
        index in the optimizer for the full model, such as `"optimizer/3"`.

        Args:
            optimizer: this worker's optimizer; None if the model is not compiled.

        Returns:
            Two mappings from names to variables: one for the model, and one for the optimizer. In a
            sharded optimizer, a `FullSlot` takes the place of a variable.
        """
        entries = self._placement.entries(self._variables)
        slots = []
        if optimizer is not None:
            full = full_variables(optimizer)
            slots = self._full_optimizer(optimizer, optimizer.built, full).entries()
        return _local("model", entries), _local("optimizer", slots)

    def load(self, path: Any, optimizer: Any, **options: Any) -> bool:
        """Loads the values of this worker's variables from a file of the full model.

        Args:
            path: the file.
            optimizer: this worker's optimizer, or None. If the optimizer is built, its state is
                loaded as well.
            **options: options of `keras.Model.load_weights`.

        Returns:
            Whether the file contains a state for the optimizer.

        Raises:
            ValueError: the file was saved from another model. In this case, nothing is loaded.
        """
        return self._receive(path, optimizer, self._placement.entries(self._variables), options)

    def load_optimizer(self, path: Any, optimizer: Any) -> None:
        """Loads the state of this worker's optimizer from a file of the full model.

        Args:
            path: the file.
            optimizer: this worker's optimizer, which must be built.

        Raises:
            ValueError: the file has no state for an optimizer of this class. In this case, nothing
                is loaded.
        """
        with warnings.catch_warnings():
            # If the state cannot be loaded, Keras only warns. An error is raised below instead.
            warnings.simplefilter("ignore")
            taken = self._receive(path, optimizer, [], {})
        if not taken:
            raise ValueError(
                "The file must hold the state of an optimizer of the same class. Received: "
                f"{os.fspath(path)!r}, without a state for {type(optimizer).__name__}. Compile the "
                "model as it was when the file was saved, or start with a new optimizer."
            )

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Returns the weights of the full model; all workers must call it together."""
        everywhere = range(self._strategy.pipeline_size)
        entries = self._placement.entries(self._model.weights)
        return [self._collect(entry, everywhere) for entry in entries]

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Sets the values of this worker's variables, given the weights of the full model.

        Raises:
            ValueError: the number or the shapes of the weights differ from the model's weights. In
                this case, no value is set.
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
        for entry, value in zip(self._placement.entries(self._model.weights), weights, strict=True):
            if entry.local is not None:
                entry.local.assign(value)

    def _collect(self, entry: StateEntry, to: Collection[int]) -> Any:
        with propagating_errors(self._strategy):
            return entry.collect(self._strategy, to)

    def _gather_optimizer(self, optimizer: Any, *, keep: bool) -> list[Any]:
        """Returns the variables of this worker's optimizer.

        If the optimizer is sharded, the shards are first gathered into full variables, which all
        workers must do together.

        Args:
            optimizer: the optimizer, or None.
            keep: whether this worker needs the values of the gathered variables.
        """
        if sharded_by(optimizer) is None:
            return [] if optimizer is None else list(optimizer.variables)
        state = FullState(optimizer)
        extended = extended_of(self._strategy)
        with extended.group.naming_lost_workers():
            state.gather(extended.workers, keep=keep)
        return state.variables

    def _optimizer_entries(
        self, optimizer: Any, held: Sequence[Any], compiled: Mapping[str, Any]
    ) -> list[StateEntry]:
        # The optimizer of this worker may not be built although other workers have built theirs,
        # since a worker without trainable variables never builds its optimizer.
        built = max(self._exchange(optimizer.built))
        error: ValueError | None = None
        try:
            full_optimizer = self._full_optimizer(optimizer, bool(built), held)
        except ValueError as problem:
            error = problem
        # Report the error before raising it, since the other workers wait for this worker.
        failed = self._exchange(error is not None)
        if any(failed):
            raise error or ValueError(
                "All workers must be able to save their optimizers. Received: an error on pipeline "
                f"rank {failed.index(1)}. Its own error says what to do."
            )
        with deferred_variables():
            self._model.compile(**{**compiled, "optimizer": full_optimizer.optimizer})
        return full_optimizer.entries()

    def _full_optimizer(self, optimizer: Any, built: bool, held: Sequence[Any]) -> FullOptimizer:
        trained = self._model.trainable_variables
        return FullOptimizer(optimizer, trained, self._placement, built, held)

    def _exchange(self, flag: bool) -> list[int]:
        flags = self._strategy.pipeline_communicator.all_gather(tf.constant([int(flag)]))
        return [int(flag) for flag in flags]

    def _receive(
        self, path: Any, optimizer: Any, entries: list[StateEntry], options: Mapping[str, Any]
    ) -> bool:
        state = []
        if optimizer is not None:
            held = full_variables(optimizer)
            full_optimizer = self._full_optimizer(optimizer, optimizer.built, held)
            state = full_optimizer.entries()
            self._model.optimizer = full_optimizer.optimizer
        try:
            # Keras may create another optimizer for comparison. Its variables need no values, so
            # they are deferred.
            with deferred_variables(), _CapturedAssignments([*entries, *state]) as captured:
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
        captured.assign_to([*entries, *state])
        return any(id(entry.variable) in captured.assigned for entry in state)


def _local(prefix: str, entries: Sequence[StateEntry]) -> dict[str, Any]:
    return {f"{prefix}/{i}": e.local for i, e in enumerate(entries) if e.local is not None}


class _CapturedAssignments(keras.StatelessScope):  # type: ignore[misc]
    """Records the values that Keras assigns to variables, without changing the variables.

    Only the values of variables that this worker holds are kept.

    Args:
        entries: the entries of the full state.

    Attributes:
        assigned: the `id` of each variable to which Keras assigned a value, including variables
            that this worker does not hold.
    """

    def __init__(self, entries: Iterable[StateEntry]) -> None:
        super().__init__(initialize_variables=False)
        self._local = {id(entry.variable) for entry in entries if entry.local is not None}
        self.assigned: set[int] = set()

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records that a variable was assigned, and keeps the value if this worker needs it."""
        self.assigned.add(id(update[0]))
        if id(update[0]) in self._local:
            super().add_update(update)

    def assign_to(self, entries: Iterable[StateEntry]) -> None:
        """Assigns the recorded values to this worker's variables."""
        for entry in entries:
            value = self.get_current_value(entry.variable)
            if value is not None and entry.local is not None:
                entry.local.assign(value)


def _first_difference(shapes: list[tuple[int, ...]], weights: list[Any]) -> str:
    for shape, weight in zip(shapes, weights, strict=False):
        if shape != tuple(weight.shape):
            return f"{shape} where {weight.path!r} has {tuple(weight.shape)}"
    return "which are equal up to the end of the shorter list"


@dataclasses.dataclass
class UntrackedFields:
    """Fields of a `PipelineModel` that Keras must not track.

    If Keras tracked them, all layers of the full model would become layers of the PipelineModel.

    Attributes:
        full_model: the ordinary model from which the PipelineModel was made.
        partition: the partition of this model into stages.
        remat: whether each backward pass runs the stage's forward pass again, to save memory.
        files: the object that saves and loads the full model.
        by_time: whether the stages were chosen by the measured run time of the layers.
        compiled: the arguments with which the PipelineModel was compiled.
    """

    full_model: keras.Model
    partition: Partition
    remat: bool
    files: Files
    by_time: bool
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)


class FullModelMethods(PipelineModelBase, keras.Model):  # type: ignore[misc]
    """The methods of `PipelineModel` that concern the full model.

    Each worker holds only some of the stages. So all workers must call a method that collects
    values, such as `save` or `get_weights`.
    """

    _untracked: UntrackedFields

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self._untracked.partition

    def full_model(self) -> contextlib.AbstractContextManager[keras.Model | None]:
        """Yields the ordinary model with all values on the chief, and None on the other workers.

        All workers must call this method, since they send their values to the chief. The same is
        true of `save`, `save_weights` and `export`, which write the ordinary model to a file.

        Example:
            ```python
            with model.full_model() as full:
                if full is not None:
                    print(full.layers[0].get_weights())
            ```
        """
        optimizer = getattr(self, "optimizer", None)
        return self._untracked.files.full_model(optimizer, self._untracked.compiled)

    @property
    def holds_last_stage(self) -> bool:
        """Whether this worker computes the loss and the metrics."""
        strategy = self.distribute_strategy
        return bool(strategy.pipeline_rank_of(strategy.stages - 1) == strategy.pipeline_rank)

    @property
    def is_cut_by_time(self) -> bool:
        """Whether the stages were chosen by the run time of the layers, measured on the chief."""
        return self._untracked.by_time

    def held_variables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns this worker's weights and optimizer variables by name, for snapshots.

        The names contain the indices of the variables in the full model and in its optimizer. So
        all workers use the same name for the same variable.
        """
        return self._untracked.files.held(getattr(self, "optimizer", None))

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Loads the weights from a file of the full model, like `keras.Model.load_weights`.

        Each worker loads the weights of its own stages. The file may have been saved by any number
        of workers, or from the ordinary model in a single process. As in Keras, the state of the
        optimizer is loaded as well if the optimizer is already built. To build the optimizer and
        load its state, call `load_optimizer`.

        Args:
            filepath: a `.keras`, `.weights.h5` or other file that `keras.Model.load_weights`
                accepts.
            skip_mismatch: whether to skip a layer if the shapes of its weights differ from the
                shapes in the file.
            **kwargs: further arguments of `keras.Model.load_weights`.

        Raises:
            ValueError: the file was saved from another model.
        """
        options = {"skip_mismatch": skip_mismatch, **kwargs}
        if self._untracked.files.load(filepath, getattr(self, "optimizer", None), **options):
            load_state(self, filepath)

    def load_optimizer(self, filepath: Any) -> None:
        """Loads the state of the optimizer from a file of the full model, to resume training.

        All workers must call this method, after `compile`.

        Args:
            filepath: a file that `save` or `save_weights` wrote when the model was compiled. It may
                have been written by any number of workers, or by the ordinary model in a single
                process.

        Raises:
            ValueError: the file has no state for an optimizer of this class, or the model is not
                compiled.

        Example:
            ```python
            with strategy.scope():
                model = tfdist.PipelineModel(lambda: keras.models.load_model("model.keras"))
                model.compile("adam", "mse")
            model.load_optimizer("model.keras")
            ```
        """
        if getattr(self, "optimizer", None) is None:
            raise ValueError(
                "Loading an optimizer's state requires a compiled model. Received: a model without "
                "an optimizer. Call `compile` first."
            )
        if not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._untracked.files.load_optimizer(filepath, self.optimizer)
        load_state(self, filepath)

    def get_weights(self) -> list[Any]:
        """Returns the weights of the full model as arrays, on every worker.

        All workers must call this method.
        """
        return self._untracked.files.get_weights()

    def set_weights(self, weights: Any) -> None:
        """Sets the weights of this worker's stages.

        Args:
            weights: the weights of the full model, in the order of `get_weights`.

        Raises:
            ValueError: the number or the shapes of the weights differ from the model's weights.
        """
        self._untracked.files.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """Raises an error, since a PipelineModel cannot be recreated from a config.

        Use the config of the ordinary model instead; see `full_model`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "A PipelineModel has no config and cannot be cloned. Use the ordinary model's: `with "
            "model.full_model() as full`, on the chief."
        )

    def count_params(self) -> int:
        """Returns the number of scalar weights in the full model."""
        return int(self._untracked.full_model.count_params())

    def summary(self, *args: Any, print_fn: Callable[[str], Any] | None = None, **kw: Any) -> None:
        """Prints a summary of the ordinary model, and a table of the stages.

        The table shows each stage's share of the cost. If the stages were not chosen by run time,
        the shares are estimated from the parameter counts.
        """
        self._untracked.full_model.summary(*args, print_fn=print_fn, **kw)
        partition = self.partition
        seconds = partition.seconds or [c.seconds for c in estimate(partition.graph, rows=1)]
        (print_fn or print)("\n".join(summary(partition, seconds)))
