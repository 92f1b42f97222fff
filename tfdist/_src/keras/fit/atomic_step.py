"""Runs a training step so that this worker either commits it or undoes it.

If a step fails, for example because another worker has died, the variables that the step has
written get back their earlier values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.internals.tensorflow import initialized, traced
from tfdist._src.keras.optimizers.gradient_sync import DeferralTrial
from tfdist._src.sharding import sharded_by, sharded_optimizers
from tfdist._src.strategy.commit_point import GraphWrites, find_writes
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import UnsupportedError


def applies(strategy: tf.distribute.Strategy) -> bool:
    """Whether a step under this strategy can fail because another worker fails."""
    extended = extended_of(strategy)
    if extended.in_stages:
        return bool(extended.process_count > 1)
    return isinstance(extended.workers, CoreCommunicator)


class AtomicStep:
    """Runs the steps of a model as transactions, eagerly or in a graph.

    Values that must be restored after a failure are kept before each step runs. They are discarded
    when the step is committed.

    Args:
        model: the model.
        compile_step: returns the compiled step. If it is called with a `DeferralTrial`, the step
            defers its optimizer update to the end.
        scratch: returns the variables that hold valid values only during a step. Their values are
            not kept.
        confirm: communicates among all workers, after this worker has made all writes of the step.
            If this communication fails here but succeeds on another worker, the other worker
            commits the step, and this worker can redo its writes. None if this worker never needs
            to redo a step.
    """

    def __init__(
        self,
        model: keras.Model,
        compile_step: Callable[[DeferralTrial | None], Any],
        scratch: Callable[[], Iterable[Any]] = tuple,
        confirm: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        self._model = model
        self._extended = extended_of(model.distribute_strategy)
        self._compile = compile_step
        self._scratch, self._confirm = scratch, confirm
        # With several devices per worker, updates are not deferred, because the update on one
        # device would not wait for the communication of the other devices.
        self._trial = DeferralTrial() if len(self._extended.worker_devices) == 1 else None
        self._step = compile_step(self._trial)
        self._writes: weakref.WeakKeyDictionary[Any, GraphWrites] = weakref.WeakKeyDictionary()

    def __call__(self, *arguments: Any) -> Any:
        run = self._eagerly if self._model.run_eagerly else self._in_graph
        return run(*arguments)

    def trace_and_check_deferral(self, *arguments: Any) -> bool:
        """Traces the step for these arguments, and returns whether the step defers its update."""
        self._trace(*arguments)
        return self._trial is not None

    def update_in_place(self) -> None:
        """Makes later traces apply the update where Keras does, not at the end of the step."""
        if self._trial is not None:
            self._trial = None
            self._step = self._compile(None)

    def _eagerly(self, *arguments: Any) -> Any:
        variables = self._all_variables()
        tokens.begins(complete=True)
        tokens.keep(list({id(v.handle): v.handle for v in variables}.values()))
        known = {id(variable) for variable in self._extended.variables}
        try:
            results = self._step(*arguments)
        except BaseException:
            # If the failed step has created variables, for example by building a layer, their
            # initial values are unknown, so the step cannot be undone completely.
            new = {id(variable) for variable in self._extended.variables} - known
            self._extended.progress.torn |= bool(new)
            raise
        tokens.commits()
        return results

    def _in_graph(self, *arguments: Any) -> Any:
        trace = self._trace(*arguments)
        begins = tokens.begins(complete=trace.complete)
        # In eager mode, operations run in program order, so control dependencies are not needed.
        eager = tf.executing_eagerly()
        with tf.control_dependencies([] if eager else [begins]):
            keep = tokens.keep(trace.kept)
        with tf.control_dependencies([] if eager else [begins, *keep]):
            results = trace.run(*arguments)
        flat = tf.nest.flatten(results, expand_composites=True)
        last = flat
        if self._confirm is not None:
            with tf.control_dependencies([] if eager else flat):
                prepares = tokens.prepares(trace.kept)
            with tf.control_dependencies([] if eager else prepares):
                last = [self._confirm()]
        with tf.control_dependencies([] if eager else last):
            commits = tokens.commits()
        if eager:
            return results
        # If steps run in a `tf.while_loop`, the next step needs all results of this step. One of
        # the results depends on the commit, so the next step waits for the commit.
        with tf.control_dependencies([commits]):
            flat[-1] = tf.identity(flat[-1])
        return tf.nest.pack_sequence_as(results, flat, expand_composites=True)

    def _trace(self, *arguments: Any) -> _Trace:
        first = None
        try:
            concrete, first = traced(self._step, *arguments)
        except Exception:
            if self._trial is None or not self._trial.fails:
                raise
        if self._trial is not None and self._trial.fails:
            if first is not None:
                raise UnsupportedError(
                    "A step that reads variables updated by its optimizer cannot create a "
                    "variable from a computed value. Received: the `train_step` of "
                    f"{self._model.name!r}, which does both. Create the variable before the first "
                    "step."
                )
            self.update_in_place()
            concrete, first = traced(self._step, *arguments)
        step = self._step
        scratch = {id(variable.handle) for variable in self._scratch()}
        if first is not None:
            resources = {id(o): o for f in (concrete, first) for o in _resources(f).values()}
            return _Trace(
                lambda *given: tf.cond(
                    initialized(step), lambda: step(*given), lambda: first(*given)
                ),
                [resource for key, resource in resources.items() if key not in scratch],
                complete=True,
            )
        if self._confirm is not None:
            resources = {id(o): o for o in _resources(concrete).values() if id(o) not in scratch}
            return _Trace(step, list(resources.values()), complete=True)
        if concrete not in self._writes:
            self._writes[concrete] = _writes_of(concrete)
        writes = self._writes[concrete]
        kept = [outside for name, outside in _resources(concrete).items() if name in writes.kept]
        kept = [outside for outside in kept if id(outside) not in scratch]
        return _Trace(step, kept, complete=not writes.gated)

    def _all_variables(self) -> list[Any]:
        """Returns this worker's copies of all variables that an eager step may write."""
        optimizer = self._model.optimizer
        if self._model.built and not getattr(optimizer, "built", True):
            optimizer.build(self._model.trainable_variables)
        values = [variable.value for variable in self._model.variables]
        values += self._extended.variables
        for optimizer in sharded_optimizers():
            values += [variable.value for variable in optimizer.variables]
            sharded = sharded_by(optimizer)
            if sharded is not None and sharded.copies is not None:
                values += sharded.copies.variables
        if self._extended.compressor is not None:
            values += self._extended.compressor.variables
        return [copy for value in values for copy in getattr(value, "values", [value])]


@dataclass(frozen=True)
class _Trace:
    """A traced step.

    Attributes:
        run: runs the step, given its arguments.
        kept: the resource handles of the variables that must be restored if the step fails.
        complete: whether `kept` contains all variables that the step writes. If not, the step
            writes the remaining variables after its commit point, so they need not be restored.
    """

    run: Callable[..., Any]
    kept: Sequence[tf.Tensor]
    complete: bool


def _resources(concrete: Any) -> dict[str, tf.Tensor]:
    """Returns the resource handles that a function captures, by the names of their placeholders."""
    captures = concrete.graph.captures
    return {inside.op.name: out for out, inside in captures if out.dtype == tf.resource}


def _writes_of(concrete: Any) -> GraphWrites:
    try:
        return find_writes(concrete.graph.as_graph_def())
    except ValueError:  # The graph is too large for a protobuf message.
        return GraphWrites(frozenset(_resources(concrete)), gated=False)
