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

    def __init__(self, model: keras.Model, compile_step: Callable[[bool], Any]) -> None:
        self._model = model
        self._extended = model.distribute_strategy.extended
        self._compile = compile_step
        # The update of one of several devices does not wait for what the others communicate.
        self._step = compile_step(len(self._extended.worker_devices) == 1)
        self._writes: weakref.WeakKeyDictionary[Any, Writes] = weakref.WeakKeyDictionary()

    def __call__(self, batch: Any, fixed: bool) -> Any:
        run = self._eagerly if self._model.run_eagerly else self._in_graph
        return run(batch, fixed)

    def _eagerly(self, batch: Any, fixed: bool) -> Any:
        variables = self._all_variables()
        step_ops.begins(complete=True)
        step_ops.keep(list({id(v.handle): v.handle for v in variables}.values()))
        known = {id(variable) for variable in self._extended.variables}
        try:
            results = self._step(batch, fixed)
        except BaseException:
            # Nobody knows the values that a layer has been built with in this very step.
            new = {id(variable) for variable in self._extended.variables} - known
            self._extended.progress.torn |= bool(new)
            raise
        step_ops.commits()
        return results

    def _in_graph(self, batch: Any, fixed: bool) -> Any:
        kept, complete = self._traced(batch, fixed)
        begins = step_ops.begins(complete=complete)
        # If this is called eagerly, its operations run in order anyway.
        eager = tf.executing_eagerly()
        with tf.control_dependencies([] if eager else [begins]):
            keep = step_ops.keep(kept)
        with tf.control_dependencies([] if eager else [begins, *keep]):
            results = self._step(batch, fixed)
        flat = tf.nest.flatten(results, expand_composites=True)
        with tf.control_dependencies([] if eager else flat):
            commits = step_ops.commits()
        if eager:
            return results
        # What comes after it, such as the next step of a loop, waits for it.
        with tf.control_dependencies([commits]):
            return tf.nest.map_structure(tf.identity, results, expand_composites=True)

    def _traced(self, batch: Any, fixed: bool) -> tuple[Sequence[tf.Tensor], bool]:
        """Traces the step.

        Returns:
            The resources of the variables to keep, and whether it writes no others.
        """
        try:
            concrete = self._step.get_concrete_function(batch, fixed)
        except TooEarlyError:
            self._step = self._compile(False)
            concrete = self._step.get_concrete_function(batch, fixed)
        captured = [(i.op.name, o) for o, i in concrete.graph.captures if o.dtype == tf.resource]
        if concrete not in self._writes:
            try:
                self._writes[concrete] = find_writes(concrete.graph.as_graph_def())
            except ValueError:  # too large for a message
                names = frozenset(name for name, _ in captured)
                self._writes[concrete] = Writes(names, gated=False)
        writes = self._writes[concrete]
        return [outside for name, outside in captured if name in writes.kept], not writes.gated

    def _all_variables(self) -> list[Any]:
        """The copies of all variables that an eager step may write."""
        optimizer = self._model.optimizer
        if self._model.built and not getattr(optimizer, "built", True):
            optimizer.build(self._model.trainable_variables)
        values = [variable.value for variable in self._model.variables]
        values += self._extended.variables
        for sharded in sharded_optimizers():
            values += [variable.value for variable in sharded.variables]
        if self._extended.compressor is not None:
            values += self._extended.compressor.variables
        return [copy for value in values for copy in getattr(value, "values", [value])]
