"""The state of metrics: each replica holds a part, and the value is the sum of all parts."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.keras import metrics_of
from tfdist._src.internals.tensorflow import DistributedValues
from tfdist._src.internals.variables import replace_value
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.variables import SummedVariable


def metric_variables(model: keras.Model) -> list[Any]:
    """Returns, without duplicates, the metric variables that each replica updates separately."""
    variables = {id(v): v for m in model.metrics for v in m.variables}.values()
    return [v for v in variables if isinstance(v.value, SummedVariable)]


def take_over_metrics(model: keras.Model) -> None:
    """Replicates the state of metrics that were created outside the scope.

    All workers must call this function.

    Args:
        model: a model under a tfdist strategy.
    """
    strategy = model.distribute_strategy
    if not extended_of(strategy).communicates:
        return
    for variable in {id(v): v for m in metrics_of(model) for v in m.variables}.values():
        if not isinstance(variable.value, DistributedValues):
            with strategy.scope():
                replace_value(variable)


class MetricTotals:
    """Keeps the totals of a model's metrics over all replicas after each step.

    If a worker is lost, its part of each metric is lost as well. The remaining workers then restore
    the metrics from these totals.

    Args:
        model: the model in training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.proxy(model)
        # Maps the `id` of a metric variable to this variable and its total. Because the variable is
        # kept alive, no later variable can have the same `id`.
        self._kept: dict[int, tuple[Any, tf.Variable]] = {}

    def keep(self, totals: Sequence[tf.Tensor]) -> None:
        """Stores the totals after a step, either eagerly or in the graph that runs the step.

        Args:
            totals: the totals of the variables in `metric_variables(model)`, in the same order.
        """
        for variable, total in zip(metric_variables(self._model), totals, strict=True):
            self.of(variable).assign(total)

    def by_place(self) -> dict[str, tf.Variable]:
        """Returns the totals, keyed by the index of the metric and the index of its variable."""
        summed = {id(variable) for variable in metric_variables(self._model)}
        places = {}
        for i, metric in enumerate(self._model.metrics):
            for j, variable in enumerate(metric.variables):
                if id(variable) in summed:
                    summed.discard(id(variable))
                    places[f"metrics' totals/{i}/{j}"] = self.of(variable)
        return places

    def restore(self) -> None:
        """Sets the state of the metrics to the totals.

        The chief's copy of each variable gets the total. All other copies become zero.
        """
        for variable in metric_variables(self._model):
            variable.assign(self.of(variable))

    def of(self, variable: Any) -> tf.Variable:
        """Returns the variable that stores the total of a metric variable."""
        if id(variable) not in self._kept:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._kept[id(variable)] = variable, tf.Variable(zeros, trainable=False)
        return self._kept[id(variable)][1]


_totals: weakref.WeakKeyDictionary[Any, MetricTotals] = weakref.WeakKeyDictionary()


def keep_totals(model: keras.Model) -> MetricTotals:
    """Makes all later training steps keep the totals of a model's metrics."""
    if model not in _totals:
        _totals[model] = MetricTotals(model)
        model.make_train_function(force=True)
    return _totals[model]


def totals_of(model: keras.Model) -> MetricTotals | None:
    """Returns the totals of a model's metrics; None if they are not kept."""
    return _totals.get(model)
