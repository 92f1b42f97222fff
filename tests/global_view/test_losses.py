"""Every loss of Keras has the same value and gradients on workers' rows as on the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import losses, ops

from tests.global_view.simulation import analyze, check, gathers, trace
from tests.harness.tiers import some

_ROWS, _CLASSES = 11, 4
SHARES = [(4, 4, 3), (6, 5), (11, 0)]
Arrays = tuple[np.ndarray, np.ndarray]


def _numbers(rng: Any) -> Arrays:
    return rng.normal(size=(_ROWS, 3)), rng.normal(size=(_ROWS, 3))


def _positive(rng: Any) -> Arrays:
    return rng.uniform(0.1, 1, (_ROWS, 3)), rng.uniform(0.1, 1, (_ROWS, 3))


def _binary(rng: Any) -> Arrays:
    return rng.integers(0, 2, (_ROWS, 3)), rng.uniform(0.05, 0.95, (_ROWS, 3))


def _signs(rng: Any) -> Arrays:
    return rng.integers(0, 2, (_ROWS, 3)) * 2 - 1, rng.normal(size=(_ROWS, 3))


def _one_hot(rng: Any) -> Arrays:
    scores = rng.uniform(0.05, 0.95, (_ROWS, _CLASSES))
    classes = np.eye(_CLASSES)[rng.integers(0, _CLASSES, _ROWS)]
    return classes, scores / scores.sum(axis=1, keepdims=True)


def _classes(rng: Any) -> Arrays:
    return rng.integers(0, _CLASSES, _ROWS), _one_hot(rng)[1]


def _masks(rng: Any) -> Arrays:
    shape = (_ROWS, 3, 3, 1)
    return rng.integers(0, 2, shape), rng.uniform(0.05, 0.95, shape)


def _sequences(rng: Any) -> Arrays:
    return rng.integers(1, _CLASSES, (_ROWS, 3)), rng.normal(size=(_ROWS, 8, _CLASSES))


def _embeddings(rng: Any) -> Arrays:
    found = rng.normal(size=(_ROWS, 3))
    return rng.integers(0, 3, _ROWS), found / np.linalg.norm(found, axis=1, keepdims=True)


DATA: dict[str, Callable[[Any], Arrays]] = {
    "BinaryCrossentropy": _binary,
    "BinaryFocalCrossentropy": _binary,
    "CTC": _sequences,
    "CategoricalCrossentropy": _one_hot,
    "CategoricalFocalCrossentropy": _one_hot,
    "CategoricalGeneralizedCrossEntropy": _classes,
    "CategoricalHinge": _one_hot,
    "Circle": _embeddings,
    "CosineSimilarity": _numbers,
    "Dice": _masks,
    "Hinge": _signs,
    "Huber": _numbers,
    "KLDivergence": _positive,
    "LogCosh": _numbers,
    "MeanAbsoluteError": _numbers,
    "MeanAbsolutePercentageError": _numbers,
    "MeanSquaredError": _numbers,
    "MeanSquaredLogarithmicError": _positive,
    "Poisson": _positive,
    "SparseCategoricalCrossentropy": _classes,
    "SquaredHinge": _signs,
    "Tversky": _masks,
}
NO_CASE = {"Loss": "the base of all others"}

# Losses with further arguments.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "logits": ("BinaryCrossentropy", {"from_logits": True}),
    "smooth": ("CategoricalCrossentropy", {"label_smoothing": 0.1, "from_logits": True}),
    "balanced": ("BinaryFocalCrossentropy", {"apply_class_balancing": True}),
    "ignored": ("SparseCategoricalCrossentropy", {"ignore_class": 1}),
    "sparse logits": ("SparseCategoricalCrossentropy", {"from_logits": True}),
    "dice of each": ("Dice", {"axis": (1, 2, 3)}),
}
# Losses of pairs of rows, and the operations that gather one side of the pairs.
PAIRS = {"Circle": {"MatMul", "Equal", "MatrixSetDiagV3"}}
REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none"]
_FUNCTIONS = {
    "binary_crossentropy": "BinaryCrossentropy",
    "binary_focal_crossentropy": "BinaryFocalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "categorical_focal_crossentropy": "CategoricalFocalCrossentropy",
    "categorical_generalized_cross_entropy": "CategoricalGeneralizedCrossEntropy",
    "categorical_hinge": "CategoricalHinge",
    "circle": "Circle",
    "cosine_similarity": "CosineSimilarity",
    "ctc": "CTC",
    "dice": "Dice",
    "hinge": "Hinge",
    "huber": "Huber",
    "kl_divergence": "KLDivergence",
    "log_cosh": "LogCosh",
    "mean_absolute_error": "MeanAbsoluteError",
    "mean_absolute_percentage_error": "MeanAbsolutePercentageError",
    "mean_squared_error": "MeanSquaredError",
    "mean_squared_logarithmic_error": "MeanSquaredLogarithmicError",
    "poisson": "Poisson",
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
    "squared_hinge": "SquaredHinge",
    "tversky": "Tversky",
}
_NO_LOSS = {"deserialize", "get", "serialize"}


def test_every_loss_has_data_or_a_reason():
    classes = {n for n, m in inspect.getmembers(losses, inspect.isclass)}
    functions = {n for n, m in inspect.getmembers(losses, inspect.isfunction)}
    assert set(DATA) | set(NO_CASE) == classes
    assert set(_FUNCTIONS) | _NO_LOSS == functions


def _loss(name: str, reduction: str) -> tuple[str, Any]:
    """The name of the class of a loss, and the loss itself."""
    if name in _FUNCTIONS:
        more = {"q": 0.5} if name == "categorical_generalized_cross_entropy" else {}
        return _FUNCTIONS[name], functools.partial(getattr(losses, name), **more)
    kind, options = OPTIONS.get(name, (name, {}))
    return kind, getattr(losses, kind)(reduction=reduction, **options)


def arrays(kind: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    true, predicted = DATA[kind](rng)
    weights = rng.uniform(0.5, 1.5, _ROWS).astype("float32")
    true = true.astype("float32" if true.dtype.kind == "f" else "int32")
    return [true, predicted.astype("float32"), weights]


def program(name: str, reduction: str, weighted: bool) -> tuple[str, Callable[..., Any]]:
    kind, loss = _loss(name, reduction)

    def run(true: Any, predicted: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(predicted)
            value = loss(true, predicted, weights) if weighted else loss(true, predicted)
            total = ops.mean(value)
        return [value, tape.gradient(total, predicted)]

    return kind, run


NAMES = [*DATA, *OPTIONS]
_SETTINGS = [(shares, static) for shares in SHARES for static in (False, True)]
_WAYS = [(reduction, weighted) for reduction in REDUCTIONS for weighted in (False, True)]
# Each loss with each reduction; the settings rotate, so that each loss has each of them.
_ALL = [
    (name, *way, *_SETTINGS[(i + j) % len(_SETTINGS)])
    for i, name in enumerate(NAMES)
    for j, way in enumerate(_WAYS)
] + [(name, "none", False, *_SETTINGS[i % len(_SETTINGS)]) for i, name in enumerate(_FUNCTIONS)]
_DEFAULT = [_ALL[i] for i in range(0, len(_ALL), 23)]


@pytest.mark.parametrize(
    ("name", "reduction", "weighted", "shares", "static"), some(_ALL, always=_DEFAULT)
)
def test_a_loss_is_that_of_the_whole_batch(name, reduction, weighted, shares, static):
    kind, run = program(name, reduction, weighted)
    _, analysis = check(run, arrays(kind), list(shares), static=bool(static))
    assert_gathers_pairs_only(kind, analysis)


def assert_gathers_pairs_only(kind, analysis):
    found, allowed = set(gathers(analysis)), PAIRS.get(kind, set())
    assert found <= allowed
    assert bool(found) == bool(allowed)


@pytest.mark.parametrize("static", some([False, True], always=[]))
def test_a_loss_gathers_no_rows(static):
    for name in [*NAMES, *_FUNCTIONS]:
        for weighted in (False, True) if name in NAMES else (False,):
            kind, run = program(name, "sum_over_batch_size", weighted)
            inputs = arrays(kind)
            analysis = analyze(trace(run, inputs, static=static), inputs, static=static)
            assert_gathers_pairs_only(kind, analysis)
