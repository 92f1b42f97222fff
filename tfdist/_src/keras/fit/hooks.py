"""Makes Keras's loops use step functions for several replicas, and adds callbacks to `fit`."""

import contextlib
import functools
import inspect
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm import registry
from tfdist._src.data.call_context import current_context
from tfdist._src.data.distribute import without_none_components
from tfdist._src.data.shares import without_rows
from tfdist._src.internals.extended import first_spec
from tfdist._src.internals.keras import (
    Model,
    TensorFlowTrainer,
    build_by_spec,
    build_by_step,
    dataset_of,
    unbuilt_on_failure,
)
from tfdist._src.internals.tensorflow import PerReplicaSpec
from tfdist._src.keras.fit import call_checks
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.keras.fit.compared_state import SynchronizedStart
from tfdist._src.keras.fit.delivered_once import DeliveredOnce, delivered_once
from tfdist._src.keras.fit.partitioned_step import explain
from tfdist._src.keras.fit.step_functions import PredictFunction, StepFunction
from tfdist._src.keras.fit.training_data import TrainingData, current_data, tracked_data
from tfdist._src.keras.optimizers.applying import building_early, optimizers_of
from tfdist._src.keras.patching import patch
from tfdist._src.monitoring.training import record
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist.errors import TfdistError

_SECONDS = 30.0


class LinkProbe(Callback):
    """Measures the network links at the start of an epoch, at most twice a minute.

    With automatic compression, the workers may then choose another codec. All workers must have
    this callback, because it communicates.
    """

    communicates_in = ("on_epoch_begin",)

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        extended = extended_of(self.model.distribute_strategy)
        compressor = extended.compressor
        if compressor is None or not compressor.is_automatic:
            return
        group, choice = extended.group, compressor.choice
        due = str(time.monotonic() - self._last >= _SECONDS)
        if group.exchange("whether to probe the links", due)[0] != str(True):
            return
        self._last = time.monotonic()
        changed = str(choice is not None and choice.reconsider())
        # Workers that hold different stages choose their codecs separately, so all workers retrace
        # their steps if any choice has changed.
        if str(True) in group.exchange("whether another codec is chosen", changed):
            self.model.make_train_function(force=True)


class StepClock(Callback):
    """Excludes the time between the epochs of `fit` from the recorded durations of the steps.

    This callback acts only once per epoch. The step functions record the steps, instead of this
    callback's `on_train_batch_end`. This costs less, and lets Keras call the batch methods of other
    callbacks in the background.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        record.epoch_begins()

    def on_train_end(self, logs: Any = None) -> None:
        record.fit_ends()


class SynchronizedStop(Callback):
    """Stops all workers after an epoch if a callback of any worker has set `stop_training`.

    This callback runs after the user's callbacks. It acts only at the end of an epoch, because a
    check in every step would slow down training. If only one worker stops within an epoch, all
    workers fail with an error (see `_check_all_ended` in `keras/fit/epoch_iterator.py`).
    """

    communicates_in = ("on_epoch_end",)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        group = extended_of(self.model.distribute_strategy).group
        stops = group.exchange("whether to stop training", str(bool(self.model.stop_training)))
        self.model.stop_training = str(True) in stops


def install() -> None:
    """Replaces the step functions of Keras's loops, and makes `fit` add tfdist's callbacks."""
    _install_loops()
    _install_callbacks()


def _install_loops() -> None:
    """Replaces the step functions of `fit`, `evaluate` and `predict` under a tfdist strategy."""
    ReplicatedExtended.explain = staticmethod(explain)
    make_train, make_test, make_predict = (
        TensorFlowTrainer.make_train_function,
        TensorFlowTrainer.make_test_function,
        TensorFlowTrainer.make_predict_function,
    )

    def make_train_function(self: Any, force: bool = False) -> Any:
        if not call_checks.is_ours(self):
            return make_train(self, force)
        if self.train_function is None or force:
            with call_checks.naming_cause(self):
                call_checks.check_variables(self)
            step_function = StepFunction(self, self.train_step, trains=True)
            self.train_function = _named(self, step_function.run)
        return self.train_function

    def make_test_function(self: Any, force: bool = False) -> Any:
        if not call_checks.is_ours(self):
            return make_test(self, force)
        if self.test_function is None or force:
            self.test_function = _named(self, StepFunction(self, self.test_step).run)
        return self.test_function

    def make_predict_function_(self: Any, force: bool = False) -> Any:
        if not call_checks.is_ours(self):
            return make_predict(self, force)
        if self.predict_function is None or force:
            self.predict_function = _named(self, PredictFunction(self).run)
        return self.predict_function

    patch("TensorFlowTrainer.make_train_function", lambda _: make_train_function)
    patch("TensorFlowTrainer.make_test_function", lambda _: make_test_function)
    patch("TensorFlowTrainer.make_predict_function", lambda _: make_predict_function_)
    patch("TensorFlowTrainer._maybe_symbolic_build", _by_spec)
    patch("Trainer._get_metrics_result_or_logs", _of_resumed_epoch)


def _named(model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step function so that its errors name a failed build of the model as their cause."""
    weak = weakref.ref(model)  # The model holds this function: avoid a cycle.

    @functools.wraps(function)
    def run(data: Any) -> Any:
        model = weak()
        with call_checks.naming_cause(model):
            result = function(data)
        call_checks.forget_failure(model)
        return result

    return run


def _of_resumed_epoch(results_or_logs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(results_or_logs)
    def logs_of_epoch(self: Any, logs: Any) -> Any:
        data = current_data()
        if not logs and data is not None and data.reentry is not None:
            return data.reentry.logs or results_or_logs(self, logs)
        # If an interrupted training run resumes after the last batch of an epoch, no step of this
        # process has returned logs of this epoch.
        if not logs and data is not None and data.resumed:
            return self.get_metrics_result()
        return results_or_logs(self, logs)

    return logs_of_epoch


def _by_spec(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if not call_checks.is_ours(self):
            build(self, iterator=iterator, data_batch=data_batch)
            return
        if iterator is not None:
            data_batch = symbolic_batch(dataset_of(iterator).element_spec)
        if type(self).call is Model.call:
            return  # Only the model's `train_step` can build its layers.
        call_checks.forget_failure(self)
        try:
            # Keras builds the losses in a graph that never runs. So it does not matter if this
            # graph contains a rank or a number of workers (`unnoted`).
            building = building_early(self.optimizer)
            scope = self.distribute_strategy.scope()
            with (
                call_checks.warning_if_done(),
                unbuilt_on_failure(self),
                scope,
                registry.unnoted(),
                building,
            ):
                training = current_context().training_call is not None
                build_by_spec(self, data_batch, training=training)
                if training and extended_of(self.distribute_strategy).group.elastic:
                    # In an elastic job, a worker may join the others in a step, where it cannot
                    # create variables. So the variables that only the model's own step creates are
                    # created here.
                    build_by_step(self, data_batch, optimizers_of(self).values())
        except TfdistError:
            raise
        except Exception as error:
            # Perhaps only the model's own `train_step` can unpack a batch. Its layers are then
            # built when the step is traced, as without a strategy. If tracing fails as well, the
            # error noted here may be the cause.
            call_checks.note_failure(self, error)

    return symbolic_build


def symbolic_batch(element_spec: Any) -> Any:
    """Returns the specs of one replica's part of a batch, from which a model can be built."""

    def first(spec: Any) -> Any:
        if isinstance(spec, PerReplicaSpec):
            spec = first_spec(spec)
        return spec

    return tf.nest.map_structure(first, without_none_components(without_rows(element_spec)[0]))


@dataclass(frozen=True)
class Entries:
    """The objects that stay the same each time a call of `fit` is entered again.

    Attributes:
        callbacks: the callback list, which delivers each event once.
        data: the training data.
        arguments: the arguments of `fit` that must be the same on all workers.
    """

    callbacks: DeliveredOnce
    data: TrainingData
    arguments: dict[str, Any]


class RunsLast(Callback):
    """Base class of callbacks that `fit` calls last, regardless of the order of its argument."""

    def _runs_after(self, others: Sequence[Any]) -> None:
        """Receives the callbacks that are called before this one."""

    def _during_fit(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context manager in which `fit` runs."""
        return contextlib.nullcontext()


class RunsFit(RunsLast):
    """Base class of callbacks that run `fit` themselves, so that they can enter it again."""

    def _run_fit(self, fit: Callable[[], Any], entries: Entries) -> Any:
        """Runs `fit`.

        Args:
            fit: enters `fit`. It may be called again after it has raised an exception.
            entries: the objects that stay the same each time `fit` is entered.
        """
        raise NotImplementedError


_OURS = (LinkProbe, SynchronizedStop, StepClock, SynchronizedStart, SynchronizedStart.First)


def _install_callbacks() -> None:
    """Makes `fit` add tfdist's callbacks to the user's callbacks."""
    fit = TensorFlowTrainer.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_with_added(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not call_checks.is_ours(self):
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        added = _added_callbacks(self)
        if isinstance(given, keras.callbacks.CallbackList):
            for callback in added:
                callback.set_model(self)
            users = [c for c in given.callbacks if not isinstance(c, _OURS)]
            given.callbacks = called = _in_order(users, added)
        else:
            several = [] if given is None else list(given) if _is_list(given) else [given]
            bound.arguments["callbacks"] = called = _in_order(several, added)
        with contextlib.ExitStack() as during:
            data = during.enter_context(tracked_data())
            data.first_epoch = bound.arguments.get("initial_epoch") or 0
            for callback in called:
                if isinstance(callback, RunsLast):
                    during.enter_context(callback._during_fit())
            runs = next((c for c in called if isinstance(c, RunsFit)), None)
            if runs is None:
                return fit(*bound.args, **bound.kwargs)
            once = delivered_once(self, called, data, _with_defaults(bound))
            entries = Entries(once, data, call_checks.compared_arguments(bound.arguments))
            bound.arguments["callbacks"] = once
            return runs._run_fit(lambda: fit(*bound.args, **bound.kwargs), entries)

    patch("TensorFlowTrainer.fit", lambda _: fit_with_added)


def _added_callbacks(model: Any) -> list[Any]:
    extended = extended_of(model.distribute_strategy)
    added: list[Any] = []
    if extended.compressor is not None:
        added.append(LinkProbe())
    if extended.process_count > 1 or extended.group.elastic:
        added += [SynchronizedStop(), SynchronizedStart()]
    if record.keeps_durations:
        added.append(StepClock())
    return added


def _in_order(users: Sequence[Any], added: Sequence[Any]) -> list[Any]:
    """Orders the callbacks: the user's first, then the added ones, then each `RunsLast`.

    `SynchronizedStart` surrounds all of them: its `first` is called before all other callbacks, and
    `SynchronizedStart` itself after them.
    """
    last = [c for c in users if isinstance(c, RunsLast)]
    others = [c for c in users if not isinstance(c, RunsLast)] + list(added)
    if last and not any(isinstance(c, keras.callbacks.History) for c in others):
        others.append(keras.callbacks.History())  # Keras would append it at the end.
    # A `RunsFit` may leave `fit` with an exception, so it is the last of these callbacks.
    last.sort(key=lambda callback: isinstance(callback, RunsFit))
    for callback in last:
        callback._runs_after(others)
    begins = [c for c in others if isinstance(c, SynchronizedStart)]
    others = [c for c in others if not isinstance(c, SynchronizedStart)]
    return [*(c.first for c in begins), *others, *last, *begins]


def _with_defaults(bound: inspect.BoundArguments) -> dict[str, Any]:
    complete = inspect.BoundArguments(bound.signature, OrderedDict(bound.arguments))
    complete.apply_defaults()
    return dict(complete.arguments)


def _is_list(callbacks: Any) -> bool:
    return isinstance(callbacks, (list, tuple))
