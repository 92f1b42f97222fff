"""Measures or estimates the time that each call of a model takes."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.internals.keras import get_keras_mask, set_keras_mask, unchanged_state
from tfdist._src.pipeline.partition.graph import Call, Graph, Key, Placeholder, Spec
from tfdist.errors import PartitionError

ASSUMED_SIZE = 64
"""The assumed size of an unknown dimension other than the rows."""


def concrete(spec: Spec, rows: int) -> tuple[int, ...]:
    """Returns the shape that a value has with a given number of rows."""
    return tuple(ASSUMED_SIZE if size is None else size for size in spec.with_rows(rows).shape)


def bytes_of(spec: Spec, rows: int) -> int:
    """Returns the size in bytes that a value has with a given number of rows."""
    return math.prod(concrete(spec, rows)) * _item_bytes(spec.dtype)


def count(variables: Iterable[keras.Variable]) -> int:
    """Returns the total number of elements of some variables."""
    return sum(math.prod(v.shape) for v in variables)


def variable_bytes(variable: keras.Variable) -> int:
    """Returns the size of a variable in bytes."""
    return count([variable]) * _item_bytes(variable.dtype)


def _item_bytes(dtype: str) -> int:
    size: int = tf.as_dtype(dtype).size
    return size


# The speed of the hypothetical processor for which `estimate` computes times: multiply-adds per
# second, and bytes per second that are read from or written to memory.
_MULTIPLICATIONS = 1e10
_BYTES = 1e10


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The cost of a call on one microbatch.

    Attributes:
        forward: the time of the forward pass in seconds.
        backward: the time of the backward pass in seconds.
        parameters: the number of elements in the weights of the called layer. If a layer is called
            several times, each of its calls has the full number.
        parameter_bytes: the size in bytes of all variables that the call uses.
        output_bytes: the size in bytes of the call's outputs.
    """

    forward: float
    backward: float
    parameters: int
    parameter_bytes: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """The total time of the forward and backward pass in seconds."""
        return self.forward + self.backward


def cost_of(graph: Graph, call: Call, rows: int, forward: float, backward: float) -> CallCost:
    """Returns the cost of a call, given the times of its forward and backward pass."""
    return CallCost(
        forward,
        backward,
        parameters=0 if call.layer is None else count(call.layer.weights),
        parameter_bytes=sum(map(variable_bytes, call.variables)),
        output_bytes=sum(bytes_of(graph.specs[key], rows) for key in call.outputs),
    )


def estimate(graph: Graph, rows: int) -> list[CallCost]:
    """Estimates the costs of calls from the sizes of their variables and values.

    All processes get the same estimates, since nothing is measured. The times are estimates for a
    hypothetical processor of fixed speed. In the forward pass, each element of a matrix or kernel
    is assumed to be multiplied once for every row and every position (such as a pixel or a token).
    The backward pass is assumed to take twice as long. Embeddings cost no multiplications, since
    their elements are only looked up.

    Args:
        graph: the model.
        rows: the number of rows in a microbatch.
    """
    costs = []
    for call in graph.calls:
        values = [graph.specs[key] for key in (*call.inputs, *call.outputs)]
        moved = sum(bytes_of(spec, rows) for spec in values) / _BYTES
        forward = _multiplications(graph, call, rows) / _MULTIPLICATIONS + moved
        costs.append(cost_of(graph, call, rows, forward, 2 * forward))
    return costs


def _multiplications(graph: Graph, call: Call, rows: int) -> int:
    inputs = [graph.specs[key] for key in call.inputs]
    if not any(spec.is_floating for spec in inputs):
        return 0  # Layers with only integer inputs, such as embeddings, look up values.
    # The positions are the elements along all axes except the last axis, which holds the features.
    specs = (*inputs, *(graph.specs[key] for key in call.outputs))
    positions = max(math.prod(concrete(spec, rows)[:-1]) for spec in specs)
    return positions * count(v for v in call.variables if len(v.shape) > 1)


_REPEATS = 5
# A fast call is repeated until `_SECONDS` have passed, but at most `_MAX_REPEATS` times.
_SECONDS, _MAX_REPEATS = 0.03, 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measured times and the outputs of a call.

    Attributes:
        forward: the time of the forward pass in seconds.
        both: the total time of the forward and backward pass in seconds.
        outputs: the specs of the call's outputs.
        masks: the specs of the masks of the inputs and then of the outputs, after the call. The
            spec of a value without a mask is None.
    """

    forward: float
    both: float
    outputs: tuple[tf.TensorSpec, ...]
    masks: tuple[tf.TensorSpec | None, ...]


def time_call(
    call: Call,
    specs: Sequence[tf.TensorSpec],
    masks: Sequence[tf.TensorSpec | None],
    wanted: Sequence[bool],
) -> Timing:
    """Measures the time of a call in training mode.

    The call's inputs and variables are replaced with synthetic values.

    Args:
        call: the call.
        specs: the specs of the call's inputs.
        masks: for each input, the spec of its mask, or None if it has no mask.
        wanted: for each input, whether to compute its gradient.
    """
    variables = call.variables

    def forward(values: Any, masks: Any, weights: Any) -> Any:
        inputs = dict(zip(call.inputs, values, strict=True))
        for value, mask in zip(values, masks, strict=True):
            if mask is not None:
                set_keras_mask(value, mask)
        state = list(zip(variables, weights, strict=True))
        with keras.StatelessScope(state, initialize_variables=False):
            outputs = list(call(inputs, training=True).values())
        return outputs, [get_keras_mask(value) for value in (*values, *outputs)]

    def both(values: Any, masks: Any, weights: Any) -> Any:
        trained = [w for w, v in zip(weights, variables, strict=True) if v.trainable]
        watched = [v for v, is_wanted in zip(values, wanted, strict=True) if is_wanted]
        sources = [t for t in (*watched, *trained) if t.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs, _ = forward(values, masks, weights)
        floats = [value for value in outputs if value.dtype.is_floating]
        return outputs, tape.gradient(floats, sources) if floats and sources else []

    rng = np.random.default_rng(0)
    arguments = (
        [_synthesize(spec, rng) for spec in specs],
        [mask if mask is None else _synthesize(mask, rng) for mask in masks],
        [_synthesize(tf.TensorSpec(v.shape, v.dtype), rng) for v in variables],
    )
    run, run_both = (tf.function(f, autograph=False) for f in (forward, both))
    outputs, after = run(*arguments)
    return Timing(
        seconds_of(lambda: run(*arguments)),
        seconds_of(lambda: run_both(*arguments)),
        outputs=tuple(map(tf.TensorSpec.from_tensor, outputs)),
        masks=tuple(mask if mask is None else tf.TensorSpec.from_tensor(mask) for mask in after),
    )


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns the median time of several runs in seconds, after one warm-up run."""
    taken: list[float] = []
    run()
    tf.test.experimental.sync_devices()
    while len(taken) < _REPEATS or (sum(taken) < _SECONDS and len(taken) < _MAX_REPEATS):
        begin = time.perf_counter()
        run()
        # Wait for the GPU, since it runs operations asynchronously.
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - begin)
    return median(taken)


def _synthesize(spec: tf.TensorSpec, rng: np.random.Generator) -> tf.Tensor:
    """Makes a tensor of synthetic values.

    Floats are small and positive, integers are 0 so that they are valid indices, strings are
    empty, and booleans are True so that masks keep all entries.
    """
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return tf.cast(tf.constant(rng.uniform(0.01, 0.1, spec.shape), tf.float32), spec.dtype)
    if spec.dtype == tf.bool:
        return tf.ones(spec.shape, tf.bool)
    return tf.fill(spec.shape, "") if spec.dtype == tf.string else tf.zeros(spec.shape, spec.dtype)


def equivalence(call: Call) -> Hashable:
    """Returns a key that is equal for calls that take the same time on equally shaped inputs.

    Two calls have the same key if they apply the same function to their inputs and variables: the
    classes and configs of their operations, their non-tensor arguments, and the shapes, dtypes and
    `trainable` flags of their variables must be equal.
    """
    positions = {key: n for n, key in enumerate(call.inputs)}

    def position(argument: Any) -> Any:
        return (
            Placeholder(positions[argument.key]) if isinstance(argument, Placeholder) else argument
        )

    arguments = keras.tree.map_structure(position, (call.args, dict(call.kwargs)))
    variables = tuple((tuple(v.shape), v.dtype, v.trainable) for v in call.variables)
    return type(call.operation), _config(call.operation), repr(arguments), variables


def _config(operation: keras.Operation) -> Hashable:
    if isinstance(operation, keras.layers.Lambda):
        return id(operation)  # Two functions with the same code may capture different values.
    try:
        return json.dumps(_without_names(operation.get_config()), sort_keys=True, default=repr)
    except Exception:  # The config of a custom layer may not be serializable.
        return id(operation)


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(k): _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(value) for value in config]
    return config


def measure(graph: Graph, rows: int) -> list[CallCost]:
    """Measures the time of the forward and backward pass of each call on synthetic data.

    If several calls run equal layers on inputs of equal shapes, only one of them is measured. The
    model's variables are neither read nor written, so they need not have values. Instead, each call
    uses synthetic values, which are freed before the next call. The states of random generators do
    not change.

    Args:
        graph: the model.
        rows: the number of rows in a microbatch.

    Returns:
        The costs, in the order of the calls. Each process would measure different times, so one
        process should measure them and send the `seconds` of all costs to the others.

    Raises:
        PartitionError: a call fails on synthetic data.
    """
    with unchanged_state():
        return _Profiler(graph, rows).run()


class _Profiler:
    """Measures the calls of a model in order, so that the shapes of their inputs are known."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self._graph, self._rows = graph, rows
        self._specs: dict[Key, tf.TensorSpec] = {}
        self._masks: dict[Key, tf.TensorSpec | None] = {}
        self._timings: dict[Hashable, Timing] = {}
        idle, something = tf.function(tf.identity), tf.zeros([1])
        self._overhead = seconds_of(lambda: idle(something))

    def run(self) -> list[CallCost]:
        for key in self._graph.inputs:
            spec = self._graph.specs[key]
            self._specs[key] = tf.TensorSpec(concrete(spec, self._rows), spec.dtype)
        return [self._cost(call) for call in self._graph.calls]

    def _cost(self, call: Call) -> CallCost:
        timing = self._timing(call)
        self._specs.update(zip(call.outputs, timing.outputs, strict=True))
        self._masks.update(zip((*call.inputs, *call.outputs), timing.masks, strict=True))
        forward = max(timing.forward - self._overhead, 0.0)
        backward = max(timing.both - timing.forward, 0.0)
        return cost_of(self._graph, call, self._rows, forward, backward)

    def _timing(self, call: Call) -> Timing:
        specs = tuple(self._specs[key] for key in call.inputs)
        masks = tuple(self._masks.get(key) for key in call.inputs)
        # Training computes no gradients with respect to the model's inputs.
        wanted = tuple(key not in self._graph.inputs for key in call.inputs)
        name = (equivalence(call), specs, masks, wanted)
        if name not in self._timings:
            try:
                self._timings[name] = time_call(call, specs, masks, wanted)
            except Exception as error:
                raise PartitionError(
                    "To be timed, a call must run on synthetic data. Received: "
                    f"{type(error).__name__} from '{call.name}'. Use balance=\"parameters\" or "
                    "cuts=[...], which run nothing."
                ) from error
        return self._timings[name]
