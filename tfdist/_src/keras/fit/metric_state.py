"""The state of metrics: each replica holds a part, and the sum of the parts is the value."""

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
    """The metric variables of a model that each replica updates separately, without duplicates."""
    variables = {id(v): v for m in model.metrics for v in m.variables}.values()
    return [v for v in variables if isinstance(v.value, SummedVariable)]


def take_over_metrics(model: keras.Model) -> None:
    """Replicates the state of metrics that were created outside the scope.

    Collective over all workers.

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
    """Keeps the totals after each step, since the part of a lost worker would be lost with it.

    Args:
        model: the model in training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.proxy(model)
        # Each total is kept with its metric variable, so that no later variable can reuse the id.
        self._kept: dict[int, tuple[Any, tf.Variable]] = {}

    def keep(self, totals: Sequence[tf.Tensor]) -> None:
        """Keeps the totals after a step, eagerly or in its graph.

        Args:
            totals: the totals of `metric_variables(model)`.
        """
        for variable, total in zip(metric_variables(self._model), totals, strict=True):
            self.of(variable).assign(total)

    def by_place(self) -> dict[str, tf.Variable]:
        """The totals, keyed by the position of the metric and of its variable."""
        summed = {id(variable) for variable in metric_variables(self._model)}
        places = {}
        for i, metric in enumerate(self._model.metrics):
            for j, variable in enumerate(metric.variables):
                if id(variable) in summed:
                    summed.discard(id(variable))
                    places[f"metrics' totals/{i}/{j}"] = self.of(variable)
        return places

    def restore(self) -> None:
        """Sets the metrics' state to the totals: the chief holds them, other copies are zero."""
        for variable in metric_variables(self._model):
            variable.assign(self.of(variable))

    def of(self, variable: Any) -> tf.Variable:
        """The total kept for one of the metrics' variables."""
        if id(variable) not in self._kept:
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, variable.dtype)
                self._kept[id(variable)] = variable, tf.Variable(zeros, trainable=False)
        return self._kept[id(variable)][1]


_totals: weakref.WeakKeyDictionary[Any, MetricTotals] = weakref.WeakKeyDictionary()


def keep_totals(model: keras.Model) -> MetricTotals:
    """Keeps the totals of a model's metrics from now on."""
    if model not in _totals:
        _totals[model] = MetricTotals(model)
        model.make_train_function(force=True)
    return _totals[model]


def totals_of(model: keras.Model) -> MetricTotals | None:
    """The totals of a model's metrics, if they are kept."""
    return _totals.get(model)
