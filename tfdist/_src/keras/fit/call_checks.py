"""Checks calls of `fit`, `evaluate`, `predict` and `compile` before they start.

The checks raise specific errors for unsupported models, and for calls that differ between the
workers. Without the checks, a later collective would fail or hang.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.data.call_context import Call, current_context, entered
from tfdist._src.data.shares import BatchForm
from tfdist._src.group import joined_group
from tfdist._src.internals.keras import TensorFlowTrainer, made_under
from tfdist._src.internals.optimizer import strategy_of
from tfdist._src.keras.fit.callback import protocol_of
from tfdist._src.keras.fit.compilation import compilation_of
from tfdist._src.keras.fit.training_data import current_data
from tfdist._src.keras.patching import patch
from tfdist._src.keras.saving.files import is_pipeline_model
from tfdist._src.sharding import check_elementwise, is_sharded
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist._src.strategy.multi_worker import share_randomness
from tfdist.errors import UnsupportedError


@dataclasses.dataclass
class _Failure:
    """A failed build of a model.

    Attributes:
        error: the exception that the build raised.
        led_to: the later error that was raised with `error` as its cause, if any.
    """

    error: Exception
    led_to: Exception | None = None


_failures: weakref.WeakKeyDictionary[Any, _Failure] = weakref.WeakKeyDictionary()


def note_failure(model: Any, error: Exception) -> None:
    """Records why a model could not be built."""
    _failures[model] = _Failure(error)


def forget_failure(model: Any) -> None:
    """Forgets why a model could not be built, since it is now built or its step works."""
    _failures.pop(model, None)


@contextlib.contextmanager
def naming_cause(model: Any) -> Iterator[None]:
    """Gives errors raised in this context the failed build of the model as their cause, if any."""
    try:
        yield
    except Exception as error:
        failure = _failures.get(model)
        if failure is None or _text(failure.error) == _text(error):
            raise
        failure.led_to = error
        raise error from _behind(error.__cause__, failure.error)


@contextlib.contextmanager
def keeping_cause(model: Any) -> Iterator[None]:
    """Preserves, in this context, the cause that `naming_cause` has given to an error.

    Keras drops the causes of errors when it removes its own functions from their tracebacks.
    """
    try:
        yield
    except Exception as error:
        failure = _failures.pop(model, None)
        if failure is None or failure.led_to is not error or error.__cause__ is not None:
            raise
        raise error from failure.error


def _behind(cause: BaseException | None, first: Exception) -> BaseException:
    """Returns `cause`, with `first` added at the end of its chain of causes."""
    if cause is None or cause is first:
        return first
    last = cause
    while last.__cause__ is not None and last.__cause__ is not first:
        last = last.__cause__
    last.__cause__ = first
    return cause


def _text(error: BaseException) -> tuple[type, str]:
    return type(error), str(error)


@contextlib.contextmanager
def warning_if_done() -> Iterator[None]:
    """Holds this thread's warnings back, and shows them at the end if no error was raised.

    After an error, the warnings are dropped and count as never shown. If the code is run again, it
    can therefore issue them again.
    """
    show, thread = warnings.showwarning, threading.get_ident()
    held: list[tuple[Any, ...]] = []

    def hold(*warning: Any, **more: Any) -> None:
        if threading.get_ident() == thread:
            held.append(warning)
        else:
            show(*warning, **more)

    warnings.showwarning = hold
    try:
        yield
    except BaseException:
        with warnings.catch_warnings():  # Makes Python forget which warnings it has shown.
            pass
        raise
    else:
        warnings.showwarning = show
        for warning in held:
            warnings.showwarning(*warning)
    finally:
        warnings.showwarning = show


# Arguments that must have the same value on all workers.
_IDENTICAL = (
    "epochs",
    "initial_epoch",
    "batch_size",
    "shuffle",
    "class_weight",
    "steps_per_epoch",
    "steps",
    "validation_split",
    "validation_freq",
    "validation_steps",
    "validation_batch_size",
)
# Arguments that all workers or no workers must pass.
_PRESENT = ("sample_weight", "validation_data")


def install() -> None:
    """Wraps `fit`, `evaluate`, `predict`, `train_on_batch` and `compile` of Keras models."""
    patch("TensorFlowTrainer.fit", lambda fit: _checked(fit, trains=True))
    patch("TensorFlowTrainer.train_on_batch", _requiring_scope)
    patch("TensorFlowTrainer.evaluate", _checked)
    predict = TensorFlowTrainer.predict

    @functools.wraps(predict)
    def predict_in_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        with entered(dataclasses.replace(current_context(), in_order=True)):
            return predict(self, *args, **kwargs)

    patch("TensorFlowTrainer.predict", lambda _: _checked(predict_in_order))
    # `compile` is patched in the base class, because Keras compares a model's `compile` with the
    # method of the base class to detect whether the model overrides it.
    patch("Trainer.compile", _in_scope)


def only_tfdist_reads_batches() -> bool:
    """Whether only functions of tfdist read the batches of the running Keras call.

    If so, tfdist may combine each batch with its number of rows (`WithRows`). A model's own
    `make_train_function` could not read such a batch.
    """
    model = current_context().model
    made = ("make_train_function", "make_test_function", "make_predict_function")
    return model is not None and all(
        getattr(type(model), name) is getattr(TensorFlowTrainer, name) for name in made
    )


def _in_call(model: Any, *, trains: bool, loops: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager in which a new call of a Keras method runs.

    Args:
        model: the model of the call.
        trains: whether the call is `fit` or `train_on_batch`.
        loops: whether the call is `fit`, `evaluate` or `predict`.
    """
    call = Call()
    return entered(
        dataclasses.replace(
            current_context(),
            model=model,
            call=call if loops else None,
            training_call=call if trains else None,
            next_form=BatchForm(),
        )
    )


def is_ours(model: Any) -> bool:
    """Whether the model was created under a tfdist strategy."""
    return extended_if_ours(made_under(model)) is not None


def check_variables(model: Any) -> None:
    """Checks that every replica has a copy of each trainable variable.

    Raises:
        ValueError: a variable was created outside the strategy's scope.
    """
    strategy = model.distribute_strategy
    if not extended_of(strategy).communicates:
        return
    for variable in model.trainable_variables:
        if getattr(variable.value, "distribute_strategy", None) is not strategy:
            raise ValueError(
                f"The variable {variable.path!r} was created outside the scope of the strategy "
                "that trains the model, so it would not stay equal on all replicas. Create all "
                "layers inside `with strategy.scope():`."
            )


def _requiring_scope(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def train_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_outside(self, train.__name__)
        refuse_in_one_piece(self, train.__name__)
        with _in_call(self, trains=True, loops=False):
            return train(self, *args, **kwargs)

    return train_in_scope


def _refuse_outside(model: Any, call: str) -> None:
    """Rejects training a model without a strategy in a job of several workers.

    A worker may still use a separate model independently of the other workers. It may evaluate a
    model that it has created outside of the scope, and it may train a model that it has created
    under a single-process strategy.

    Raises:
        ValueError: this process belongs to a job, and the model was created outside of a strategy's
            scope.
    """
    group = joined_group()
    if group is None or made_under(model) is not None:
        return
    raise ValueError(
        f"`{call}` requires a model created in the scope of a strategy. Received: the model "
        f"{model.name!r}, created outside, so each of the {group.topology.size} workers would "
        "train a separate copy. Create or load it inside `with strategy.scope():`. To train it on "
        "this worker only, create it in the scope of a single-process strategy such as "
        '`tfdist.MirroredStrategy(["CPU:0"])`.'
    )


def refuse_in_one_piece(model: Any, call: str) -> None:
    """Rejects models without stages under a strategy with several workers per pipeline.

    Args:
        model: the model.
        call: the name of the call.

    Raises:
        UnsupportedError: the model is not a `PipelineModel`, so each worker would train all of it.
    """
    strategy = made_under(model)
    extended = extended_if_ours(strategy)
    if extended is None or not extended.in_stages:
        return
    if strategy.pipeline_size > 1 and not is_pipeline_model(model):
        raise UnsupportedError(
            f"`{call}` under a {type(strategy).__name__} of {strategy.pipeline_size} workers per "
            f"pipeline requires a model in stages. Received: the model {model.name!r}, so each "
            "worker would train a separate copy. Create it with "
            "`tfdist.PipelineModel(build_model)`, or use tfdist.MultiWorkerMirroredStrategy."
        )


def _checked(call: Callable[..., Any], *, trains: bool = False) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if trains:
            _refuse_outside(self, call.__name__)
            refuse_in_one_piece(self, call.__name__)
        if is_ours(self):
            group = extended_of(self.distribute_strategy).group
            bound = signature.bind(self, *args, **kwargs)
            given = bound.arguments
            _refuse_weights_of_classes(given)
            if not (trains and _is_entered_again()):
                compared = compared_arguments(given)
                if compilation := compilation_of(self):
                    compared["jit_compile"] = compilation
                group.agree("call", f"{call.__name__} {compared or ''}".strip())
                share_randomness(group)
            _refuse_keras_distribution()
            # Only the chief shows a progress bar, because the bars of the other workers would only
            # clutter their log files.
            if not group.topology.is_chief and given.get("verbose", "auto") == "auto":
                given["verbose"] = 0
            with _in_call(self, trains=trains, loops=True), keeping_cause(self):
                return call(*bound.args, **bound.kwargs)
        return call(self, *args, **kwargs)

    return checked


def _refuse_weights_of_classes(given: dict[str, Any]) -> None:
    """Rejects `class_weight` for data that is already distributed.

    Raises:
        ValueError: `class_weight` is given for a distributed dataset, and Keras cannot assign
            weights to the rows of such a dataset.
    """
    if given.get("class_weight") is None:
        return
    if isinstance(given.get("x"), tf.distribute.DistributedDataset):
        raise ValueError(
            "`class_weight` requires data that `fit` distributes itself. Received: a distributed "
            "dataset. Pass the tf.data.Dataset to `fit`, or add the weight of each row before you "
            "distribute it: `dataset.map(lambda x, y: (x, y, tf.gather(weights, y)))`."
        )


def _is_entered_again() -> bool:
    """Whether this call of `fit` is being entered again after the group of workers has changed."""
    data = current_data()
    return data is not None and data.reentry is not None and data.reentry.goes_on


def compared_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call that must be the same on all workers."""
    compared = {name: given[name] for name in _IDENTICAL if given.get(name) is not None}
    with contextlib.suppress(AttributeError, TypeError, ValueError):  # Keras rejects such values.
        weights = {int(c): float(w) for c, w in compared.get("class_weight", {}).items()}
        compared |= {"class_weight": dict(sorted(weights.items()))} if weights else {}
    compared |= {name: "given" for name in _PRESENT if given.get(name) is not None}
    # A callback sets `same_on_all_workers` if the replicas would drift apart when its arguments
    # differ between workers.
    callbacks = given.get("callbacks")
    flat = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    described = [repr(c) for c in flat if protocol_of(c).same_on_all_workers]
    return compared | ({"callbacks": described} if described else {})


def _refuse_keras_distribution() -> None:
    """Rejects the combination of a tfdist strategy with a Keras distribution.

    Raises:
        UnsupportedError: `keras.distribution.set_distribution` has been called.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise UnsupportedError(
            "A model under a tfdist strategy is distributed by the strategy only. Received: a "
            f"{type(distribution).__name__} set by keras.distribution.set_distribution. Remove "
            "that call, or undo it with `keras.distribution.set_distribution(None)`."
        )


def _in_scope(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_model)
    def compile_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return compile_model(self, *args, **kwargs)
        _refuse_keras_distribution()
        strategy = made_under(self)
        with strategy.scope():
            result = compile_model(self, *args, **kwargs)
        if self.optimizer is not None and is_sharded(self.optimizer):
            check_elementwise(self.optimizer)
        if strategy_of(self.optimizer, strategy) is not strategy:
            raise ValueError(
                f"The optimizer {self.optimizer.name!r} was created outside the scope of the "
                "model's strategy. Create it inside `with strategy.scope():`."
            )
        return result

    return compile_in_scope
