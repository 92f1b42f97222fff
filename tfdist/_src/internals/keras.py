"""Private APIs of Keras: classes with replaced methods, graphs of models, and global state."""

import contextlib
import enum
import random as python_random
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer as TensorFlowOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models.functional import Functional, operation_fn
from keras.src.models.model import Model
from keras.src.models.sequential import Sequential
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from keras.src.trainers.trainer import Trainer, model_supports_jit
from keras.src.utils.python_utils import is_default
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.autograph.impl import api as autograph


class Sharing(enum.Enum):
    """The ways in which two threads can share an attribute of Keras's global state.

    Keras has separate global state for each thread. tfdist runs the function of a replica in
    another thread, and makes it see the state of the thread that called it. Keras changes some
    attributes in place, which both threads see if they share the object. It replaces the values of
    other attributes, which only one of the threads would see.
    """

    SETTING = "the caller's value; the caller gets what the replica sets"
    SCOPE = "the caller's value; what the replica enters, it also leaves"
    STACK = "a copy of the caller's list, on which the replica pushes what it enters"
    WAITING = "a list of variables without values, joined with the caller's at the end"


SHARED = {
    # keras.config, keras.utils, keras.distribution
    "distribution": Sharing.SETTING,
    "dtype_policy": Sharing.SETTING,
    "flash_attention": Sharing.SETTING,
    "interactive_logging": Sharing.SETTING,
    "nnx_enabled": Sharing.SETTING,
    "traceback_filtering": Sharing.SETTING,
    "global_random_seed": Sharing.SETTING,
    # Keras creates these objects once, and then changes them in place.
    "global_seed_generator": Sharing.SETTING,
    "object_name_uids": Sharing.SETTING,
    "_keras_mask_dict": Sharing.SETTING,
    "saving_attr_skiplist_*": Sharing.SETTING,
    "saving_attr_skipset_*": Sharing.SETTING,
    # These attributes are set in contexts that restore the previous value at their end.
    "autocast_scope": Sharing.SCOPE,
    "current_call_ctx": Sharing.SCOPE,
    "custom_objects_scope_dict": Sharing.SCOPE,
    "in_tf_graph_scope": Sharing.SCOPE,
    "safe_mode_saving": Sharing.SCOPE,
    "shared_objects/id_to_config_map": Sharing.SCOPE,
    "shared_objects/id_to_obj_map": Sharing.SCOPE,
    "stateless_scope": Sharing.SCOPE,
    "symbolic_scope": Sharing.SCOPE,
    "tracking_on": Sharing.SCOPE,
    "use_legacy_config": Sharing.SCOPE,
    # These attributes are lists. A context adds an element at its beginning and removes it at its
    # end.
    "name_scope_stack": Sharing.STACK,
    "remat_scope_stack": Sharing.STACK,
    "uninitialized_variables": Sharing.WAITING,
}
"""The attributes of Keras 3.8 to 3.15 under the TensorFlow backend; `*` matches any text."""


def in_callers_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that another thread runs it with the Keras state of this thread.

    The state includes, for example, the settings of `keras.config` and the global seed generator.
    If the function changes the state, the changes also take effect in this thread. `SHARED` defines
    how each attribute is shared. An attribute that is not in `SHARED` is shared like a
    `Sharing.SETTING`.
    """
    callers = vars(global_state.GLOBAL_STATE_TRACKER)
    if not tf.executing_eagerly():
        # AutoGraph does not convert the wrapper, and therefore not the function in it. Convert the
        # function here, as TensorFlow does before it runs a replica's function.
        function = autograph.tf_convert(function, autograph_context.control_status_ctx())

    def run(*args: Any, **kwargs: Any) -> Any:
        state = vars(global_state.GLOBAL_STATE_TRACKER)
        given = {name: _given(name, value) for name, value in callers.items()}
        state.update(given)
        try:
            return function(*args, **kwargs)
        finally:
            for name, value in state.items():
                _give_back(callers, name, value, given.get(name))

    unconverted: Callable[..., Any] = autograph.autograph_artifact(run)
    return unconverted


def _given(name: str, value: Any) -> Any:
    """Returns the initial value of an attribute in the thread that runs the function.

    Args:
        name: the name of the attribute.
        value: its value in the calling thread.
    """
    match SHARED.get(name), value:
        case Sharing.STACK, list():
            return [*value]
        case Sharing.WAITING, list():
            # Another replica may have initialized some of these variables since the call began.
            return _without_values(value)
        case _:
            return value


def _give_back(callers: MutableMapping[str, Any], name: str, value: Any, given: Any) -> None:
    """Updates an attribute in the calling thread after the function has returned.

    Args:
        callers: the Keras state of the calling thread.
        name: the name of the attribute.
        value: its final value in the thread that has run the function.
        given: its initial value in that thread.
    """
    match SHARED.get(name, Sharing.SETTING):
        case Sharing.SETTING if value is not given:
            callers[name] = value
        case Sharing.WAITING:
            # Change this list in place, because code in the calling thread may have a reference to
            # it.
            waiting = callers.get(name)
            waiting = callers[name] = [] if waiting is None else waiting
            waiting += [v for v in value or () if all(v is not other for other in waiting)]
            waiting[:] = _without_values(waiting)
        case _:
            pass


def _without_values(variables: list[Any]) -> list[Any]:
    return [variable for variable in variables if variable._value is None]


if keras.backend.backend() != "tensorflow":
    raise RuntimeError(
        "tfdist needs Keras with the TensorFlow backend. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}. "
        "Set the environment variable KERAS_BACKEND=tensorflow before importing Keras."
    )


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
    "exact_value",
    "get_keras_mask",
    "graph_of",
    "in_symbolic_scope",
    "is_seed_state",
    "is_transparent",
    "legacy_h5_format",
    "loss_tracker_of",
    "made_under",
    "metrics_of",
    "model_supports_jit",
    "nodes_of",
    "own_losses",
    "saving_lib",
    "set_keras_mask",
    "standardize_inputs",
    "sublayers_of",
    "unbuilt_on_failure",
    "unchanged_state",
    "unpack_x_y_sample_weight",
]


def made_under(model: Any) -> Any:
    """Returns the strategy under which a model or an epoch iterator was created, if any."""
    return model._distribute_strategy


def dataset_of(iterator: Any) -> Any:
    """Returns the distributed dataset that an epoch iterator reads."""
    return iterator._distributed_dataset


def build_by_spec(model: Any, batch: Any, *, training: bool) -> None:
    """Builds a model and its losses, metrics and optimizer from the shapes and types of a batch.

    Keras's own method, `_symbolic_build`, always calls the model with `training=False`. This
    function instead passes the value that the first step would pass, because layers that are
    created in the first call may depend on it.

    If the model overrides a method such as `train_step`, only this method knows the arguments of
    the losses and metrics. Their shapes are needed, because they determine, for example, the metric
    for which `"accuracy"` stands. In this case, the losses and metrics are built in the first step,
    as in training without a strategy.

    Args:
        model: the model. The scope of its strategy must have been entered.
        batch: the input of a step. Only its shapes and types are used.
        training: whether the first step is a training step.
    """
    x, y, weights = unpack_x_y_sample_weight(tf.nest.map_structure(_symbolic, batch))
    phase = {"training": training}
    loss, metrics = model._compile_loss, model._compile_metrics
    steps = ("train_step", "test_step", "compute_loss", "compute_metrics")
    if any(getattr(type(model), step) is not getattr(keras.Model, step) for step in steps):
        loss = metrics = None
    loss, metrics = (None if part is None or part.built else part for part in (loss, metrics))
    if loss or metrics or not all(layer.built for layer in model._flatten_layers()):
        y_pred = compute_output_spec(model, x, **(phase if model._call_has_training_arg else {}))
        if metrics:
            compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=weights)
        if loss:
            compute_output_spec(model._compute_loss, x, y, y_pred, sample_weight=weights, **phase)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def build_by_step(model: Any, batch: Any, optimizers: Iterable[Any]) -> None:
    """Builds the losses and metrics of a model that overrides its training step.

    `build_by_spec` does not build these losses and metrics. This function traces the training step
    into a graph that never runs, in a replica context and without updates of variables by
    optimizers.

    Args:
        model: the model. The scope of its strategy must have been entered.
        batch: the input of the step. Only its shapes and types are used.
        optimizers: all optimizers that the step may use to update variables.
    """
    parts = (model._compile_loss, model._compile_metrics)
    if all(part is None or part.built for part in parts):
        return
    with contextlib.ExitStack() as without_updates:
        for optimizer in optimizers:
            # Writing to this dict avoids Keras's tracking of attributes.
            attributes = vars(optimizer)
            attributes["apply"] = lambda *args, **kwargs: None
            without_updates.callback(attributes.pop, "apply")
        strategy = model.distribute_strategy
        with tf.distribute.ReplicaContext(strategy, strategy.extended.first_replica):
            compute_output_spec(model.train_step, tf.nest.map_structure(_symbolic, batch))


@contextlib.contextmanager
def unbuilt_on_failure(model: Any) -> Iterator[None]:
    """Marks layers as not built if an error occurs before they have created their variables.

    If a layer does not define `build`, Keras marks it as built before it calls the layer. If the
    call then fails, the layer would remain marked as built.
    """
    before = {id(layer) for layer in model._flatten_layers() if layer.built}
    try:
        yield
    except Exception:
        for layer in model._flatten_layers():
            if layer.built and id(layer) not in before and is_default(layer.build):
                layer.built = False
                layer._tracker.unlock()
        raise


def _symbolic(spec: Any) -> keras.KerasTensor | None:
    if spec is None:
        return None
    return keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype))


def compiled_loss_of(model: Any) -> Any:
    """Returns the object that computes the loss passed to `compile`; None if there is no loss."""
    return model._compile_loss


def compiled_metrics_of(model: Any) -> Any:
    """Returns the object that updates the metrics passed to `compile`; None if there are none."""
    return model._compile_metrics


def loss_tracker_of(model: Any) -> Any:
    """Returns the metric that a compiled model reports as its loss."""
    return model._loss_tracker


def exact_value(variable: Any) -> tf.Tensor:
    """Returns the value of a Keras variable in the variable's own type.

    In mixed precision, Keras would convert the value to another type.
    """
    with AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def checkpoint_path(callback: Any, epoch: int, batch: int | None, logs: Any) -> Any:
    """Returns the path to which a `ModelCheckpoint` writes."""
    return callback._get_file_path(epoch, batch, logs or {})


def backup_path(callback: Any) -> Any:
    """Returns the path to which a `BackupAndRestore` writes weights."""
    return callback._weights_path


def variables_of_archive(archive: Any) -> list[Any]:
    """Returns the TensorFlow variables that the endpoints of a `keras.export.ExportArchive` use."""
    trainable, others = archive._get_variables_used_by_endpoints()
    return [*trainable, *others]


def graph_of(model: Any) -> Functional | None:
    """Returns the graph of layers that a model runs when it is called.

    Returns None if the model has a custom `call`, or is a `Sequential` model that is not built.
    """
    if type(model).__call__ is not Model.__call__:
        return None
    if isinstance(model, Sequential):
        return model._functional if type(model).call is Sequential.call else None
    if isinstance(model, Functional) and type(model).call is Functional.call:
        return model
    return None


def nodes_of(graph: Functional) -> list[Any]:
    """Returns the calls of layers in a graph, in the order in which Keras runs them."""
    by_depth = graph._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def is_transparent(nested: Any, around: Any) -> bool:
    """Whether a call of a nested model does the same as running its graph in the outer model.

    Args:
        nested: the nested model.
        around: the model that contains the nested model.
    """
    return (
        nested.compute_dtype == around.compute_dtype
        and nested.variable_dtype == around.variable_dtype
        and nested.activity_regularizer is None
        # If `supports_masking` is False, as by default, a model passes on only the masks of its
        # layers.
        and not nested.supports_masking
        # In Keras 3.9 and newer, a model may recompute its activations in the backward pass.
        and getattr(nested, "_remat_mode", None) is None
    )


def standardize_inputs(graph: Functional, inputs: Any) -> list[Any]:
    """Flattens and converts inputs in the same way as a call of the graph does."""
    flat: list[Any] = graph._standardize_inputs(inputs)
    return flat


def call_with_training(operation: Any, training: bool | None) -> Callable[..., Any]:
    """Returns an operation as the graph calls it, with another value of `training`.

    The graph has recorded the arguments of the original call. `training` replaces the recorded
    value.
    """
    called: Callable[..., Any] = operation_fn(operation, training=training)
    return called


def sublayers_of(layer: Any) -> list[Any]:
    """Returns a layer and all layers nested in it, without duplicates."""
    layers: list[Any] = layer._flatten_layers()
    return layers


def own_losses(layers: Iterable[Any]) -> list[Any]:
    """Returns the losses from `add_loss` and activity regularizers, but not weight regularizers."""
    unique = {id(sub): sub for layer in layers for sub in sublayers_of(layer)}
    return [loss for layer in unique.values() for loss in layer._get_own_losses()]


def metrics_of(model: Any) -> list[Any]:
    """Returns a model's metrics, including metrics from `compile` that it does not track yet."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    flat = keras.tree.flatten(given)
    return [*model.metrics, *(m for m in flat if isinstance(m, keras.metrics.Metric))]


def is_of_arrays(adapter: Any) -> bool:
    """Whether the data of a Keras adapter consists of arrays in memory."""
    return isinstance(adapter, data_adapters.ArrayDataAdapter)


def describe_arrays(adapter: Any) -> str:
    """Returns a text with the shapes and types of an adapter's arrays, and the size of a batch."""
    arrays = [array for array in keras.tree.flatten(adapter._inputs) if array is not None]
    # A data frame has no single type, because each column has its own.
    specs = [f"{getattr(a, 'dtype', type(a).__name__)}{[*a.shape]}" for a in arrays]
    return f"arrays {', '.join(specs)} in batches of {adapter.batch_size}"


def is_of_one_generator(adapter: Any) -> bool:
    """Whether the data of a Keras adapter is a Python generator."""
    return isinstance(adapter, data_adapters.GeneratorDataAdapter)


def global_seed_state(*, create: bool = False) -> Any:
    """Returns the state variable of Keras's global seed generator.

    Keras uses this generator for random numbers without a seed. Returns None if Keras has not
    created the generator yet.

    Args:
        create: whether to create the generator if it does not exist.
    """
    made = global_state.get_global_attribute("global_seed_generator")
    if made is None and create:
        made = global_seed_generator()
    return None if made is None else made.state


def is_seed_state(variable: Any) -> bool:
    """Whether a `tf.Variable` has the name of the state of a `keras.random.SeedGenerator`.

    There is no better way to recognize such a variable: Keras does not mark it, and the generator
    need not be an attribute of the model or its layers.
    """
    name: str = variable.name.partition(":")[0]
    return name.rpartition("/")[2] == "seed_generator_state"


@contextlib.contextmanager
def unchanged_state() -> Iterator[None]:
    """Makes it possible to call layers without changing any state of Keras.

    Variables without values remain uninitialized, although Keras would normally initialize them at
    the end of its next `StatelessScope`. Layers without a seed may use Keras's global seed
    generator. It keeps its state, or is removed at the end of this context if it did not exist
    before. Warnings are suppressed, because Keras has already issued them when the model was built.
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
