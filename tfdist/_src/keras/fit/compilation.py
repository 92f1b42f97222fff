"""XLA compilation of a model's steps, and Keras state that belongs to a strategy's scope.

If a step calls a `tf.function`, the trace of this function depends on the rows of the step. By
default, TensorFlow would reuse this trace outside of the step and in other steps, and it would
reuse traces from elsewhere inside the step. A function that is traced for XLA must not contain
collectives, but TensorFlow would reuse an earlier trace of the function that contains some. So
functions get separate traces for each step and for XLA.

`clear_session` resets TensorFlow's default graph, to which the scope of the strategy is attached.
If the scope were not preserved, the objects that a script creates afterwards would be outside of
the scope.
"""

import functools
import inspect
import platform
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._src import native
from tfdist._src.internals.graphs import is_compiled_whole
from tfdist._src.internals.keras import made_under, model_supports_jit
from tfdist._src.internals.tensorflow import staying_in_scope
from tfdist._src.keras.patching import patch
from tfdist._src.log import logger
from tfdist._src.options import Options, xla_processor_limit
from tfdist._src.strategy.extended import (
    ReplicatedExtended,
    extended_if_ours,
    extended_of,
)
from tfdist._src.strategy.step import current_step
from tfdist._src.xla import compiled_between_collectives
from tfdist.errors import NativeUnavailableError


def install() -> None:
    """Makes `tf.function`, `clear_session` and `compile` work in the scope of a tfdist strategy."""
    _install_nested_functions()
    _install_clear_session()
    _install_compilation()


def _install_nested_functions() -> None:
    """Makes `tf.function` use separate traces for each tfdist step and for XLA."""
    patch("function_context.make_function_context", _with_surroundings)


def _with_surroundings(make_context: Any) -> Any:
    def make_context_with_surroundings(scope_type: Any = None) -> Any:
        step, made = current_step(), make_context(scope_type)
        key = None if step is None else step.key
        whole = not tf.executing_eagerly() and is_compiled_whole()
        if key is None and not whole:
            return made
        return made._replace(context=(made.context, key, whole))

    return make_context_with_surroundings


def _install_clear_session() -> None:
    """Preserves the scope of a tfdist strategy when the default graph is reset."""
    patch("tf.compat.v1.reset_default_graph", _inside_the_scope)


def _inside_the_scope(reset: Any) -> Any:
    @functools.wraps(reset)
    def reset_inside() -> None:
        if extended_if_ours(tf.distribute.get_strategy()) is None:
            reset()
            return
        with staying_in_scope():
            reset()

    return reset_inside


# The models for which `jit_compile="auto"` has chosen XLA, until a message has reported this.
_chosen: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def _install_compilation() -> None:
    """Makes `jit_compile="auto"` choose XLA under a tfdist strategy as in a single process."""
    patch("Trainer.compile", _with_auto)


def is_compiled(model: keras.Model) -> bool:
    """Whether XLA compiles a model's steps; must be equal on all workers."""
    return bool(model.jit_compile and not model.run_eagerly and Options.from_environment().xla)


def compilation_of(model: keras.Model) -> str | None:
    """Describes the hardware for which XLA compiles a model's steps; None if XLA does not compile.

    All workers must have the same description, because programs that XLA compiles for different
    kinds of CPUs or GPUs may round differently.
    """
    if not is_compiled(model):
        return None
    processors = [xla_processor_limit() or _vector_unit(), *_gpus(made_under(model))]
    return f"for {', '.join(processors)}; jit_compile=False works on any"


def _vector_unit() -> str:
    try:
        return str(native.load().library.tfd_vector_unit().decode())
    except NativeUnavailableError:
        return platform.machine()


def _gpus(strategy: Any) -> list[str]:
    """Returns the product names of this worker's GPUs.

    The architecture of the GPUs would not be enough, because XLA's programs depend on more than the
    architecture.
    """
    if not _trains_on_gpus(extended_of(strategy)):
        return []
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return sorted({each.get("device_name", "a GPU") for each in details})


def make_function(model: keras.Model, one_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `tf.function` of a step, or the step itself if the model runs eagerly."""
    if model.run_eagerly:
        return one_step
    if is_compiled(model):
        _say_if_chosen(model)
        one_step = compiled_between_collectives(one_step)
    return tf.function(one_step, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def _with_auto(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `jit_compile="auto"` choose XLA. Keras never does so under a distribution strategy."""
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compile_by_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = compile_model(self, *args, **kwargs)
        _chosen.discard(self)
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        if given.arguments["jit_compile"] == "auto" and _chooses_xla(self):
            self.jit_compile = True
            _chosen.add(self)
        return result

    return compile_by_device


def _say_if_chosen(model: keras.Model) -> None:
    if model in _chosen and extended_of(made_under(model)).group.topology.is_chief:
        logger.info(
            f"XLA compiles the steps of {model.name!r}, as it does on one GPU "
            '(jit_compile="auto"). TFDIST_XLA=0 switches it off.'
        )
    _chosen.discard(model)


def _chooses_xla(model: Any) -> bool:
    extended = extended_if_ours(made_under(model))
    if extended is None or extended.in_stages or model.run_eagerly:
        return False
    allowed = _trains_on_gpus(extended) and Options.from_environment().xla
    return bool(allowed and model_supports_jit(model))


def _trains_on_gpus(extended: ReplicatedExtended) -> bool:
    devices = {tf.DeviceSpec.from_string(d).device_type for d in extended.worker_devices}
    return devices == {"GPU"}
