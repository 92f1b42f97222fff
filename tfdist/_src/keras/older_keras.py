"""Backports of newer Keras behavior to the oldest supported version.

Before Keras 3.10, metric variables were not created with `ON_READ` synchronization, so every update
of a metric would sum the metric's full state over the replicas. Also, `fit` did not recognize all
datasets of `tf.distribute`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.internals.keras import Variable, data_adapters
from tfdist._src.internals.variables import stored_dtype
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.extended import extended_if_ours


def install() -> None:
    """Installs the newer behavior in an older Keras."""
    _install_datasets()
    if "synchronization" in inspect.signature(Variable.__init__).parameters:
        return
    patch("Variable._initialize", _summed)


def _summed(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_summed(self: Any, value: Any) -> None:
        ours = extended_if_ours(tf.distribute.get_strategy()) is not None
        if self.aggregation != "sum" or not ours:
            initialize(self, value)
            return
        self._value = tf.Variable(
            value,
            dtype=stored_dtype(self),
            trainable=self.trainable,
            name=self.name,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )

    return initialize_summed


def _install_datasets() -> None:
    is_tf_dataset = data_adapters.is_tf_dataset

    def is_any_tf_dataset(x: Any) -> bool:
        return is_tf_dataset(x) or isinstance(x, tf.distribute.DistributedDataset)

    patch("data_adapters.is_tf_dataset", lambda _: is_any_tf_dataset)
