"""Turns some operations of a graph into a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.pipeline.stages.split_backward import Part
from tfdist._src.pipeline.stages.trace import Trace
from tfdist._src.xla import compiled_between_collectives


def make_function(
    trace: Trace,
    part: Part,
    name: str,
    accumulators: Mapping[str, Sequence[tf.Variable]],
    *,
    jit: bool = False,
) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that runs a part of a traced graph.

    Args:
        trace: the stage's trace.
        part: the operations with their feeds and fetches.
        name: the name shown in profiles.
        accumulators: for each of `part.sums`, by name, the variables to which it is added.
        jit: whether XLA compiles it.

    Returns:
        A function of tensors for `part.feeds`, in order, that returns those of `part.fetches` and
        one to wait for. Each call in a graph adds a single operation to it.
    """
    definition = _definition(trace, part)
    consumed = {name for op in part.operations for name in (t.name for t in op.inputs)}
    operations = part.operations

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        here = map(graph.capture, tensors)
        given = dict(zip((t.name for t in part.feeds), here, strict=True))
        results = [*part.fetches, *part.sums]
        for inner in sorted(consumed | {t.name for t in results}):
            if inner in trace.captured:
                given[inner] = graph.capture(trace.captured[inner])
        computed = [t for t in results if t.op in operations]
        imported = tf.graph_util.import_graph_def(
            definition,
            input_map={name: t for name, t in given.items() if name in consumed},
            return_elements=[t.name for t in computed],
            name="part",
        )
        given.update(zip((t.name for t in computed), imported or (), strict=True))
        added = [
            accumulator.assign_add(given[t.name], read_value=False)
            for t in part.sums
            for accumulator in accumulators[t.name]
        ]
        with tf.control_dependencies(added):
            return [*(_shaped(given[t.name], t) for t in part.fetches), tf.zeros([])]

    run.__name__ = name
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in part.feeds]
    # If inlined, it would be optimized again at every call site.
    function = tf.function(
        compiled_between_collectives(run) if jit else run,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    concrete = function.get_concrete_function(*specs)
    return lambda tensors: list(concrete(*tensors))


def _shaped(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    # The shape of some operations is known only in Python.
    result = tf.identity(tensor)
    result.set_shape(like.shape)
    return result


def _definition(trace: Trace, part: Part) -> tf.compat.v1.GraphDef:
    """The part's nodes, with the control dependencies between them."""
    names = {op.name for op in part.operations}
    whole = trace.graph.as_graph_def()
    definition = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    for node in whole.node:
        if node.name not in names:
            continue
        copy = definition.node.add()
        copy.CopyFrom(node)
        copy.attr.pop("_class", None)
        inputs = [i for i in copy.input if not i.startswith("^") or i[1:] in names]
        del copy.input[:]
        copy.input.extend(inputs)
    return definition
