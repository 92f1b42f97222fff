"""Partial sums are scattered if each worker needs only its own rows of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.global_view.simulation import check
from tests.harness.tiers import some

ROWS, WIDTH = 11, 24
X = np.random.default_rng(3).normal(size=(ROWS, 5)).astype("float32")
W = np.random.default_rng(4).normal(size=(5, WIDTH)).astype("float32") / 2


def _in_batch_negatives(x):
    """Each row is compared with all others, so all workers add to the gradient of each row."""
    w = tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch(w)
        rows = tf.tanh(x @ w)
        scores = tf.matmul(rows, tf.stop_gradient(rows) + 2 * rows, transpose_b=True)
        loss = -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(scores)))
    return loss, tape.gradient(loss, w)


def _rows_behind(x):
    """Compares rows with all others, where the gathered value has the rows on its last axis."""
    w = tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch(w)
        columns = tf.tanh(tf.transpose(x @ w))
        scores = tf.tanh(x @ w) @ columns
        loss = tf.reduce_mean(tf.square(scores))
    return loss, tape.gradient(loss, w)


CASES = list(
    itertools.product(
        [_in_batch_negatives, _rows_behind], [(4, 4, 3), (11, 0), (0, 5, 6), (2, 9)], [False, True]
    )
)


@pytest.mark.parametrize(("program", "shares", "static"), some(CASES, always=CASES[::3]))
def test_workers_get_their_rows_of_a_sum(program, shares, static):
    sent, _ = check(program, [X], shares, static=static)
    whole = ROWS * WIDTH * 4
    assert sent["scattered"] == len(shares) * whole
    # The loss, and the gradient of the weights.
    assert sent["reduced"] <= len(shares) * (W.nbytes + 16)


def test_what_all_workers_need_whole_is_not_scattered():
    def program(x):
        loss, gradient = _in_batch_negatives(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = x @ tf.constant(W)
            value = tf.reduce_sum(tf.matmul(rows, rows, transpose_b=True) ** 2)
        of_rows = tape.gradient(value, x)
        return loss, gradient, tf.sort(of_rows, axis=0)

    check(program, [X], (4, 4, 3))


def test_small_values_are_reduced_with_others():
    def program(x):
        narrow = tf.constant(W[:, :2])
        with tf.GradientTape() as tape:
            tape.watch(narrow)
            rows = x @ narrow
            loss = tf.reduce_sum(tf.tanh(tf.matmul(rows, rows, transpose_b=True)))
        return tape.gradient(loss, narrow)

    sent, _ = check(program, [X], (4, 4, 3))
    assert sent["scattered"] == 0
