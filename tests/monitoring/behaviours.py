"""Trainings, and how many steps and rows are recorded of them."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import batches, compile_mlp, cross_entropy, fit, mlp, rows
from tfdist._src.monitoring.training import record


def recorded(strategy, how):
    """Three epochs over 43 rows, in batches of 8: steps, rows, and durations of the steps."""
    before = record.read()
    if how == "pipeline":
        train_in_stages()
    else:
        train(strategy, how)
    after = record.read()
    durations = sum(after.seconds.counts) - sum(before.seconds.counts)
    return after.steps - before.steps, after.rows - before.rows, durations


def train(strategy, how):
    settings = {"steps_per_execution": 4} if how.startswith("several") else {}
    model = compile_mlp(strategy, run_eagerly=how.endswith("eagerly"), **settings)
    x, y = rows(43)
    if how == "by hand":
        for start in 3 * [*range(0, 43, 8)]:
            model.train_on_batch(x[start : start + 8], y[start : start + 8])
        return
    record.keeps_durations = how != "untimed"
    data = batches(x, y, 8)
    if how == "of unknown length":
        data = data.filter(lambda *_: True)
    if how == "apart":
        options = tf.data.Options()
        off = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = off
        data = data.with_options(options)
    try:
        # Neither evaluation nor prediction counts.
        fit(model, data, epochs=3, validation_data=(x, y))
        model.predict(x, verbose=0)
    finally:
        record.keeps_durations = False


def train_in_stages():
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(mlp())
        model.compile("sgd", cross_entropy())
    record.keeps_durations = True
    try:
        fit(model, batches(*rows(43), 8), epochs=3)
    finally:
        record.keeps_durations = False


def several_groups(strategy):
    """The bytes sent before a group is closed, and after."""
    world = tfdist.collective.communicator()
    part = world.split("all of them", list(range(world.size)))
    tfdist.collective.all_reduce(tf.zeros([1 << 16]), communicator="all of them")
    before = tfdist.collective.statistics().sent_bytes
    part.close()
    return before, tfdist.collective.statistics().sent_bytes


def alone(strategy):
    """A model of one worker without a scope is none of tfdist's."""
    before = record.read().steps
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", cross_entropy())
    fit(model, *rows(8))
    return record.read().steps - before
