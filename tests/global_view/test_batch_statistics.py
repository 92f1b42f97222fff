"""Batch normalization by the statistics of all rows, or of each worker's own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.global_view.simulation import Workers, check, compare
from tests.harness.tiers import some
from tfdist._src.keras.patching import install
from tfdist._src.strategy.step import GlobalStep

_ROWS = 11
SHARES = [(4, 4, 3), (2, 9), (11, 0), (0, 5, 6)]


class Counting(layers.BatchNormalization):
    """A subclass that changes the moments and the outputs, and counts its calls."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return super().call(inputs, training=training, mask=mask) + inputs

    def _moments(self, inputs: Any, mask: Any) -> Any:
        self.calls.assign_add(1)
        mean, variance = super()._moments(inputs, mask)
        return mean, 2 * variance


# The layers, and the shapes of their operands without the rows.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "vectors": (layers.BatchNormalization, (4,)),
    "images": (lambda: layers.BatchNormalization(momentum=0.5), (6, 6, 3)),
    "axis": (lambda: layers.BatchNormalization(axis=1), (5, 4)),
    "plain": (lambda: layers.BatchNormalization(center=False, scale=False), (5, 4)),
    "renorm": (lambda: layers.BatchNormalization(renorm=True), (5, 4)),
    "mixed": (lambda: layers.BatchNormalization(dtype="mixed_bfloat16"), (5, 4)),
    "mask": (layers.BatchNormalization, (5, 4)),
    "subclass": (Counting, (5, 4)),
    "steps": (lambda: layers.TimeDistributed(layers.BatchNormalization()), (5, 4)),
    "rows last": (layers.BatchNormalization, (5, 4)),
    "two layers": (lambda: keras.Sequential([layers.BatchNormalization() for _ in "12"]), (4,)),
}
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "mask": lambda layer, x: layer(x, mask=x[:, :, 0] > 1),
    "rows last": lambda layer, x: tf.transpose(layer(tf.transpose(x, [1, 0, 2])), [1, 0, 2]),
}
DEFAULT = ["vectors", "images", "renorm", "subclass"]


@pytest.fixture(autouse=True, scope="module")
def hooks() -> None:
    install()


def operand(name: str) -> np.ndarray:
    x = np.random.default_rng(0).normal(2, 3, (_ROWS, *LAYERS[name][1]))
    return x.astype("float32")


def step_of(name: str, static: int | None, **statistics: bool) -> tuple[Callable[..., Any], Any]:
    """Returns a program that computes a layer's outputs, gradients and state in training."""
    make, _ = LAYERS[name]
    layer = make()
    call = CALLS.get(name, lambda layer, x: layer(x))

    class Training(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.built = True

        def call(self, x: Any, training: bool | None = None) -> Any:
            return call(self.layer, x)

    called = Training()
    called(tf.constant(operand(name)), training=False)
    rng = np.random.default_rng(2)
    values = [rng.uniform(1, 2, v.shape).astype(v.dtype) for v in called.variables]

    def program(x: Any) -> Any:
        given = [tf.constant(v) for v in values]
        pairs = list(zip(called.variables, given, strict=True))
        trained = [g for v, g in pairs if any(v is t for t in called.trainable_variables)]
        with GlobalStep(static, **statistics):
            with tf.GradientTape() as tape:
                tape.watch([x, *trained])
                with keras.StatelessScope(pairs) as scope:
                    outputs = tf.cast(called(x, training=True), tf.float32)
                state = [scope.get_current_value(v) for v in called.non_trainable_variables]
                # A loss that is not symmetric in the rows.
                loss = tf.reduce_mean(tf.square(outputs + x * x * 0.1))
            return outputs, tape.gradient(loss, [x, *trained]), state

    return program, values


def by_hand(program: Any, x: np.ndarray, shares: tuple[int, ...]) -> list[np.ndarray]:
    """Computes with unmodified layers the results of workers that normalize only their own rows."""
    weights = [own / sum(shares) for own in shares if own]
    first, parts = 0, []
    for own in shares:
        if own:
            parts.append(tf.nest.flatten(program(tf.constant(x[first : first + own]))))
        first += own
    outputs, of_x, *others = zip(*[[v.numpy() for v in part] for part in parts], strict=True)
    # The gradient of the mean over a worker's rows is weighted by their share of all rows.
    results = [np.concatenate(outputs)]
    results.append(np.concatenate([g * w for g, w in zip(of_x, weights, strict=True)]))
    for values in others:
        if np.issubdtype(values[0].dtype, np.floating):
            results.append(sum(v * w for v, w in zip(values, weights, strict=True)))
        else:
            results.append(values[0])
    return results


def _tolerance(name: str) -> float:
    return 1e-2 if name == "mixed" else 1e-5


def _cases() -> list[tuple[str, tuple[int, ...], bool]]:
    return [(n, shares, static) for n in LAYERS for shares in SHARES for static in (False, True)]


def _default_cases() -> list[tuple[str, tuple[int, ...], bool]]:
    return [(n, SHARES[i % len(SHARES)], i % 2 == 1) for i, n in enumerate(DEFAULT)]


@pytest.mark.parametrize(("name", "shares", "static"), some(_cases(), always=_default_cases()))
def test_each_worker_normalizes_its_rows(name, shares, static):
    x = operand(name)
    keras.utils.set_random_seed(1)
    own, _ = step_of(name, _ROWS if static else None, own_statistics=True)
    stock, _ = step_of(name, None)
    workers = Workers(own, [x], len(shares), static=static)
    results = workers.step([x], list(shares))
    for rank, result in enumerate(results):
        for i, (actual, wanted) in enumerate(zip(result, by_hand(stock, x, shares), strict=True)):
            compare(actual, wanted, _tolerance(name), f"rank {rank}, result {i}")
            compare(actual, results[0][i], 0, f"rank {rank}, result {i}")


@pytest.mark.parametrize(("name", "shares", "static"), some(_cases(), always=_default_cases()))
def test_gathered_statistics_are_those_of_all_rows(name, shares, static):
    x = operand(name)
    program, _ = step_of(name, _ROWS if static else None, gathers_statistics=True)
    check(program, [x], list(shares), static=static, tolerance=_tolerance(name))


def test_a_layer_communicates_once_in_each_direction():
    x, found = operand("two layers"), {}
    for name, setting in {
        "own": {"own_statistics": True},
        "gathered": {"gathers_statistics": True},
        "reduced": {},
    }.items():
        program, _ = step_of("two layers", None, **setting)
        workers = Workers(program, [x], 2)
        workers.step([x], [6, 5])
        found[name] = workers.meeting.calls.count("reduce")
    # Each number includes one reduction of the results.
    assert found == {"own": 1, "gathered": 4, "reduced": 10}
