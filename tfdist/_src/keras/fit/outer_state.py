"""State that a step reads and that was created outside of the strategy's scope.

The strategy does not notice its assignments, but the graph of a step shows which variables it
captures. So samples of their values are compared among the workers from time to time.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.internals.graphs import captured_from, variables_read
from tfdist._src.internals.variables import spec_of_resource
from tfdist._src.strategy.commit_point import READS
from tfdist._src.xla.program import called_by


class OuterVariable:
    """A variable that a step captures, by its resource.

    Args:
        resource: its resource, which the step keeps.
        path: its name.
        spec: the type and shape of its value.
    """

    def __init__(self, resource: tf.Tensor, path: str, spec: tf.TensorSpec) -> None:
        self._resource = weakref.ref(resource)
        self.path, self._spec = path, spec

    def __repr__(self) -> str:
        return f"{self.path} {self._spec.dtype.name}{self._spec.shape}"

    @property
    def exists(self) -> bool:
        """Whether any step still captures it."""
        return self._resource() is not None

    @property
    def value(self) -> tf.Tensor:
        """Its value.

        Raises:
            tf.errors.FailedPreconditionError: it has none.
        """
        resource = self._resource()
        with tf.init_scope():
            value = tf.raw_ops.ReadVariableOp(resource=resource, dtype=self._spec.dtype)
            return tf.ensure_shape(value, self._spec.shape)


class OuterState:
    """The variables that the steps of a model read and that its strategy does not hold.

    Attributes:
        traces: how many steps have been traced.
    """

    def __init__(self) -> None:
        self._found: dict[int, OuterVariable] = {}
        self.traces = 0

    def note(self, graph: Any, outputs: Sequence[Any], own: set[int]) -> None:
        """Adds the variables of a step that has been traced.

        Args:
            graph: the graph of the step.
            outputs: its results.
            own: the identities of the resources that the strategy holds.
        """
        self.traces += 1
        names = {id(v.handle): v.name for v in variables_read(graph)}
        results = {id(output) for output in outputs}
        for outside, inside in graph.captures:
            resource = captured_from(outside)
            spec = None if tokens.is_token(resource) else spec_of_resource(resource)
            if spec is None or id(resource) in own or not _counts(inside, results):
                continue
            name = names.get(id(resource), "").removesuffix(":0") or "without a name"
            self._found[id(resource)] = OuterVariable(resource, name, spec)

    def variables(self) -> dict[str, OuterVariable]:
        """Those that have values, by names that are the same on workers with the same variables."""
        self._found = {key: one for key, one in self._found.items() if one.exists}
        readable = [one for one in self._found.values() if _is_readable(one)]
        alike = zlib.crc32(repr(readable).encode())
        return {f"outside {i} of {alike}": one for i, one in enumerate(readable)}


def outer_state_of(model: keras.Model) -> OuterState:
    """Returns the outer state of a model's steps."""
    return _known.setdefault(model, OuterState())


_known: weakref.WeakKeyDictionary[Any, OuterState] = weakref.WeakKeyDictionary()


def _is_readable(variable: OuterVariable) -> bool:
    try:
        return variable.value is not None
    except tf.errors.FailedPreconditionError:
        return False


def _counts(resource: tf.Tensor, results: set[int]) -> bool:
    """Whether a variable's value has an effect on the step's results or on other state.

    A counter that is only printed, or a metric that only one worker reads, may differ.

    Args:
        resource: the graph's placeholder for the variable.
        results: the identities of the graph's results.
    """
    pending = list(resource.consumers())
    seen: set[Any] = set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type not in READS and any(_is_other(t, resource, op) for t in op.inputs):
            return True
        if any(id(output) in results for output in op.outputs):
            return True
        pending += [consumer for output in op.outputs for consumer in output.consumers()]
    return False


def _is_other(tensor: tf.Tensor, resource: tf.Tensor, op: Any) -> bool:
    """Whether an operand of an operation is other state, which that may write."""
    if tensor.dtype != tf.resource or tensor is resource:
        return False
    # A function or conditional may only write a summary.
    return not called_by(op.node_def) or spec_of_resource(tensor) is not None
