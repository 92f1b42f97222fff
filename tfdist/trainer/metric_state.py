"""Metrics whose state each replica changes by itself, on Keras before 3.10.

Since 3.10 Keras makes the variables of metrics synchronise when they are read; before, every
update of a metric would sum its whole state over the replicas.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from tfdist.internals.keras import Variable
from tfdist.strategies.extended import ReplicatedExtended


def install() -> None:
    """Gives variables that are summed the newer synchronisation, where Keras does not."""
    if "synchronization" in inspect.signature(Variable.__init__).parameters:
        return
    initialize = Variable._initialize

    def initialize_summed(self: Any, value: Any) -> None:
        extended = tf.distribute.get_strategy().extended
        if self.aggregation != "sum" or not isinstance(extended, ReplicatedExtended):
            initialize(self, value)
            return
        self._value = tf.Variable(
            value,
            dtype=self._dtype,
            trainable=self.trainable,
            name=self.name,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )

    Variable._initialize = initialize_summed
