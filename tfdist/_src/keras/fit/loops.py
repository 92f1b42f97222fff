"""Makes Keras's loops use step functions for several replicas, and build models without data."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.comm import traces
from tfdist._src.data.distribute import without_absent
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
from tfdist._src.keras.fit.call_checks import check_variables, is_ours, training_call
from tfdist._src.keras.fit.current_data import current_data
from tfdist._src.keras.fit.failed_builds import (
    forget_failure,
    naming_cause,
    note_failure,
    warning_if_done,
)
from tfdist._src.keras.fit.partitioned_step import explain
from tfdist._src.keras.fit.step_functions import make_predict_function, make_step_function
from tfdist._src.keras.optimizers.applying import building_early
from tfdist._src.keras.optimizers.of_model import optimizers_of
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.extended import ReplicatedExtended
from tfdist.errors import TfdistError


def install() -> None:
    """Replaces the step functions of `fit`, `evaluate` and `predict` under a tfdist strategy."""
    ReplicatedExtended.explain = staticmethod(explain)
    make_train, make_test, make_predict = (
        TensorFlowTrainer.make_train_function,
        TensorFlowTrainer.make_test_function,
        TensorFlowTrainer.make_predict_function,
    )

    def make_train_function(self: Any, force: bool = False) -> Any:
        if not is_ours(self):
            return make_train(self, force)
        if self.train_function is None or force:
            with naming_cause(self):
                check_variables(self)
            self.train_function = _named(
                self, make_step_function(self, self.train_step, trains=True)
            )
        return self.train_function

    def make_test_function(self: Any, force: bool = False) -> Any:
        if not is_ours(self):
            return make_test(self, force)
        if self.test_function is None or force:
            self.test_function = _named(self, make_step_function(self, self.test_step))
        return self.test_function

    def make_predict_function_(self: Any, force: bool = False) -> Any:
        if not is_ours(self):
            return make_predict(self, force)
        if self.predict_function is None or force:
            self.predict_function = _named(self, make_predict_function(self))
        return self.predict_function

    patch("TensorFlowTrainer.make_train_function", lambda _: make_train_function)
    patch("TensorFlowTrainer.make_test_function", lambda _: make_test_function)
    patch("TensorFlowTrainer.make_predict_function", lambda _: make_predict_function_)
    patch("TensorFlowTrainer._maybe_symbolic_build", _by_spec)
    patch("Trainer._get_metrics_result_or_logs", _of_resumed_epoch)


def _named(model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step function whose errors name a failed build of the model as their cause."""
    weak = weakref.ref(model)  # The model holds the function.

    @functools.wraps(function)
    def run(data: Any) -> Any:
        model = weak()
        with naming_cause(model):
            result = function(data)
        forget_failure(model)
        return result

    return run


def _of_resumed_epoch(results_or_logs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(results_or_logs)
    def logs_of_epoch(self: Any, logs: Any) -> Any:
        data = current_data()
        if not logs and data is not None and data.live is not None:
            return data.live.logs or results_or_logs(self, logs)
        # An epoch whose last batch had been trained when its training was interrupted.
        if not logs and data is not None and data.resumed:
            return self.get_metrics_result()
        return results_or_logs(self, logs)

    return logs_of_epoch


def _by_spec(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if not is_ours(self):
            build(self, iterator=iterator, data_batch=data_batch)
            return
        if iterator is not None:
            data_batch = symbolic_batch(dataset_of(iterator).element_spec)
        if type(self).call is Model.call:
            return  # Only its custom steps know what to call; they build it.
        forget_failure(self)
        try:
            # Keras computes losses in a graph that never runs.
            building = building_early(self.optimizer)
            scope = self.distribute_strategy.scope()
            with warning_if_done(), unbuilt_on_failure(self), scope, traces.unnoted(), building:
                training = training_call() is not None
                build_by_spec(self, data_batch, training=training)
                if training and self.distribute_strategy.extended.group.elastic:
                    # A worker that joins the others in a step cannot create variables in it.
                    build_by_step(self, data_batch, optimizers_of(self).values())
        except TfdistError:
            raise
        except Exception as error:
            # Perhaps only the model's custom steps can unpack a batch. The layers they call are
            # then built during tracing, as without a strategy. If that fails, this may be why.
            note_failure(self, error)

    return symbolic_build


def symbolic_batch(element_spec: Any) -> Any:
    """The specs of one replica's part of a batch, sufficient to build a model."""

    def first(spec: Any) -> Any:
        if isinstance(spec, PerReplicaSpec):
            spec = first_spec(spec)
        return spec

    return tf.nest.map_structure(first, without_absent(without_rows(element_spec)[0]))
