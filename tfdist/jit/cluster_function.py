"""A cluster as a function that XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.jit.noise import replacement
from tfdist.jit.program import Program
from tfdist.jit.tracing import is_has_rows


class Cluster:
    """The operations of a cluster, with what they take and what they give.

    Args:
        program: the program.
        operations: its operations that are compiled together, in order.
        is_used: whether something outside uses a tensor.

    Attributes:
        feeds: the tensors that it takes.
        resources: the variables' resources that it takes.
        fetches: the tensors that it gives.
    """

    def __init__(
        self, program: Program, operations: Sequence[Any], is_used: Callable[[tf.Tensor], bool]
    ) -> None:
        self._program, self._operations = program, operations
        inside = {*operations, *program.constant}
        taken = {t.ref(): t for op in operations for t in op.inputs if t.op not in inside}
        self.feeds = [t for t in taken.values() if t.dtype != tf.resource]
        self.resources = [t for t in taken.values() if t.dtype == tf.resource]
        self.fetches = [t for op in operations for t in op.outputs if is_used(t)]
        sources = (*operations, *(t.op for t in self.feeds))
        self._rows = {op: np.array(True) for op in sources if is_has_rows(op)}

    @property
    def varies(self) -> bool:
        """Whether it depends on the number of rows, by the shapes of what it takes or otherwise."""
        shapes_known = all(t.shape.is_fully_defined() for t in self.feeds)
        return not shapes_known or bool(self._rows)

    def make_function(
        self, name: str, resources: Sequence[tf.Tensor], *, jit: bool
    ) -> Callable[..., list[tf.Tensor]]:
        """Makes the function.

        Args:
            name: the name shown in profiles.
            resources: the values of `resources`.
            jit: whether XLA compiles it.

        Returns:
            A function of the values of `feeds` that returns those of `fetches` and one to wait for.
        """

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            given = {t.name: value for t, value in zip(self.feeds, tensors, strict=True)}
            for inner, resource in zip(self.resources, resources, strict=True):
                given[inner.name] = graph.capture(resource)
            ends = self._add_to_graph(given, jit)
            with tf.control_dependencies(ends):
                return [*(tf.identity(given[t.name]) for t in self.fetches), tf.zeros([])]

        run.__name__ = name
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.feeds]
        function = tf.function(run, autograph=False, jit_compile=jit or None)
        concrete = function.get_concrete_function(*specs)
        return lambda *tensors: list(concrete(*tensors))

    def _add_to_graph(self, given: dict[str, tf.Tensor], jit: bool) -> list[Any]:
        """Adds the operations to the default graph.

        Args:
            given: the values of what they take, by name; those that they compute are added.

        Returns:
            Those without a result.
        """
        rows = self._rows if jit else {}
        ends: list[Any] = []
        part: list[Any] = []
        for op in self._operations:
            draw = replacement(op) if jit else None
            if draw is None:
                part.append(op)
                continue
            ends += add_operations(self._program, part, given, rows)
            part = []
            constant = [t for t in op.inputs if t.op in self._program.constant]
            add_operations(self._program, [], given, rows, constant)
            given[op.outputs[0].name] = draw(*(given[t.name] for t in op.inputs))
        ends += add_operations(self._program, part, given, rows)
        return [op for op in ends if not op.outputs]


def add_operations(
    program: Program,
    operations: Sequence[Any],
    given: dict[str, tf.Tensor],
    values: Mapping[Any, Any] = {},
    constants: Sequence[tf.Tensor] = (),
) -> list[Any]:
    """Adds operations of a program to the default graph.

    Args:
        program: the program.
        operations: its operations, in order.
        given: the values of the tensors that they take, by name; what they compute is added.
        values: see `Program.definition`.
        constants: results of constant operations, which are added as well.

    Returns:
        The operations that were added, in the same order.
    """
    inside = {*operations, *values}
    wanted = [t for op in operations for t in op.outputs]
    definition = program.definition([*operations, *(t.op for t in constants)], dict(values))
    taken = {
        t.name: given[t.name]
        for op in operations
        for t in op.inputs
        if t.op not in inside and t.op not in program.constant
    }
    names = [*(t.name for t in (*wanted, *constants)), *(op.name for op in operations)]
    if not names:
        return []
    made = tf.graph_util.import_graph_def(
        definition, input_map=taken, return_elements=names, name="c"
    )
    for tensor, value in zip((*wanted, *constants), made, strict=False):
        value.set_shape(tensor.shape)
        given[tensor.name] = value
    return list(made[len(wanted) + len(constants) :])
