"""Every metric of `keras.metrics`, by class and by name, and metrics that are not means of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import metrics as m
from keras import ops

from tests.enumeration.training import (
    ROWS,
    Program,
    Training,
    integers,
    numbers,
    public_classes,
    public_functions,
    row_weights,
)

CLASSES = 3


class Classes(keras.layers.Layer):
    def call(self, probabilities):
        return ops.argmax(probabilities, axis=-1)


# What metrics compare, by kind: a layer that computes the predictions from the output of a dense
# layer, and the targets.
_KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[], np.ndarray]]] = {
    "probabilities": (
        keras.layers.Softmax(name="measured"),
        lambda: np.eye(CLASSES, dtype="float32")[integers(CLASSES, ROWS)],
    ),
    "sparse": (keras.layers.Softmax(name="measured"), lambda: integers(CLASSES, ROWS)),
    "classes": (Classes(name="measured"), lambda: integers(CLASSES, ROWS)),
    "binary": (
        keras.layers.Activation("sigmoid", name="measured"),
        lambda: integers(2, ROWS, CLASSES).astype("float32"),
    ),
    "numbers": (keras.layers.Identity(name="measured"), lambda: numbers(ROWS, CLASSES, seed=3)),
}


def _with(metric: Callable[[], Any], kind: str, weighted: bool = False) -> Program:
    # New layers each time, so that programs share no state.
    template, targets = _KINDS[kind]

    def model() -> keras.Model:
        inputs = keras.Input((4,))
        trained = keras.layers.Dense(CLASSES, name="trained")(inputs)
        measured = template.__class__.from_config(template.get_config())(trained)
        return keras.Model(inputs, {"trained": trained, "measured": measured})

    def data() -> tuple[Any, ...]:
        y = {"trained": numbers(ROWS, CLASSES, seed=8), "measured": targets()}
        return (numbers(ROWS, 4), y, *([row_weights()] if weighted else []))

    def compiled() -> dict[str, Any]:
        where = "weighted_metrics" if weighted else "metrics"
        optimizer = keras.optimizers.SGD(0.3)
        return {"optimizer": optimizer, "loss": {"trained": "mse"}, where: {"measured": metric()}}

    return Training(model, data, compiled, steps=("evaluate",))


# By class: the arguments, and the kind of values that it compares. Classes that are not in this
# table have no arguments and compare "probabilities".
_CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "AUC": ({}, "binary"),
    "AUC/multi_label": ({"multi_label": True, "num_thresholds": 20}, "binary"),
    "AUC/PR": ({"curve": "PR", "summation_method": "majoring"}, "binary"),
    "Accuracy": ({}, "classes"),
    "BinaryAccuracy": ({}, "binary"),
    "BinaryCrossentropy": ({}, "binary"),
    "BinaryIoU": ({}, "binary"),
    "ConcordanceCorrelation": ({}, "numbers"),
    "ConcordanceCorrelation/rows": ({"axis": 0}, "numbers"),
    "CosineSimilarity": ({}, "numbers"),
    "F1Score/macro": ({"average": "macro", "threshold": 0.5}, "binary"),
    "F1Score/micro": ({"average": "micro"}, "probabilities"),
    "FBetaScore": ({"beta": 2.0, "average": "weighted"}, "probabilities"),
    "FalseNegatives": ({"thresholds": [0.3, 0.6]}, "binary"),
    "FalsePositives": ({}, "binary"),
    "IoU": ({"num_classes": 3, "target_class_ids": [0, 2]}, "classes"),
    "LogCoshError": ({}, "numbers"),
    "MeanAbsoluteError": ({}, "numbers"),
    "MeanAbsolutePercentageError": ({}, "numbers"),
    "MeanIoU": ({"num_classes": 3, "ignore_class": 1}, "classes"),
    "MeanMetricWrapper": ({"fn": keras.losses.mean_squared_error}, "numbers"),
    "MeanSquaredError": ({}, "numbers"),
    "OneHotIoU": ({"num_classes": 3, "target_class_ids": [1]}, "probabilities"),
    "OneHotMeanIoU": ({"num_classes": 3}, "probabilities"),
    "PearsonCorrelation": ({}, "numbers"),
    "PearsonCorrelation/rows": ({"axis": 0}, "numbers"),
    "Precision": ({"thresholds": 0.4}, "binary"),
    "Precision/top 2 of a class": ({"top_k": 2, "class_id": 1}, "probabilities"),
    "PrecisionAtRecall": ({"recall": 0.5}, "binary"),
    "R2Score": ({}, "numbers"),
    "R2Score/columns": ({"class_aggregation": None}, "numbers"),
    "Recall": ({}, "binary"),
    "RecallAtPrecision": ({"precision": 0.4}, "binary"),
    "RootMeanSquaredError": ({}, "numbers"),
    "SensitivityAtSpecificity": ({"specificity": 0.5}, "binary"),
    "SparseCategoricalAccuracy": ({}, "sparse"),
    "SparseCategoricalCrossentropy": ({}, "sparse"),
    "SparseTopKCategoricalAccuracy": ({"k": 2}, "sparse"),
    "SpecificityAtSensitivity": ({"sensitivity": 0.5}, "binary"),
    "TopKCategoricalAccuracy": ({"k": 2}, "probabilities"),
    "TrueNegatives": ({}, "binary"),
    "TruePositives": ({}, "binary"),
}
_NOT_OF_TARGETS = ("Mean", "Metric", "Sum")


def _of_classes() -> dict[str, Program]:
    programs = {}
    plain = set(public_classes(m, m.Metric)) - {name.partition("/")[0] for name in _CLASSES}
    cases = {**dict.fromkeys(sorted(plain), ({}, "probabilities")), **_CLASSES}
    for name, (arguments, kind) in cases.items():
        cls = getattr(m, name.partition("/")[0])
        if cls.__name__ in _NOT_OF_TARGETS:
            continue

        def create(cls=cls, arguments=arguments) -> Any:
            return cls(name="m", **arguments)

        programs[name] = _with(create, kind)
        # These classes reject weights of another shape than the targets.
        if cls.__name__ not in ("BinaryIoU", "ConcordanceCorrelation", "PearsonCorrelation"):
            programs[f"{name}/weighted"] = _with(create, kind, weighted=True)
    return programs


def _of_names() -> dict[str, Program]:
    programs = {}
    names = [*public_functions(m), "accuracy", "acc", "mse", "mape"]
    for name in dict.fromkeys(names):
        kind = "sparse" if "sparse" in name else "probabilities"
        if name.startswith(("binary", "mean", "mse", "huber", "log_cosh", "hinge")):
            kind = "binary"
        if name.startswith(("pearson", "concordance")):
            kind = "numbers"
        programs[f"name/{name}"] = _with(lambda name=name: _named(name), kind)
        programs[f"name/{name}/weighted"] = _with(lambda name=name: _named(name), kind, True)
    return programs


def _named(name: str) -> Any:
    try:
        m.get(name)
    except ValueError:
        # Some functions are public, but `get` does not know their names.
        return getattr(m, name, name)
    return name


# Functions whose value for a batch is not the mean of its rows' values.


def f1(y, p):
    hits = ops.sum(y * ops.round(p))
    return 2 * hits / (ops.sum(y) + ops.sum(ops.round(p)) + 1e-7)


def precision(y, p):
    return ops.sum(y * ops.round(p)) / (ops.sum(ops.round(p)) + 1e-7)


def matthews(y, p):
    p = ops.round(p)
    tp, tn = ops.sum(y * p), ops.sum((1 - y) * (1 - p))
    fp, fn = ops.sum((1 - y) * p), ops.sum(y * (1 - p))
    return (tp * tn - fp * fn) / ops.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn) + 1e-3)


def kappa(y, p):
    y, p = ops.argmax(y, axis=-1), ops.argmax(p, axis=-1)
    agreed = ops.mean(ops.cast(ops.equal(y, p), "float32"))
    shares = [ops.mean(ops.one_hot(v, CLASSES, dtype="float32"), axis=0) for v in (y, p)]
    chance = ops.sum(shares[0] * shares[1])
    return (agreed - chance) / (1 - chance + 1e-3)


def balanced_accuracy(y, p):
    right = y * ops.one_hot(ops.argmax(p, axis=-1), CLASSES, dtype="float32")
    return ops.mean(ops.sum(right, axis=0) / (ops.sum(y, axis=0) + 1e-7))


def dice_coefficient(y, p):
    y, p = ops.reshape(y, (-1,)), ops.reshape(p, (-1,))
    return (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)


def mean_of_columns_iou(y, p):
    both = ops.sum(y * p, axis=0)
    return ops.mean(both / (ops.sum(y + p, axis=0) - both + 1e-7))


def rmse(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def rmse_of_columns(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p), axis=0))


def pearson(y, p):
    y, p = y - ops.mean(y), p - ops.mean(p)
    return ops.sum(y * p) / ops.sqrt(ops.sum(y * y) * ops.sum(p * p) + 1e-7)


def r2(y, p):
    return 1 - ops.sum(ops.square(y - p)) / ops.sum(ops.square(y - ops.mean(y, axis=0)))


def wape(y, p):
    return ops.sum(ops.abs(y - p)) / ops.sum(ops.abs(y))


def median_error(y, p):
    return ops.median(ops.abs(y - p))


def quantile_error(y, p):
    return ops.quantile(ops.abs(y - p), 0.9)


def largest_error(y, p):
    return ops.max(ops.abs(y - p))


def spread(y, p):
    return ops.std(p)


def rank_correlation(y, p):
    y, p = y[:, 0], p[:, 0]
    ranks = [ops.cast(ops.argsort(ops.argsort(v)), "float32") for v in (y, p)]
    return pearson(*ranks)


def concordance_index(y, p):
    y, p = y[:, 0], p[:, 0]
    ordered = ops.cast(y[:, None] > y[None], "float32")
    right = ops.cast(p[:, None] > p[None], "float32")
    return ops.sum(ordered * right) / (ops.sum(ordered) + 1e-7)


def sum_of_errors(y, p):
    return ops.sum(ops.abs(y - p))


def constant(y, p):
    return 0.25


def row_values(y, p):
    return ops.max(ops.abs(y - p), axis=-1)


def counted(y, p):
    return ops.sum(ops.cast(y > 0, "int32"))


def share_of_rows(y, p):
    return ops.sum(p, axis=0) / ops.cast(ops.shape(p)[0], "float32")


_FUNCTIONS: dict[Callable[..., Any], str] = {
    f1: "binary",
    precision: "binary",
    matthews: "binary",
    kappa: "probabilities",
    balanced_accuracy: "probabilities",
    dice_coefficient: "binary",
    mean_of_columns_iou: "binary",
    rmse: "numbers",
    rmse_of_columns: "numbers",
    pearson: "numbers",
    r2: "numbers",
    wape: "numbers",
    median_error: "numbers",
    quantile_error: "numbers",
    largest_error: "numbers",
    spread: "numbers",
    rank_correlation: "numbers",
    concordance_index: "numbers",
    sum_of_errors: "numbers",
    constant: "numbers",
    row_values: "numbers",
    counted: "numbers",
    share_of_rows: "probabilities",
}


# Classes with state of their own.


class F1(m.Metric):
    def __init__(self, name="m"):
        super().__init__(name=name)
        self.precision, self.recall = m.Precision(), m.Recall()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.precision.update_state(y_true, y_pred, sample_weight)
        self.recall.update_state(y_true, y_pred, sample_weight)

    def result(self):
        p, r = self.precision.result(), self.recall.result()
        return 2 * p * r / (p + r + 1e-7)

    def reset_state(self):
        self.precision.reset_state()
        self.recall.reset_state()


class RootMean(m.Metric):
    def __init__(self, name="m"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        squares = ops.mean(ops.square(y_true - y_pred), axis=-1)
        if sample_weight is not None:
            squares = squares * sample_weight
        self.total.assign_add(ops.sum(squares))
        self.count.assign_add(ops.cast(ops.shape(squares)[0], "float32"))

    def result(self):
        return ops.sqrt(self.total / (self.count + 1e-7))


class MeanOfBatches(m.Metric):
    """Averages one number per batch that is not a sum over its rows."""

    def __init__(self, name="m"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(rmse(y_true, y_pred))
        self.batches.assign_add(1)

    def result(self):
        return self.total / ops.maximum(1.0, ops.cast(self.batches, "float32"))


class Extremes(m.Metric):
    def __init__(self, name="m"):
        super().__init__(name=name)
        self.high = self.add_weight(name="high", initializer="zeros")
        self.last = self.add_weight(name="last", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.high.assign(ops.maximum(self.high, ops.max(ops.abs(y_true - y_pred))))
        self.last.assign(ops.mean(y_pred))

    def result(self):
        return {"highest": self.high, "last": self.last}


class MovingAverage(m.Metric):
    def __init__(self, name="m"):
        super().__init__(name=name)
        self.average = self.add_weight(name="average", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.average.assign(0.9 * self.average + 0.1 * rmse(y_true, y_pred))

    def result(self):
        return self.average


class Confusion(m.Metric):
    def __init__(self, name="m"):
        super().__init__(name=name)
        self.table = self.add_weight(shape=(CLASSES, CLASSES), initializer="zeros", name="table")

    def update_state(self, y_true, y_pred, sample_weight=None):
        p = ops.one_hot(ops.argmax(y_pred, axis=-1), CLASSES, dtype="float32")
        self.table.assign_add(ops.matmul(ops.transpose(y_true), p))

    def result(self):
        return ops.trace(self.table) / (ops.sum(self.table) + 1e-7)


class WrappedMean(m.Mean):
    """A subclass of `Mean` that averages one number per batch."""

    def __init__(self, name="m"):
        super().__init__(name=name)

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(rmse(y_true, y_pred))


class WrappedSum(m.Sum):
    def __init__(self, name="m"):
        super().__init__(name=name)

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.abs(y_true - y_pred), sample_weight=sample_weight)


_OWN: dict[type, str] = {
    F1: "binary",
    RootMean: "numbers",
    MeanOfBatches: "numbers",
    Extremes: "numbers",
    MovingAverage: "numbers",
    Confusion: "probabilities",
    WrappedMean: "numbers",
    WrappedSum: "numbers",
}


class Tracking(keras.Model):
    """Updates metrics in its own steps: with a value per row, with one per batch, with weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trackers = {
            "mean of rows": m.Mean(),
            "mean of a number": m.Mean(),
            "weighted mean": m.Mean(),
            "sum of rows": m.Sum(),
            "sum of a number": m.Sum(),
            "error": m.MeanSquaredError(),
            "rmse": m.RootMeanSquaredError(),
            "area": m.AUC(num_thresholds=20),
        }

    @property
    def metrics(self):
        return list(self.trackers.values())

    def _measure(self, y, p):
        squares = ops.mean(ops.square(y - p), axis=-1)
        t = self.trackers
        t["mean of rows"].update_state(squares)
        t["mean of a number"].update_state(ops.sqrt(ops.mean(squares)))
        t["weighted mean"].update_state(squares, sample_weight=ops.abs(y[:, 0]))
        t["sum of rows"].update_state(squares)
        t["sum of a number"].update_state(ops.max(squares))
        t["error"].update_state(y, p)
        t["rmse"].update_state(y, p)
        t["area"].update_state(ops.cast(y > 0, "float32"), ops.sigmoid(p))
        return {name: metric.result() for name, metric in t.items()}

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = ops.mean(ops.square(y - p))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return self._measure(y, p)

    def test_step(self, data):
        x, y = data
        return self._measure(y, self(x, training=False))


def _tracking() -> keras.Model:
    inputs = keras.Input((4,))
    return Tracking(inputs, keras.layers.Dense(CLASSES)(inputs))


def _built_optimizer() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.3)}


PROGRAMS: dict[str, Program] = {
    **_of_classes(),
    **_of_names(),
    **{f"function/{f.__name__}": _with(lambda f=f: f, kind) for f, kind in _FUNCTIONS.items()},
    # Keras supports weights only for functions with a value for each row.
    "function/row_values/weighted": _with(lambda: row_values, "numbers", True),
    **{f"own/{cls.__name__}": _with(cls, kind) for cls, kind in _OWN.items()},
    **{
        f"own/{cls.__name__}/weighted": _with(cls, kind, True)
        for cls, kind in _OWN.items()
        if cls in (F1, RootMean, WrappedSum)
    },
    # Base classes, and metrics of values rather than of targets and predictions.
    "Metric": _with(RootMean, "numbers"),
    "Mean": Training(
        _tracking,
        lambda: (numbers(ROWS, 4), numbers(ROWS, CLASSES, seed=3)),
        _built_optimizer,
        steps=("evaluate",),
    ),
}
PROGRAMS["Sum"] = PROGRAMS["Mean"]

DEFAULT: list[str] = []


def missing() -> set[str]:
    """The public metrics without a program."""
    known = {part for name in PROGRAMS for part in name.split("/")}
    return {*public_classes(m, m.Metric), *public_functions(m)} - known
