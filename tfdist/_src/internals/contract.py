"""Lists the functions of Keras and TensorFlow that tfdist replaces, and their expected parameters.

If the parameters of a function differ between versions, the table contains the parameters of each
known version. tfdist raises an error if it finds other parameters. Otherwise, it could compute
wrong gradients or write wrong files without notice.
"""

import functools
import inspect
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.keras import (
    BaseOptimizer,
    LossScaleOptimizer,
    Model,
    TensorFlowOptimizer,
    TensorFlowTrainer,
    TFEpochIterator,
    Trainer,
    Variable,
    data_adapters,
    legacy_h5_format,
    saving_lib,
)
from tfdist._src.internals.tensorflow import DistributedDatasetAndIteratorSpec, function_context
from tfdist._version import NEWEST_TESTED, is_newer
from tfdist.errors import UnsupportedError

# When Keras exports a model, it imports the module `tensorflow.saved_model` by name. Without this
# entry, TensorFlow would load the module a second time, and the functions that tfdist has replaced
# in `tf.saved_model` would be lost.
sys.modules.setdefault("tensorflow.saved_model", tf.saved_model)


@dataclass(frozen=True)
class Target:
    """A function or method that tfdist replaces.

    Attributes:
        owner: the module or class that contains the function.
        name: the name of the function.
        parameters: for each known version of the function, the names of its parameters, separated
            by commas.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]

    @property
    def function(self) -> Any:
        """The function that `owner` has now; None if it does not exist."""
        return getattr(self.owner, self.name, None)


_CALLBACKS = keras.callbacks
_APPLIES: dict[str, str | tuple[str, ...]] = {"apply": "self, grads, trainable_variables"}
_WRITES: dict[str, str | tuple[str, ...]] = {"_save_checkpoint": "self, step, logs"}
_TABLE: tuple[tuple[str, Any, dict[str, str | tuple[str, ...]]], ...] = (
    (
        "BatchNormalization",
        keras.layers.BatchNormalization,
        {"call": "self, inputs, training, mask", "_moments": "self, inputs, mask"},
    ),
    ("tf.compat.v1", tf.compat.v1, {"reset_default_graph": ""}),
    (
        "IteratorSpec",
        DistributedDatasetAndIteratorSpec,
        {"_serialize": "self", "sanity_check_type": "self, other"},
    ),
    ("function_context", function_context, {"make_function_context": "scope_type"}),
    ("data_adapters", data_adapters, {"is_tf_dataset": "x"}),
    ("Variable", Variable, {"_initialize": "self, value"}),
    (
        "BaseOptimizer",
        BaseOptimizer,
        {
            "apply": "self, grads, trainable_variables",
            "_overwrite_variables_directly_with_gradients": "self, grads, vars",
            "_backend_apply_gradients": "self, grads, trainable_variables",
            "_clip_gradients": "self, grads",
            "_use_weight_decay": "self, variable",
            "load_own_variables": "self, store",
            "set_weights": "self, weights",
        },
    ),
    (
        "TFOptimizer",
        TensorFlowOptimizer,
        {
            "__init__": "self, *args, **kwargs",
            "_all_reduce_sum_gradients": "self, grads_and_vars",
            "_backend_increment_gradient_accumulators": "self, grads, acc_grads",
            "_overwrite_model_variables_with_average_value": "self, trainable_variables",
            "_distributed_tf_update_step": "self, distribution, grads_and_vars, learning_rate",
            "assign_add": "self, variable, value",
            "assign_sub": "self, variable, value",
        },
    ),
    (
        "LossScaleOptimizer",
        LossScaleOptimizer,
        {
            "apply": "self, grads, trainable_variables",
            "_tf_apply": "self, grads, trainable_variables",
        },
    ),
    *(
        ("MultiOptimizer", multi, _APPLIES)
        for multi in (getattr(keras.optimizers, "MultiOptimizer", None),)
        if multi is not None  # The oldest supported Keras does not have this class.
    ),
    (
        "TensorFlowTrainer",
        TensorFlowTrainer,
        {
            "fit": "self, x, y, batch_size, epochs, verbose, callbacks, validation_split, "
            "validation_data, shuffle, class_weight, sample_weight, initial_epoch, "
            "steps_per_epoch, validation_steps, validation_batch_size, validation_freq",
            "evaluate": "self, x, y, batch_size, verbose, sample_weight, steps, callbacks, "
            "return_dict, **kwargs",
            "predict": "self, x, batch_size, verbose, steps, callbacks",
            "train_on_batch": "self, x, y, sample_weight, class_weight, return_dict",
            "train_step": "self, data",
            "make_train_function": "self, force",
            "make_test_function": "self, force",
            "make_predict_function": "self, force",
            "_maybe_symbolic_build": "self, iterator, data_batch",
        },
    ),
    (
        "Trainer",
        Trainer,
        {
            "_get_metrics_result_or_logs": "self, logs",
            "compile": "self, optimizer, loss, loss_weights, metrics, weighted_metrics, "
            "run_eagerly, steps_per_execution, jit_compile, auto_scale_loss",
        },
    ),
    (
        "TFEpochIterator",
        TFEpochIterator,
        {
            "__init__": "self, distribute_strategy, *args, **kwargs",
            "__iter__": "self",
            "__next__": "self",
            "_get_iterator": "self",
            "catch_stop_iteration": "self",
            "reset": "self",
        },
    ),
    (
        "saving_lib",
        saving_lib,
        {
            "save_model": "model, filepath, weights_format, zipped",
            "save_weights_only": (
                "model, filepath, max_shard_size, objects_to_skip",
                "model, filepath, objects_to_skip",  # Keras 3.9 and older.
            ),
            "load_weights_only": "model, filepath, skip_mismatch, objects_to_skip",
            "load_model": "filepath, custom_objects, compile, safe_mode",
            "get_attr_skipset": "obj_type",
        },
    ),
    (
        "legacy_h5_format",
        legacy_h5_format,
        {"save_model_to_hdf5": "model, filepath, overwrite, include_optimizer"},
    ),
    ("Model", Model, {"export": "self, filepath, format, verbose, input_signature, **kwargs"}),
    ("tf.saved_model", tf.saved_model, {"save": "obj, export_dir, signatures, options"}),
    (
        "ExportArchive",
        type(keras.export.ExportArchive()),
        {"write_out": "self, filepath, options, verbose"},
    ),
    ("CSVLogger", _CALLBACKS.CSVLogger, {"on_train_begin": "self, logs"}),
    ("TensorBoard", _CALLBACKS.TensorBoard, {"set_model": "self, model"}),
    (
        "BackupAndRestore",
        _CALLBACKS.BackupAndRestore,
        {"_save_model": "self", "on_train_end": "self, logs"},
    ),
    ("ModelCheckpoint", _CALLBACKS.ModelCheckpoint, {"_save_model": "self, epoch, batch, logs"}),
    ("RemoteMonitor", _CALLBACKS.RemoteMonitor, {"on_epoch_end": "self, epoch, logs"}),
    *(
        (name, getattr(_CALLBACKS, name), _WRITES)
        for name in ("OrbaxCheckpoint",)
        if hasattr(_CALLBACKS, name)  # Since Keras 3.13.
    ),
    (
        "SwapEMAWeights",
        _CALLBACKS.SwapEMAWeights,
        {
            "_tf_swap_variables": "self, optimizer",
            "_tf_finalize_ema_values": "self, optimizer",
        },
    ),
)
TARGETS = {
    f"{label}.{name}": Target(owner, name, (known,) if isinstance(known, str) else known)
    for label, owner, functions in _TABLE
    for name, known in functions.items()
}


_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def check_targets(targets: dict[str, Target]) -> None:
    """Checks that functions to be replaced exist and have the expected parameters.

    Also issues a warning, once per process, if tfdist has not been tested with the installed
    version of Keras or TensorFlow.

    Raises:
        UnsupportedError: a function is missing or has different parameters.
    """
    for label, target in targets.items():
        found = parameters_of(target.function)
        if found is not None and found not in target.parameters:
            raise UnsupportedError(
                "tfdist replaces functions of Keras and TensorFlow, which must have the expected "
                f"parameters: {label}({' or '.join(target.parameters)}). Received: {found}, in "
                f"Keras {keras.__version__} and TensorFlow {tf.__version__}. Install versions "
                "supported by tfdist, or a newer tfdist."
            )
    _warn_of_newer_versions()


@functools.cache
def _warn_of_newer_versions() -> None:
    # A newer version may behave differently even if the parameters are the same.
    for title, package in (("Keras", keras), ("TensorFlow", tf)):
        tested, found = NEWEST_TESTED[package.__name__], package.__version__
        if is_newer(found, tested):
            warnings.warn(
                f"tfdist was tested with {title} up to {tested}. Received: {title} {found}, which "
                "is newer. Compare a short training with one process, or install "
                f"'{package.__name__}=={tested}.*'.",
                stacklevel=3,
            )


def parameters_of(function: Any) -> str | None:
    """Returns the names of a function's parameters, separated by commas.

    Returns None if the function was not defined by Keras or TensorFlow, because replacements by
    other packages are not checked. If `function` is None, returns a text that is not a list of
    parameters.
    """
    if function is None:
        return "no such function"
    original = inspect.unwrap(function)
    if not str(getattr(original, "__module__", "")).startswith(("keras.", "tensorflow.")):
        return None
    parameters = inspect.signature(original).parameters.values()
    return ", ".join(_STARS.get(p.kind, "") + p.name for p in parameters)
