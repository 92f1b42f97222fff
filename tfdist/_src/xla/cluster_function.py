"""Makes the function that XLA compiles for a cluster, with the same random numbers as TensorFlow.

XLA and TensorFlow draw the same bits from a key and a counter (Philox), but convert them to numbers
differently. A compiled step must give the same result as a step that is not compiled, so this
module reproduces TensorFlow's conversion with operations.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.internals.graphs import in_xla_context, mark_what_is_only_read, marking_operations
from tfdist._src.xla.program import TracedProgram

_UNCOMPILED = "_tfdist_left_out"
_HAS_ROWS = "TfdistHasRows"


def is_compiled_here() -> bool:
    """Whether XLA will compile the operations that are added to the default graph."""
    return not tf.executing_eagerly() and in_xla_context()


@contextlib.contextmanager
def uncompiled_scope() -> Iterator[None]:
    """Excludes the operations that are added to the default graph in this context from compilation.

    Use this context for results that must be bit-identical on workers with different programs. If
    XLA compiled them, their rounding would depend on the rest of the program.
    """
    with contextlib.nullcontext() if tf.executing_eagerly() else marking_operations(_UNCOMPILED):
        yield


def is_uncompiled(operation: Any) -> bool:
    """Whether an operation was added within `uncompiled_scope`."""
    return _UNCOMPILED in operation.node_def.attr


def or_zeros(condition: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors if a condition is true, otherwise zeros.

    Each result waits only for its own tensor. Outside of XLA, a single conditional selects all
    tensors without copying them. XLA fuses the selection of each tensor with adjacent operations.
    """
    if not values:
        return []
    if is_compiled_here():
        return [tf.where(condition, v, tf.zeros([], v.dtype)) for v in values]
    chosen = tf.cond(condition, lambda: list(values), lambda: [tf.zeros_like(v) for v in values])
    for value, result in zip(values, chosen, strict=True):
        result.set_shape(value.shape)
    return list(chosen)


def has_rows(rows: tf.Tensor) -> tf.Tensor:
    """Whether a replica has rows.

    In a compiled cluster, this is the constant True: the cluster runs only if there are rows.

    Args:
        rows: the number of rows.

    Returns:
        A bool scalar.
    """
    return tf.identity(rows > 0, name=_HAS_ROWS)


def is_has_rows(operation: Any) -> bool:
    """Whether an operation was added by `has_rows`."""
    name = str(operation.name).rpartition("/")[2]
    return operation.type == "Identity" and name.partition("_")[0] == _HAS_ROWS


_PHILOX, _AUTO = 1, 3
# Operation types that start with a prefix in `_OTHERS`, although XLA draws the same numbers.
_SAME = (
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetAlg",
)
_CONTROL = ("StatelessIf", "StatelessWhile", "StatelessCase")
# Prefixes of operation types for which XLA would draw other random numbers than TensorFlow.
_OTHERS = ("Random", "Stateless", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")
# For each float type: the integer type of the same size, the mantissa's mask, and the bits of 1.0.
_LAYOUTS = {
    tf.float16: (tf.uint16, 0x3FF, 0x3C00),
    tf.bfloat16: (tf.uint16, 0x7F, 0x3F80),
    tf.float32: (tf.uint32, 0x7FFFFF, 0x3F800000),
}


def draws_other_numbers(operation: Any) -> bool:
    """Whether XLA would draw other numbers than TensorFlow, and `replacement` cannot prevent it."""
    if operation.type in _REPLACED:
        return operation.get_attr("dtype") not in _REPLACED_TYPES or not _is_philox(operation)
    return is_random(operation.type)


def is_random(kind: str) -> bool:
    """Whether XLA would draw other random numbers than TensorFlow for an operation type."""
    return kind.startswith(_OTHERS) and kind not in (*_SAME, *_CONTROL)


def replacement(operation: Any) -> Callable[..., tf.Tensor] | None:
    """Returns a function that replaces an operation that draws random numbers, if XLA compiles it.

    The function takes the inputs of the operation, and draws the same numbers as TensorFlow.
    Returns None if no replacement exists for the operation's type.
    """
    draw = _REPLACED.get(operation.type)
    if draw is None:
        return None
    dtype = operation.get_attr("dtype")
    return lambda shape, key, counter, algorithm: draw(shape, key, counter, dtype)


def _uniform(shape: Any, key: Any, counter: Any, dtype: tf.DType) -> tf.Tensor:
    """Draws numbers like `UniformDistribution`: random bits are the mantissa of 1 + the number."""
    integers, mantissa, one = _LAYOUTS[dtype]
    drawn = _bits(shape, key, counter)
    bits = tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(drawn, mantissa), one)
    return tf.bitcast(tf.cast(bits, integers), dtype) - 1


def _normal(shape: Any, key: Any, counter: Any, dtype: tf.DType) -> tf.Tensor:
    """Draws numbers like `NormalDistribution`, by Box and Muller's transform of uniform numbers."""
    count = tf.reduce_prod(shape)
    pairs = (count + 1) // 2
    uniform = tf.reshape(_uniform([2 * pairs], key, counter, tf.float32), [pairs, 2])
    radius = tf.sqrt(-2 * tf.math.log(tf.maximum(uniform[:, 0], 1e-7)))
    angle = 2 * math.pi * uniform[:, 1]
    numbers = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(numbers, [-1])[:count], shape), dtype)


def _bits(shape: Any, key: Any, counter: Any) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )


def _is_philox(operation: Any) -> bool:
    source = operation.inputs[3].op
    if source.type == "StatelessRandomGetAlg":  # This is Philox on CPUs and GPUs.
        return True
    return tf.get_static_value(operation.inputs[3]) in (_PHILOX, _AUTO)


_REPLACED = {"StatelessRandomUniformV2": _uniform, "StatelessRandomNormalV2": _normal}
_REPLACED_TYPES = frozenset(_LAYOUTS)


class Cluster:
    """The operations of a cluster, with their inputs and outputs.

    Args:
        program: the program.
        operations: the operations to compile together, in order.
        is_used: returns whether an operation outside of the cluster uses a tensor.

    Attributes:
        feeds: the tensors that the cluster takes as inputs, except for resources.
        resources: the resources of variables that the cluster takes as inputs.
        fetches: the tensors that the cluster returns.
    """

    def __init__(
        self,
        program: TracedProgram,
        operations: Sequence[Any],
        is_used: Callable[[tf.Tensor], bool],
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
        """Whether the cluster depends on the number of rows, by input shapes or by `has_rows`."""
        shapes_known = all(t.shape.is_fully_defined() for t in self.feeds)
        return not shapes_known or bool(self._rows)

    def call(
        self,
        name: str,
        resources: Sequence[tf.Tensor],
        tensors: Sequence[tf.Tensor],
        fits: tf.Tensor | None,
    ) -> list[tf.Tensor]:
        """Adds a call of the cluster to the default graph.

        Args:
            name: the name of the function in profiles.
            resources: the values of the attribute `resources`.
            tensors: the values of the attribute `feeds`.
            fits: whether to run the compiled function in this step, a bool scalar; None to never
                run it. This is ignored unless the cluster `varies`.

        Returns:
            The values of `fetches`, and a tensor to wait for.
        """
        if not self.varies or fits is None:
            return list(self._function(name, resources, jit=not self.varies)(*tensors))
        compiled = self._function(name, resources, jit=True)
        plain = self._function(name, resources, jit=False)
        if self._program.device_of(self._operations[0]).startswith("GPU"):
            # `tf.cond` lowers its `If`. Without lowering, `If` would not support a GPU's integers,
            # which TensorFlow keeps in host memory.
            return list(tf.cond(fits, lambda: compiled(*tensors), lambda: plain(*tensors)))
        # `tf.cond` would add an operation for each tensor, which takes several µs.
        branches = _calling(compiled), _calling(plain)
        results = tf.raw_ops.If(
            cond=fits,
            input=[*tensors, *branches[0].captured_inputs],
            Tout=[t.dtype for t in compiled.outputs],
            then_branch=branches[0],
            else_branch=branches[1],
        )
        mark_what_is_only_read(results[0].op, (branches[0].graph, branches[1].graph))
        return list(results)

    def _function(self, name: str, resources: Sequence[tf.Tensor], *, jit: bool) -> Any:
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
        if jit:
            function = tf.function(run, autograph=False, jit_compile=True)
        else:
            # TensorFlow optimizes this function separately, and so chooses the same operations as
            # in a step without XLA.
            function = tf.function(
                run, autograph=False, experimental_attributes={"_noinline": True}
            )
        return function.get_concrete_function(*specs)

    def _add_to_graph(self, given: dict[str, tf.Tensor], jit: bool) -> list[Any]:
        """Adds the operations to the default graph.

        Args:
            given: maps names to the values of the operations' inputs. This method adds the
                operations' results to the map.
            jit: whether XLA compiles the function.

        Returns:
            The added operations that have no results.
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


def _calling(function: Any) -> Any:
    """Wraps a function in one that only calls it, so that the function's attributes take effect."""
    specs = [
        tf.TensorSpec(t.shape, t.dtype)
        for t in function.inputs[: -len(function.captured_inputs) or None]
    ]
    return tf.function(lambda *tensors: function(*tensors), autograph=False).get_concrete_function(
        *specs
    )


def add_operations(
    program: TracedProgram,
    operations: Sequence[Any],
    given: dict[str, tf.Tensor],
    values: Mapping[Any, Any] = {},
    constants: Sequence[tf.Tensor] = (),
) -> list[Any]:
    """Adds operations of a program to the default graph.

    Args:
        program: the program.
        operations: the operations of the program to add, in order.
        given: maps names to the values of the operations' inputs. This function adds the
            operations' results to the map.
        values: see `TracedProgram.definition`.
        constants: the results of constant operations that are also needed.

    Returns:
        The added operations, in the same order.
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
