"""Every metric of Keras has the same state and result on workers' rows as on the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import metrics

from tests.global_view.simulation import analyze, check, gathers, trace
from tests.harness.tiers import some

_ROWS, _CLASSES = 11, 3
SHARES = [(4, 4, 3), (6, 5), (11, 0)]
Arrays = tuple[np.ndarray, np.ndarray]


def _numbers(rng: Any) -> Arrays:
    return rng.normal(size=(_ROWS, 2)), rng.normal(size=(_ROWS, 2))


def _one_number(rng: Any) -> Arrays:
    return rng.normal(size=(_ROWS, 1)), rng.normal(size=(_ROWS, 1))


def _positive(rng: Any) -> Arrays:
    return rng.uniform(0.1, 1, (_ROWS, 2)), rng.uniform(0.1, 1, (_ROWS, 2))


def _binary(rng: Any) -> Arrays:
    return rng.integers(0, 2, (_ROWS, 2)), rng.uniform(0.05, 0.95, (_ROWS, 2))


def _signs(rng: Any) -> Arrays:
    return rng.integers(0, 2, (_ROWS, 2)) * 2 - 1, rng.normal(size=(_ROWS, 2))


def _one_hot(rng: Any) -> Arrays:
    scores = rng.uniform(0.05, 0.95, (_ROWS, _CLASSES))
    classes = np.eye(_CLASSES)[rng.integers(0, _CLASSES, _ROWS)]
    return classes, scores / scores.sum(axis=1, keepdims=True)


def _classes(rng: Any) -> Arrays:
    return rng.integers(0, _CLASSES, (_ROWS, 1)), _one_hot(rng)[1]


def _labels(rng: Any) -> Arrays:
    shape = (_ROWS, 2)
    return rng.integers(0, _CLASSES, shape), rng.integers(0, _CLASSES, shape).astype("float32")


# For each metric: its data, and its arguments.
CASES: dict[str, tuple[Callable[[Any], Arrays], dict[str, Any]]] = {
    "AUC": (_binary, {"num_thresholds": 9}),
    "Accuracy": (_labels, {}),
    "BinaryAccuracy": (_binary, {}),
    "BinaryCrossentropy": (_binary, {}),
    "BinaryIoU": (_binary, {}),
    "CategoricalAccuracy": (_one_hot, {}),
    "CategoricalCrossentropy": (_one_hot, {}),
    "CategoricalHinge": (_one_hot, {}),
    "ConcordanceCorrelation": (_numbers, {}),
    "CosineSimilarity": (_numbers, {}),
    "F1Score": (_one_hot, {"average": "macro"}),
    "FBetaScore": (_one_hot, {"average": "micro"}),
    "FalseNegatives": (_binary, {}),
    "FalsePositives": (_binary, {}),
    "Hinge": (_signs, {}),
    "IoU": (_labels, {"num_classes": _CLASSES, "target_class_ids": [0, 2]}),
    "KLDivergence": (_positive, {}),
    "LogCoshError": (_numbers, {}),
    "Mean": (_numbers, {}),
    "MeanAbsoluteError": (_numbers, {}),
    "MeanAbsolutePercentageError": (_numbers, {}),
    "MeanIoU": (_labels, {"num_classes": _CLASSES}),
    "MeanMetricWrapper": (_numbers, {"fn": lambda y, p: (y - p) ** 4}),
    "MeanSquaredError": (_numbers, {}),
    "MeanSquaredLogarithmicError": (_positive, {}),
    "OneHotIoU": (_one_hot, {"num_classes": _CLASSES, "target_class_ids": [0, 2]}),
    "OneHotMeanIoU": (_one_hot, {"num_classes": _CLASSES}),
    "PearsonCorrelation": (_numbers, {}),
    "Poisson": (_positive, {}),
    "Precision": (_binary, {"thresholds": [0.3, 0.6]}),
    "PrecisionAtRecall": (_binary, {"recall": 0.5, "num_thresholds": 9}),
    "R2Score": (_numbers, {}),
    "Recall": (_binary, {}),
    "RecallAtPrecision": (_binary, {"precision": 0.5, "num_thresholds": 9}),
    "RootMeanSquaredError": (_numbers, {}),
    "SensitivityAtSpecificity": (_binary, {"specificity": 0.5, "num_thresholds": 9}),
    "SparseCategoricalAccuracy": (_classes, {}),
    "SparseCategoricalCrossentropy": (_classes, {}),
    "SparseTopKCategoricalAccuracy": (_classes, {"k": 2}),
    "SpecificityAtSensitivity": (_binary, {"sensitivity": 0.5, "num_thresholds": 9}),
    "SquaredHinge": (_signs, {}),
    "Sum": (_numbers, {}),
    "TopKCategoricalAccuracy": (_one_hot, {"k": 2}),
    "TrueNegatives": (_binary, {}),
    "TruePositives": (_binary, {}),
    # With other arguments.
    "AUC of labels": (_binary, {"num_thresholds": 9, "multi_label": True}),
    "AUC of precision": (_binary, {"num_thresholds": 9, "curve": "PR"}),
    "AUC of any thresholds": (_binary, {"thresholds": [0.2, 0.5, 0.7]}),
    "Precision of the best": (_one_hot, {"top_k": 2}),
    "Recall of a class": (_one_hot, {"class_id": 1}),
    "MeanIoU, ignored": (_labels, {"num_classes": _CLASSES, "ignore_class": 0}),
    "R2Score of outputs": (_numbers, {"class_aggregation": None}),
}
NO_CASE = {"Metric": "the base of all others"}
_FUNCTIONS = {
    "binary_accuracy": _binary,
    "binary_crossentropy": _binary,
    "binary_focal_crossentropy": _binary,
    "categorical_accuracy": _one_hot,
    "categorical_crossentropy": _one_hot,
    "categorical_focal_crossentropy": _one_hot,
    "categorical_hinge": _one_hot,
    "concordance_correlation": _numbers,
    "hinge": _signs,
    "huber": _numbers,
    "kl_divergence": _positive,
    "log_cosh": _numbers,
    "mean_absolute_error": _numbers,
    "mean_absolute_percentage_error": _numbers,
    "mean_squared_error": _numbers,
    "mean_squared_logarithmic_error": _positive,
    "pearson_correlation": _numbers,
    "poisson": _positive,
    "sparse_categorical_accuracy": _classes,
    "sparse_categorical_crossentropy": _classes,
    "sparse_top_k_categorical_accuracy": _classes,
    "squared_hinge": _signs,
    "top_k_categorical_accuracy": _one_hot,
}
_NO_METRIC = {"deserialize", "get", "serialize"}
# Metrics that gather rows, and the types of the operations that gather them.
GATHERS: dict[str, set[str]] = {}


def test_every_metric_has_data_or_a_reason():
    classes = {n for n, _ in inspect.getmembers(metrics, inspect.isclass)}
    functions = {n for n, _ in inspect.getmembers(metrics, inspect.isfunction)}
    assert {name.partition(",")[0].partition(" of ")[0] for name in CASES} | set(NO_CASE) == classes
    assert set(_FUNCTIONS) | _NO_METRIC == functions


def case(name: str, weighted: bool) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """Returns a program without side effects, and its data."""
    draw, options = (_FUNCTIONS[name], {}) if name in _FUNCTIONS else CASES[name]
    rng = np.random.default_rng(0)
    true, predicted = draw(rng)
    true = true.astype("float32" if true.dtype.kind == "f" else "int32")
    weights = rng.uniform(0.5, 1.5, _ROWS).astype("float32")
    if "IoU" in name:  # The weights are counts, one for each label.
        weights = rng.integers(1, 4, (_ROWS,) if "OneHot" in name else true.shape).astype("int32")
    inputs = [true, predicted.astype("float32"), weights]
    if name in _FUNCTIONS:
        return functools.partial(_call, getattr(metrics, name)), inputs
    kind = name.partition(",")[0].partition(" of ")[0]
    metric = getattr(metrics, kind)(**options)
    given = (lambda y, p: (p,)) if kind in ("Mean", "Sum") else (lambda y, p: (y, p))
    metric.update_state(*given(tf.constant(inputs[0]), tf.constant(inputs[1])))
    metric.reset_state()

    def program(true: Any, predicted: Any, weights: Any) -> Any:
        state = [tf.convert_to_tensor(v.value) for v in metric.variables]
        more = {"sample_weight": weights} if weighted else {}
        state = metric.stateless_update_state(state, *given(true, predicted), **more)
        results = tf.nest.flatten(metric.stateless_result(state))
        return [*results, *map(tf.convert_to_tensor, state)]

    return program, inputs


def _call(function: Any, true: Any, predicted: Any, weights: Any) -> Any:
    return [tf.convert_to_tensor(function(true, predicted))]


_SETTINGS = [(shares, static) for shares in SHARES for static in (False, True)]
_NAMES = [*CASES, *_FUNCTIONS]
_ALL = [
    (name, weighted, *setting)
    for name in _NAMES
    for weighted in ((False, True) if name in CASES else (False,))
    for setting in _SETTINGS
]
_DEFAULT = [_ALL[i] for i in range(0, len(_ALL), 61)]


@pytest.mark.parametrize(("name", "weighted", "shares", "static"), some(_ALL, always=_DEFAULT))
def test_a_metric_is_that_of_the_whole_batch(name, weighted, shares, static):
    program, inputs = case(name, weighted)
    _, analysis = check(program, inputs, list(shares), static=static)
    assert set(gathers(analysis)) == GATHERS.get(name, set())


@pytest.mark.parametrize("static", some([False, True], always=[]))
def test_a_metric_gathers_no_rows(static):
    found = {}
    for name in _NAMES:
        for weighted in (False, True) if name in CASES else (False,):
            program, inputs = case(name, weighted)
            analysis = analyze(trace(program, inputs, static=static), inputs, static=static)
            found.setdefault(name, set()).update(gathers(analysis))
    assert {name: types for name, types in found.items() if types} == GATHERS
