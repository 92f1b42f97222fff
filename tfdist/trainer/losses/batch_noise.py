"""Noise that each replica draws for the global batch, keeping only its rows.

Some distributions consume an unpredictable part of the random stream per number, so each replica
draws the numbers of the whole batch, as a single process would.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import tensorflow as tf

from tfdist.strategies.step import Step, WholeBatch, replicated_step
from tfdist.strategies.warn_once import warn_once
from tfdist.trainer.losses.random_streams import is_for_rows
from tfdist.trainer.patching import patch

# The parameters of each distribution that may differ per row, with a valid value for the rows of
# other replicas: a row's numbers do not depend on the parameters of other rows.
_PARAMETERS: dict[str, dict[str, float]] = {
    "truncated_normal": {"mean": 0, "stddev": 1},
    "gamma": {"alpha": 1},
    "beta": {"alpha": 1, "beta": 1},
    "binomial": {"counts": 1, "probabilities": 0.5},
}


def install() -> None:
    """Replaces how Keras draws such noise inside a tfdist step."""
    for name in _PARAMETERS:
        patch(f"random.{name}", _drawn_for_all_rows)
    patch("random.categorical", _categorical_for_all_rows)
    patch("random.shuffle", _warning_of_rows)


def _drawn_for_all_rows(keras_draws: Any) -> Any:
    signature, parameters = inspect.signature(keras_draws), _PARAMETERS[keras_draws.__name__]

    @functools.wraps(keras_draws)
    def draw(*args: Any, **kwargs: Any) -> Any:
        step = replicated_step()
        given = signature.bind(*args, **kwargs).arguments
        shape = given["shape"]
        if step is None or not is_for_rows(step, shape):
            return keras_draws(*args, **kwargs)
        static = tf.TensorShape(tf.get_static_value(tf.convert_to_tensor(shape), partial=True))
        shape = tf.convert_to_tensor(shape, tf.int32)
        before, after = _others(step, shape[0])
        given["shape"] = tf.concat([[before + shape[0] + after], shape[1:]], axis=0)
        for name, filler in parameters.items():
            value = tf.convert_to_tensor(given.get(name, filler))
            if value.shape.rank == static.rank and value.shape[0] != 1:
                given[name] = _padded(value, before, after, filler)
        return tf.ensure_shape(keras_draws(**given)[before : before + shape[0]], static)

    return draw


def _categorical_for_all_rows(keras_draws: Any) -> Any:
    @functools.wraps(keras_draws)
    def draw(logits: Any, *args: Any, **kwargs: Any) -> Any:
        step = replicated_step()
        if step is None or not is_for_rows(step, logits.shape):
            return keras_draws(logits, *args, **kwargs)
        rows = tf.shape(logits)[0]
        before, after = _others(step, rows)
        drawn = keras_draws(_padded(logits, before, after, 0), *args, **kwargs)
        return tf.ensure_shape(drawn[before : before + rows], [logits.shape[0], drawn.shape[1]])

    return draw


def _others(step: Step, dimension: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The numbers of entries along the first dimension before and after this replica's."""
    rows = tf.maximum(step.rows, 1)
    per_row = tf.where(dimension % rows == 0, dimension // rows, 0)
    return per_row * step.first_row, per_row * (step.total - step.first_row - step.rows)


def _padded(value: tf.Tensor, before: tf.Tensor, after: tf.Tensor, filler: float) -> tf.Tensor:
    around = [[before, after], *[[0, 0]] * (value.shape.rank - 1)]
    return tf.pad(value, around, constant_values=tf.cast(filler, value.dtype))


def _warning_of_rows(shuffle: Any) -> Any:
    @functools.wraps(shuffle)
    def shuffle_rows(x: Any, axis: int = 0, seed: Any = None) -> Any:
        step = replicated_step()
        if step is not None and not isinstance(step, WholeBatch):
            x = tf.convert_to_tensor(x)
            if axis in (0, -x.shape.rank) and is_for_rows(step, x.shape):
                warn_once(
                    "keras.random.shuffle is called on the rows of a batch in a training step. "
                    "Each replica shuffles only its own rows, unlike a single process. Shuffle in "
                    "the dataset, or shuffle the result of tfdist.global_batch.rows."
                )
        return shuffle(x, axis=axis, seed=seed)

    return shuffle_rows
