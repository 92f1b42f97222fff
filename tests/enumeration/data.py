"""Forms of data, with options of `fit` and `compile`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.enumeration.training import (
    BATCH,
    ROWS,
    Program,
    adam,
    integers,
    numbers,
    row_weights,
)
from tests.strategy.behaviours.common import fit, outcome, scope

# Arguments of `fit`; `evaluate` takes some of them.
Arguments = dict[str, Any]


def _x() -> np.ndarray:
    return numbers(ROWS, 4)


def _y() -> np.ndarray:
    return integers(3, ROWS)


def _rows(size: int = BATCH, weighted: bool = False) -> tf.data.Dataset:
    parts = (_x(), _y(), *([row_weights()] if weighted else []))
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


class Batches(keras.utils.PyDataset):
    """Batches of eleven, one and six rows."""

    _ENDS = (0, 11, 12, 18)

    def __len__(self):
        return 3

    def __getitem__(self, i):
        rows = slice(self._ENDS[i], self._ENDS[i + 1])
        return _x()[rows], _y()[rows]


def _generator() -> Any:
    while True:
        for start in range(0, ROWS, 7):
            yield _x()[start : start + 7], _y()[start : start + 7]


def _finite_generator() -> Any:
    """Yields batches with None instead of weights."""
    for start in range(0, ROWS, 7):
        yield _x()[start : start + 7], _y()[start : start + 7], None


def _with_an_empty_batch() -> tf.data.Dataset:
    """Returns a dataset whose first batch has no rows."""
    first = tf.data.Dataset.from_tensors((_x()[:0], _y()[:0]))
    return first.map(lambda x, y: (x[:0], y[:0])).concatenate(_rows())


def _ragged_batches() -> tf.data.Dataset:
    """Returns a dataset of batches of different sizes: 11, 1 and 6 rows."""
    starts = tf.data.Dataset.range(3)

    def batch(i):
        first, end = tf.gather([0, 11, 12], i), tf.gather([11, 12, 18], i)
        return tf.constant(_x())[first:end], tf.constant(_y())[first:end]

    return starts.map(batch).apply(tf.data.experimental.assert_cardinality(3))


FORMS: dict[str, Callable[[], Arguments]] = {
    "arrays": lambda: {"x": _x(), "y": _y(), "batch_size": BATCH},
    "arrays of one row more": lambda: {"x": _x()[:12], "y": _y()[:12], "batch_size": BATCH},
    "smaller than a batch": lambda: {"x": _x()[:5], "y": _y()[:5], "batch_size": BATCH},
    "one row": lambda: {"x": _x()[:3], "y": _y()[:3], "batch_size": 1},
    "tensors": lambda: {"x": tf.constant(_x()), "y": tf.constant(_y()), "batch_size": BATCH},
    "sample weights": lambda: {
        "x": _x(),
        "y": _y(),
        "sample_weight": row_weights(),
        "batch_size": BATCH,
    },
    "dataset": lambda: {"x": _rows()},
    "dataset with weights": lambda: {"x": _rows(weighted=True)},
    "dataset with None for weights": lambda: {"x": _rows().map(lambda x, y: (x, y, None))},
    "dataset with an empty batch": lambda: {"x": _with_an_empty_batch()},
    "generator with None for weights": lambda: {"x": _finite_generator(), "steps_per_epoch": 2},
    "dataset without remainder": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((_x(), _y())).batch(7, drop_remainder=True),
    },
    "dataset of single rows": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((_x(), _y())).batch(1, drop_remainder=True).take(5),
    },
    "dataset of fixed order": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((_x(), _y()))
        .shuffle(ROWS, seed=4, reshuffle_each_iteration=False)
        .batch(BATCH)
    },
    "dataset with a map": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((_x(), _y()))
        .batch(BATCH)
        .map(lambda x, y: (x - tf.reduce_mean(x, axis=0), y))
    },
    "repeated dataset": lambda: {"x": _rows(7).repeat(), "steps_per_epoch": 4},
    "batches of other sizes": lambda: {"x": _ragged_batches()},
    "generator": lambda: {"x": _generator(), "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Batches()},
}


def _validated(**validation: Any) -> Callable[[], Arguments]:
    return lambda: {"x": _x(), "y": _y(), "batch_size": BATCH, **validation}


MORE: dict[str, Callable[[], Arguments]] = {
    "class_weight": _validated(class_weight={0: 0.5, 1: 2.0, 2: 1.0}),
    "class_weight of a dataset": lambda: {"x": _rows(), "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
    "validation_split": _validated(validation_split=0.3),
    "validation_split with weights": _validated(validation_split=0.3, sample_weight=row_weights()),
    "validation_data": _validated(
        validation_data=(numbers(9, 4, seed=5), integers(3, 9, seed=6)), validation_batch_size=5
    ),
    "validation_data with weights": _validated(
        validation_data=(numbers(9, 4, seed=5), integers(3, 9, seed=6), row_weights(9)),
    ),
    "validation by a dataset": lambda: {"x": _rows(7), "validation_data": _rows(5)},
    "validation_steps": lambda: {
        "x": _rows(7),
        "validation_data": _rows(5).repeat(),
        "validation_steps": 2,
    },
    "validation_freq": _validated(
        validation_data=(numbers(9, 4, seed=5), integers(3, 9, seed=6)),
        validation_freq=2,
        epochs=3,
    ),
    "one epoch": _validated(epochs=1),
    "initial_epoch": _validated(initial_epoch=1, epochs=3),
    "steps_per_epoch": lambda: {"x": _rows(7), "steps_per_epoch": 2},
    "shuffle": _validated(shuffle=True),
    "schedule of a callback": lambda: {
        "x": _x(),
        "y": _y(),
        "batch_size": BATCH,
        "callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch: 0.02 / (1 + epoch))],
    },
    "early stopping": lambda: {
        "x": _x(),
        "y": _y(),
        "batch_size": BATCH,
        "epochs": 4,
        "callbacks": [keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1)],
    },
    "reduced rate": lambda: {
        "x": _x(),
        "y": _y(),
        "batch_size": BATCH,
        "epochs": 4,
        "callbacks": [keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1)],
    },
}

# Arguments of `compile`.
COMPILED: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"run_eagerly": True},
    "two steps at once": {"steps_per_execution": 2},
    "three steps at once": {"steps_per_execution": 3},
    "XLA": {"jit_compile": True},
    "no XLA": {"jit_compile": False},
    "scaled": {"auto_scale_loss": False},
}


def _classifier(drops: bool = True) -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(inputs)
    if drops:
        hidden = layers.Dropout(0.2, seed=1)(hidden)
    return keras.Model(inputs, layers.Dense(3)(hidden))


def _program(form: Callable[[], Arguments], compiled: dict[str, Any]) -> Program:
    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            # In one process, XLA draws other numbers than TensorFlow.
            model = _classifier(drops=not compiled.get("jit_compile"))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            settings = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"], **compiled}
            model.compile(adam(), loss, **settings)
        arguments = form()
        history = fit(model, **{"shuffle": False, **arguments})
        history.pop("learning_rate", None)
        x = arguments["x"]
        endless = "steps_per_epoch" in arguments
        evaluated = model.evaluate(
            x if not endless else _rows(),
            arguments.get("y"),
            sample_weight=arguments.get("sample_weight"),
            batch_size=arguments.get("batch_size"),
            verbose=0,
            return_dict=True,
        )
        predicted = model.predict(_x(), batch_size=7, verbose=0)
        return outcome(model, history, evaluated=evaluated, predicted=predicted)

    return program


# Other structures of inputs and targets.


def _of_structure(
    model: Callable[[], keras.Model], data: Callable[[], tuple[Any, ...]], **compiled: Any
) -> Program:
    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            created = model()
            created.compile(adam(), **{"loss": "mse", **compiled})
        x, *rest = data()
        names = dict(zip(("y", "sample_weight"), rest, strict=False))
        settings = {"batch_size": BATCH, "verbose": 0}
        history = fit(created, x, shuffle=False, **names, **settings)
        evaluated = created.evaluate(x, **names, **settings, return_dict=True)
        return outcome(
            created, history, evaluated=evaluated, predicted=created.predict(x, **settings)
        )

    return program


def _two_of_each(named: bool) -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    hidden = layers.Concatenate()([layers.Dense(3)(a), layers.Dense(3)(b)])
    outputs = [layers.Dense(2, name="c")(hidden), layers.Dense(1, name="d")(hidden)]
    if not named:
        return keras.Model([a, b], outputs)
    return keras.Model({"a": a, "b": b}, dict(zip("cd", outputs, strict=True)))


def _structured(named: bool, weighted: bool) -> tuple[Any, ...]:
    x = [_x(), numbers(ROWS, 3, seed=1)]
    y = [numbers(ROWS, 2, seed=2), numbers(ROWS, 1, seed=3)]
    w = [row_weights(), row_weights()[::-1].copy()]
    if named:
        x, y, w = dict(zip("ab", x, strict=True)), dict(zip("cd", y, strict=True)), w
        w = dict(zip("cd", w, strict=True))
    return (x, y, w) if weighted else (x, y)


def _sequence_model() -> keras.Model:
    inputs = keras.Input((5, 2))
    return keras.Model(inputs, layers.Dense(2)(layers.SimpleRNN(3, return_sequences=True)(inputs)))


_STRUCTURES: dict[str, Program] = {
    **{
        f"{'dicts' if named else 'lists'}{' with weights' if weighted else ''}": _of_structure(
            lambda named=named: _two_of_each(named),
            lambda named=named, weighted=weighted: _structured(named, weighted),
            **(
                {"loss": {"c": "mse", "d": "mae"}, "loss_weights": {"c": 0.3, "d": 2.0}}
                if named
                else {"loss": ["mse", "mae"], "loss_weights": [0.3, 2.0]}
            ),
        )
        for named, weighted in itertools.product((False, True), (False, True))
    },
    "weights of each time": _of_structure(
        _sequence_model,
        lambda: (numbers(ROWS, 5, 2), numbers(ROWS, 5, 2, seed=1), np.abs(numbers(ROWS, 5))),
    ),
    "float64": _of_structure(
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]),
        lambda: (_x().astype("float64"), numbers(ROWS, 2, seed=1).astype("float64")),
    ),
    "no targets": _of_structure(
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2, activity_regularizer="l2")]),
        lambda: (_x(),),
        loss=None,
    ),
}


class Lengths(layers.Layer):
    """Averages the embeddings of each row's words; rows may differ in their number of words."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 3)

    def call(self, words):
        found = tf.ragged.map_flat_values(self.table, words)
        return tf.reduce_mean(found, axis=1)


def _of_words() -> keras.Model:
    words = keras.Input((None,), dtype="int32", ragged=True)
    return keras.Model(words, layers.Dense(3)(Lengths()(words)))


def _of_sparse() -> keras.Model:
    return keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(3)])


def _words(count: int) -> tf.RaggedTensor:
    lengths = [1 + i % 4 for i in range(count)]
    return tf.RaggedTensor.from_row_lengths(integers(9, sum(lengths)), lengths)


# By kind: a function that creates a model, and one that creates inputs with a number of rows.
_BATCHES: dict[str, tuple[Callable[[], keras.Model], Callable[[int], Any]]] = {
    "arrays": (_classifier, lambda count: numbers(count, 4)),
    "tensors": (_classifier, lambda count: tf.constant(numbers(count, 4))),
    "ragged": (_of_words, _words),
    "sparse": (_of_sparse, lambda count: tf.sparse.from_dense(np.eye(count, 4) * 0.5 + 0.1)),
}


def _batch_by_batch(kind: str, *, eager: bool) -> Program:
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`."""
    create, inputs = _BATCHES[kind]

    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            model = create()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(adam(), loss, metrics=["accuracy"], run_eagerly=eager)
        sizes = (7, 7, 4, 1, 5)
        logs = [
            model.train_on_batch(inputs(size), integers(3, size), return_dict=True)
            for size in sizes
        ]
        tested = [
            model.test_on_batch(inputs(size), integers(3, size), return_dict=True) for size in sizes
        ]
        predicted = [model.predict_on_batch(inputs(size)) for size in sizes]
        return outcome(model, logs, tested=tested, predicted=predicted)

    return program


_BY_BATCH: dict[str, Program] = {
    f"batch by batch/{kind}/{'eager' if eager else 'default'}": _batch_by_batch(kind, eager=eager)
    for kind, eager in itertools.product(_BATCHES, (False, True))
}

PROGRAMS: dict[str, Program] = {
    **{
        f"{form}/{compiled}": _program(FORMS[form], COMPILED[compiled])
        for form, compiled in itertools.product(FORMS, COMPILED)
        # Keras's eager loss of a batch without rows is NaN.
        if not (form == "dataset with an empty batch" and compiled == "eager")
    },
    **{
        f"{more}/{compiled}": _program(MORE[more], COMPILED[compiled])
        for more, compiled in itertools.product(MORE, COMPILED)
        # Keras runs exactly `validation_steps` only if `steps_per_execution` divides it.
        if not (more == "validation_steps" and compiled == "three steps at once")
    },
    **_STRUCTURES,
    **_BY_BATCH,
}

# Each form with three settings of `compile`, in rotation.
COVERING = [
    name
    for i, form in enumerate({**FORMS, **MORE})
    for j in range(3)
    if (name := f"{form}/{list(COMPILED)[(i + 2 * j) % len(COMPILED)]}") in PROGRAMS
] + [*_STRUCTURES, *_BY_BATCH]

DEFAULT: list[str] = []
