"""Keras's private names: what `tfdist.trainer` replaces, and how a model's graph is read."""

from __future__ import annotations

import contextlib
import random as python_random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

if keras.backend.backend() != "tensorflow":
    raise RuntimeError(
        "tfdist needs Keras on its TensorFlow backend. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow import random
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer as TensorFlowOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as losses
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional, operation_fn
from keras.src.models.model import Model
from keras.src.models.sequential import Sequential
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.trainer import Trainer
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.autograph.impl import api as autograph

__all__ = [
    "BaseOptimizer",
    "Functional",
    "LossScaleOptimizer",
    "Model",
    "Sequential",
    "TFEpochIterator",
    "TensorFlowOptimizer",
    "TensorFlowTrainer",
    "Trainer",
    "Variable",
    "backup_path",
    "build_by_spec",
    "call_with_training",
    "checkpoint_path",
    "compiled_loss_of",
    "compiled_metrics_of",
    "compute_output_spec",
    "data_adapters",
    "dataset_of",
    "dropout_shape",
    "get_keras_mask",
    "graph_of",
    "in_callers_state",
    "is_transparent",
    "legacy_h5_format",
    "loss_function_of",
    "loss_tracker_of",
    "losses",
    "made_under",
    "metrics_of",
    "nodes_of",
    "own_losses",
    "random",
    "saving_lib",
    "seed_for_draw",
    "set_keras_mask",
    "standardize_inputs",
    "sublayers_of",
    "unchanged_state",
    "unpack_x_y_sample_weight",
]


def made_under(model: Any) -> Any:
    """The strategy that a model, or an epoch's iterator, was made under; None for none."""
    return model._distribute_strategy


def dataset_of(iterator: Any) -> Any:
    """The distributed dataset that an epoch's iterator goes through."""
    return iterator._distributed_dataset


def build_by_spec(model: Any, batch: Any) -> None:
    """Builds a model, and what it was compiled with, by the shapes and types of a batch."""
    model._symbolic_build(data_batch=batch)


def compiled_loss_of(model: Any) -> Any:
    """What computes the loss that was given to `compile`; None for none."""
    return model._compile_loss


def compiled_metrics_of(model: Any) -> Any:
    """What updates the metrics that were given to `compile`; None for none."""
    return model._compile_metrics


def loss_tracker_of(model: Any) -> Any:
    """The metric that a compiled model reports as its loss."""
    return model._loss_tracker


def dropout_shape(inputs: Any, noise_shape: Any) -> Any:
    """The shape of what dropout draws for its inputs, where the layer gives one with gaps."""
    return random._get_concrete_noise_shape(inputs, noise_shape)


def seed_for_draw(seed: Any) -> Any:
    """The next two numbers of a seed, an integer or a `SeedGenerator`, as TensorFlow takes them."""
    return random._cast_seed(random.draw_seed(seed))


def checkpoint_path(callback: Any, epoch: int, batch: int | None, logs: Any) -> Any:
    """Where a `ModelCheckpoint` writes."""
    return callback._get_file_path(epoch, batch, logs or {})


def backup_path(callback: Any) -> Any:
    """Where a `BackupAndRestore` writes its weights."""
    return callback._weights_path


def graph_of(model: Any) -> Functional | None:
    """The graph that a model's call runs; None where the call is the user's own, or not built."""
    if type(model).__call__ is not Model.__call__:
        return None
    if isinstance(model, Sequential):
        return model._functional if type(model).call is Sequential.call else None
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    return None


def nodes_of(graph: Functional) -> list[Any]:
    """The calls of a graph in the order in which Keras makes them."""
    by_depth = graph._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def is_transparent(nested: Any, around: Any) -> bool:
    """Whether a model does nothing but run its graph, where it is called inside another one."""
    return (
        nested.compute_dtype == around.compute_dtype
        and nested.variable_dtype == around.variable_dtype
        and nested.activity_regularizer is None
        # Of itself a model passes on only the masks that its layers make.
        and not nested.supports_masking
        # Since 3.9 a model may compute its activations anew in the backward pass.
        and getattr(nested, "_remat_mode", None) is None
    )


def standardize_inputs(graph: Functional, inputs: Any) -> list[Any]:
    """The flat inputs of a graph, converted as its call does."""
    flat: list[Any] = graph._standardize_inputs(inputs)
    return flat


def call_with_training(operation: Any, training: bool | None) -> Callable[..., Any]:
    """The operation as a graph calls it: `training` comes before what the call itself says."""
    called: Callable[..., Any] = operation_fn(operation, training=training)
    return called


def sublayers_of(layer: Any) -> list[Any]:
    """A layer and all those inside it, each once."""
    layers: list[Any] = layer._flatten_layers()
    return layers


def own_losses(layers: Iterable[Any]) -> list[Any]:
    """What `add_loss` and activity regularizers left in layers, without the variables' losses."""
    unique = {id(sub): sub for layer in layers for sub in sublayers_of(layer)}
    return [loss for layer in unique.values() for loss in layer._get_own_losses()]


def loss_function_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """The function that a loss of Keras calls, and its settings; None where it is another kind."""
    if isinstance(loss, LossFunctionWrapper) and type(loss).call is LossFunctionWrapper.call:
        return loss.fn, loss._fn_kwargs
    return None, {}


def metrics_of(model: Any) -> list[Any]:
    """A model's metrics, also those given to `compile` that it has not taken up yet."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    flat = keras.tree.flatten(given)
    return [*model.metrics, *(m for m in flat if isinstance(m, keras.metrics.Metric))]


def in_callers_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be run in another thread with what Keras keeps for each thread by itself.

    That is what was set by `keras.config`, and the generator for all draws without a seed: what the
    function makes of it for the first time is the caller's too.
    """
    own = vars(global_state.GLOBAL_STATE_TRACKER)
    if not tf.executing_eagerly():
        # As TensorFlow does with a replica's function; it leaves the one around it as it is.
        function = autograph.tf_convert(function, autograph_context.control_status_ctx())

    def run(*args: Any, **kwargs: Any) -> Any:
        others = vars(global_state.GLOBAL_STATE_TRACKER)
        others.update(own)
        try:
            return function(*args, **kwargs)
        finally:
            own.update({name: v for name, v in others.items() if own.get(name) is None})

    as_it_is: Callable[..., Any] = autograph.autograph_artifact(run)
    return as_it_is


@contextlib.contextmanager
def unchanged_state() -> Iterator[None]:
    """Inside it layers are called and nothing remains of it.

    Variables that wait for their values go on waiting, which Keras would else give them at the
    end of its next `StatelessScope`, and Keras's generator of seeds, which layers without a seed
    of their own may use, stays as it is, or unmade. What Keras warns of, it did when the model was
    built.
    """
    names = ("uninitialized_variables", "global_seed_generator")
    before = {name: global_state.get_global_attribute(name) for name in names}
    numbers = python_random.getstate()
    global_state.set_global_attribute("uninitialized_variables", [])
    try:
        with warnings.catch_warnings(), keras.StatelessScope(initialize_variables=False):
            warnings.simplefilter("ignore")
            yield
    finally:
        python_random.setstate(numbers)
        for name, value in before.items():
            global_state.set_global_attribute(name, value)
