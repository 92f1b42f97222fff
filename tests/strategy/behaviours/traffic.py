"""Trainings whose steps gather more or less than they reduce."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np

from tests.harness.messages import messages_of
from tests.strategy.behaviours.common import scope
from tfdist._src.comm import flight_log
from tfdist._src.keras.fit import partitioned_step


def _negatives(y: Any, p: Any) -> Any:
    scores = keras.ops.matmul(p, keras.ops.transpose(p))
    return -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(scores)))


def _model(strategy: Any, name: str, loss: Any) -> keras.Model:
    with scope(strategy):
        layers = [keras.layers.Dense(300), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *layers], name=name)
        model.compile("adam", loss, metrics=["mae", keras.metrics.RootMeanSquaredError()])
    return model


def said_and_noted(strategy: Any) -> tuple[dict[str, int], list[str], dict[str, Any], int]:
    """Trains two models, without a folder for flight logs.

    Returns:
        The numbers of lines so far, all lines, the steps by their models' names, and how often the
        flight log was changed.
    """
    x = np.random.default_rng(0).random((200, 4), "float32")
    y = np.zeros((200, 300), "float32")
    counts = {}
    with (
        messages_of("partitioned_step") as said,
        mock.patch.object(flight_log, "_place") as place,
    ):
        model = _model(strategy, "compares_rows", _negatives)
        model.evaluate(x, y, batch_size=128, verbose=0)
        model.predict(x, batch_size=128, verbose=0)
        counts["not trained"] = len(said)
        model.fit(x, y, batch_size=128, verbose=0)
        counts["trained"] = len(said)
        noted = {"compares_rows": flight_log._steps["compares_rows"]}
        model.compile("sgd", _negatives, metrics=["mse"])
        model.fit(x[:128], y[:128], batch_size=128, epochs=2, verbose=0)
        counts["traced again"] = len(said)
        noted["traced again"] = flight_log._steps["compares_rows"]
        _model(strategy, "a_mean", "mse").fit(x, y, batch_size=128, verbose=0)
        noted["a_mean"] = flight_log._steps["a_mean"]
        # An error does not end a training.
        with mock.patch.object(partitioned_step, "transfers", side_effect=KeyError) as failing:
            _model(strategy, "not_noted", "mse").fit(x, y, batch_size=128, verbose=0)
        assert failing.call_count
        assert "not_noted" not in flight_log._steps
    return counts, said, noted, place.call_count
