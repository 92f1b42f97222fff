"""A training step that counts on this worker, or leaves no trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collective import step_ops
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.sharding.sharded import sharded_optimizers
from tfdist.strategies.commit_point import Writes, find_writes
from tfdist.trainer.optimizers.late_update import TooEarlyError

Compiled = Callable[[Any, bool], Any]


def applies(strategy: tf.distribute.Strategy) -> bool:
    """Whether steps under a strategy can fail because of other workers."""
    extended = strategy.extended
    return extended.worker_count > 1 and isinstance(extended.workers, NativeCommunicator)


class AtomicStep:
    """Runs a model's step, eagerly or in a graph, between its begin and its commit.

    Args:
        model: the model.
        compile_step: makes the compiled step, which updates variables late if it is told so; see
            `late_update`. Its arguments are a batch, and whether its shapes are fixed.
    """

    def __init__(self, model: keras.Model, compile_step: Callable[[bool], Compiled]) -> None:
        self._model = model
        self._compile = compile_step
        self._step = compile_step(True)
        self._writes: weakref.WeakKeyDictionary[Any, Writes] = weakref.WeakKeyDictionary()

    def __call__(self, batch: Any, fixed: bool) -> Any:
        if self._model.run_eagerly:
            kept, complete = self._all_variables(), True
        else:
            kept, complete = self._traced(batch, fixed)
        before = [step_ops.begins(complete=complete)]
        with tf.control_dependencies(_in_graph(before)):
            before += step_ops.keep(kept)
        with tf.control_dependencies(_in_graph(before)):
            results = self._step(batch, fixed)
        with tf.control_dependencies(_in_graph(tf.nest.flatten(results, expand_composites=True))):
            commits = step_ops.commits()
        # What comes after it, such as the next step of a loop, waits for it.
        with tf.control_dependencies(_in_graph([commits])):
            return tf.nest.map_structure(tf.identity, results, expand_composites=True)

    def _traced(self, batch: Any, fixed: bool) -> tuple[Sequence[tf.Tensor], bool]:
        """Traces the step.

        Returns:
            The resources of the variables to keep, and whether it writes no others.
        """
        try:
            concrete = self._step.get_concrete_function(batch, fixed)  # type: ignore[attr-defined]
        except TooEarlyError:
            self._step = self._compile(False)
            concrete = self._step.get_concrete_function(batch, fixed)  # type: ignore[attr-defined]
        if concrete not in self._writes:
            self._writes[concrete] = find_writes(concrete.graph.as_graph_def())
        writes = self._writes[concrete]
        captured = ((inside.op.name, outside) for outside, inside in concrete.graph.captures)
        return [outside for name, outside in captured if name in writes.kept], not writes.gated

    def _all_variables(self) -> list[tf.Tensor]:
        """The resources of all variables that an eager step may write."""
        extended = self._model.distribute_strategy.extended
        if self._model.built and not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        values = [variable.value for variable in self._model.variables]
        values += extended.variables
        for optimizer in sharded_optimizers():
            values += [variable.value for variable in optimizer.variables]
        if extended.compressor is not None:
            values += extended.compressor.variables
        copies = [copy for value in values for copy in getattr(value, "values", [value])]
        return list({id(copy.handle): copy.handle for copy in copies}.values())


def _in_graph(operations: Sequence[Any]) -> list[Any]:
    return [] if tf.executing_eagerly() else list(operations)
