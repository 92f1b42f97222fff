"""Ranks that call other collectives than the rest, or reduce in another way."""

from __future__ import annotations

import tensorflow as tf

import tfdist
from tests.comm.behaviours import message
from tfdist.collective import all_reduce

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def of_two_sums(strategy, where):
    """Two sums of one shape without names, the other way round on the second worker."""
    other = tfdist.collective.communicator().rank == 1
    a, b = tf.ones([3]), 10 * tf.ones([3])

    def first(x):
        return all_reduce(x)

    def second(x):
        return all_reduce(x)

    def by_context(x):
        return tf.distribute.get_replica_context().all_reduce(SUM, x)

    def also_by_context(x):
        return tf.distribute.get_replica_context().all_reduce(SUM, x)

    def both(first, second):
        return [second(b), first(a)] if other else [first(a), second(b)]

    calls = {
        "eager": lambda: both(first, second),
        "a function": tf.function(lambda: both(first, second)),
        "a replica": lambda: strategy.run(tf.function(lambda: both(by_context, also_by_context))),
        "outside of replicas": lambda: both(
            lambda x: strategy.reduce(SUM, x, axis=None),
            lambda x: strategy.reduce(SUM, x, axis=None),
        ),
    }
    return message(calls[where])


def sum_and_mean(strategy, where):
    way = MEAN if tfdist.collective.communicator().rank else SUM
    x = tf.ones([3])

    def in_replica():
        return tf.distribute.get_replica_context().all_reduce(way, x)

    calls = {
        "outside of replicas": lambda: strategy.reduce(way, x, axis=None),
        "a replica": lambda: strategy.run(tf.function(in_replica)),
    }
    return message(calls[where])


def other_trailing_dimensions(strategy, kind):
    rank = tfdist.collective.communicator().rank
    x = tf.zeros([4 + 2 * rank, 3 + rank])
    return message(lambda: getattr(tfdist.collective, kind)(x, name="rows"))


def what_stays_legal(strategy):
    """The same program by other lines: what Keras and tfdist call, and calls with one name."""
    rank = tfdist.collective.communicator().rank
    x = tf.ones([3])
    if rank == 0:
        named = all_reduce(x, name="both")
    else:
        named = all_reduce(x, name="both")
    with strategy.scope():
        variable = tf.Variable(
            1.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    if rank == 0:
        read = variable.numpy()
    else:
        read = variable.numpy()
    looped = [all_reduce(x) for _ in range(3)]
    if rank == 0:
        tfdist.collective.barrier()
    else:
        tfdist.collective.barrier()
    return [float(tf.reduce_sum(v)) for v in (named, read, *looped)]


def empty_rows(strategy):
    rank, size = strategy.extended.worker_rank, strategy.extended.worker_count
    rows = 4 + rank
    strings = tf.fill([rows, 0], "")
    received, counts = tfdist.collective.all_to_all(tf.zeros([size * rows, 0, 2]), [rows] * size)
    gathered = tfdist.collective.all_gather(tf.zeros([rows, 0]))
    sideways = strategy.gather(tf.zeros([2, rows, 0]), axis=1)
    words = strategy.gather(strings, axis=0)
    shapes = [v.shape.as_list() for v in (gathered, received, sideways, words)]
    return shapes, counts.numpy().tolist()
