"""Times one call on synthetic data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.internals.keras import get_keras_mask, set_keras_mask
from tfdist._src.pipeline.partition.graph import Call

_REPEATS = 5
# Quick calls are repeated for this long, but at most this often.
_SECONDS, _MAX_REPEATS = 0.03, 100


@dataclasses.dataclass(frozen=True)
class Timing:
    """The duration and outputs of a call.

    Attributes:
        forward, both: seconds of the forward pass, and of forward and backward pass together.
        outputs: the specs of its outputs.
        masks: the specs of the masks on its inputs and outputs after the call; None for no mask.
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
    """Times a call in training mode.

    Args:
        call: the call. Its variables are replaced by synthetic values.
        specs: the specs of its inputs.
        masks: the specs of the masks on them.
        wanted: for each input, whether its gradient is computed.
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
    """The median of several runs, after a warm-up."""
    taken: list[float] = []
    run()
    tf.test.experimental.sync_devices()
    while len(taken) < _REPEATS or (sum(taken) < _SECONDS and len(taken) < _MAX_REPEATS):
        begin = time.perf_counter()
        run()
        # A GPU runs asynchronously.
        tf.test.experimental.sync_devices()
        taken.append(time.perf_counter() - begin)
    return median(taken)


def _synthesize(spec: tf.TensorSpec, rng: np.random.Generator) -> tf.Tensor:
    """Small positive numbers; zeros for what may be indices; masks that hide nothing."""
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return tf.cast(tf.constant(rng.uniform(0.01, 0.1, spec.shape), tf.float32), spec.dtype)
    if spec.dtype == tf.bool:
        return tf.ones(spec.shape, tf.bool)
    return tf.fill(spec.shape, "") if spec.dtype == tf.string else tf.zeros(spec.shape, spec.dtype)
