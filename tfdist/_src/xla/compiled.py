"""A function whose operations XLA compiles, but for the collectives among them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.internals.graphs import captured_from, keep_functions, trace_for_xla
from tfdist._src.xla.program import has_shape
from tfdist._src.xla.rebuild import Rebuilt
from tfdist.errors import NativeUnavailableError


def compiled_between_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has XLA compile what a function computes between its collectives.

    Args:
        function: called while a `tf.function` is traced.

    Returns:
        A function of the same arguments and results.
    """

    def run(*arguments: Any) -> Any:
        outer = tf.compat.v1.get_default_graph()
        graph = trace_for_xla(lambda: function(*arguments))
        keep_functions(outer, graph)
        structure = graph.structured_outputs
        flat = tf.nest.flatten(structure, expand_composites=True)
        given = {inside.name: outer.capture(outside) for outside, inside in graph.captures}
        own = {inside.name for outside, inside in graph.captures if _is_own(outside)}
        tensors = [t for t in flat if isinstance(t, tf.Tensor)]
        results = iter(Rebuilt(graph, tensors, given, _fits(given), own=own).add())
        flat = [next(results) if isinstance(t, tf.Tensor) else t for t in flat]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return run


def _is_own(tensor: tf.Tensor) -> bool:
    """Whether a tensor is of a step's data, rather than computed before by the program."""
    return has_shape(tensor) and bool(tf.is_symbolic_tensor(captured_from(tensor)))


def _fits(given: dict[str, tf.Tensor]) -> tf.Tensor | None:
    """Whether clusters are compiled for the shapes of this step's tensors.

    Returns:
        A bool scalar; None if all shapes are static, or if the native library is missing.
    """
    tensors = [t for t in given.values() if has_shape(t)]
    varying = [t for t in tensors if not t.shape.is_fully_defined()]
    if not varying:
        return None
    try:
        ops = native.load_ops()
    except NativeUnavailableError:
        return None
    host = str(tf.config.list_logical_devices("CPU")[0].name)
    shapes = [tf.shape(t, tf.int64) for t in varying]  # where they are
    with tf.device(host):
        return ops.tfdist_shapes_fit(order=_order(host), shapes=shapes)


@functools.cache
def _order(host: str) -> tf.Tensor:
    return tokens.make(host, tf.float32)
