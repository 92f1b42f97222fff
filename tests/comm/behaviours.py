"""What the ranks of a group do with the collectives; each returns what the test compares."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import tfdist
from tfdist._src.comm.device_communicator import compressed_all_reduce
from tfdist.compression import CODECS

TYPES = ["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def own(dtype, shape=(5, 3)):
    """A value that differs between ranks, and whose sums over few ranks are exact."""
    rank = tfdist.collective.communicator().rank
    values = (np.arange(np.prod(shape)).reshape(shape) * (rank + 1)) % 7
    return tf.cast(values, dtype)


def as_numpy(nest):
    return tf.nest.map_structure(lambda t: tf.cast(t, tf.float64).numpy(), nest)


def reductions(strategy):
    results = {}
    for dtype in TYPES:
        for op in ("sum", "mean", "min", "max", "product"):
            if op == "mean" and not tf.as_dtype(dtype).is_floating:
                continue
            results[f"{dtype} {op}"] = as_numpy(tfdist.collective.all_reduce(own(dtype), op))
    return results


def nests(strategy):
    value = {"a": own("float32"), "b": (own("int64"), own("float32", (0, 2))), "c": own("int64")}
    return as_numpy(tfdist.collective.all_reduce(value))


def moves(strategy):
    group = tfdist.collective.communicator()
    rank, size = group.rank, group.size
    uneven = tf.fill([rank, 2], float(rank))
    rows = tf.constant([(rank + other) % 3 for other in range(size)], tf.int64)
    sent = tf.repeat(tf.range(size, dtype=tf.float32) * 10 + rank, rows)
    received, received_rows = tfdist.collective.all_to_all(sent, rows)
    mine = own("float32", (6 * size, 2))
    tfdist.collective.barrier()
    return {
        "gather": as_numpy(tfdist.collective.all_gather(own("int32"))),
        "uneven gather": as_numpy(tfdist.collective.all_gather(uneven)),
        "broadcast": as_numpy(tfdist.collective.broadcast(own("float64"), size - 1)),
        "all to all": as_numpy(received),
        "rows": as_numpy(received_rows),
        "scatter": as_numpy(tfdist.collective.reduce_scatter(mine)),
        "whole": as_numpy(tfdist.collective.all_reduce(mine)),
    }


def messages(strategy):
    """Round the ring, in a graph."""
    group = tfdist.collective.communicator()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    @tf.function
    def exchange(value):
        if group.rank == 0:
            tfdist.collective.send(value, after, name="round")
            return tfdist.collective.receive([4], tf.float32, before, name="round")
        received = tfdist.collective.receive([4], tf.float32, before, name="round")
        tfdist.collective.send(value, after, name="round")
        return received

    return [as_numpy(exchange(tf.fill([4], float(group.rank + i)))) for i in range(3)]


def in_loops_and_branches(strategy):
    @tf.function
    def loop(value, steps):
        for i in tf.range(steps):
            if i % 2 == 0:
                value = tfdist.collective.all_reduce(value)
            else:
                value = tfdist.collective.all_reduce(value, "max") + 1.0
        return value

    return [as_numpy(loop(own("float32"), tf.constant(n))) for n in (0, 1, 4)]


def gradients(strategy):
    group = tfdist.collective.communicator()
    results = {}
    calls = {
        "all_reduce": lambda x: tfdist.collective.all_reduce(x),
        "mean": lambda x: tfdist.collective.all_reduce(x, "mean"),
        "reduce_scatter": lambda x: tfdist.collective.reduce_scatter(x),
        "all_gather": lambda x: tfdist.collective.all_gather(x),
        "broadcast": lambda x: tfdist.collective.broadcast(x, 1),
        "all_to_all": lambda x: tfdist.collective.all_to_all(x)[0],
    }
    for name, call in calls.items():

        def of(x, call=call):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
                weights = tf.reshape(tf.range(tf.size(y), dtype=tf.float32), tf.shape(y))
                loss = tf.reduce_sum(y * weights) * (group.rank + 1)
            return tape.gradient(loss, x)

        x = own("float32", (2 * group.size, 2))
        results[name] = as_numpy(of(x))
        results[f"{name} in a graph"] = as_numpy(tf.function(of)(x))
    return results


def split(strategy):
    """Pairs of ranks; with an odd number one is left alone."""
    world = tfdist.collective.communicator()
    members = [r for r in range(world.size) if r // 2 == world.rank // 2]
    pair = world.split("pairs", members)
    total = tfdist.collective.all_reduce(float(world.rank), communicator="pairs")
    place = pair.rank, pair.size
    pair.close()
    none = world.split("first only", [0] if world.rank == 0 else [])
    found = none is not None
    if none:
        none.close()
    return {"total": as_numpy(total), "place": place, "found": found}


def traffic(strategy):
    before = tfdist.collective.statistics()
    tfdist.collective.all_reduce(tf.zeros([1 << 20]))
    after = tfdist.collective.statistics()
    return {
        "collectives": after.collectives - before.collectives,
        "shared": after.shared_bytes - before.shared_bytes,
        "sent": after.sent_bytes - before.sent_bytes,
    }


def wrong_calls(strategy):
    """One line each, and the communicator lives on."""
    size = tfdist.collective.communicator().size
    calls = [
        lambda: tfdist.collective.all_reduce(tf.zeros([2]), "median"),
        lambda: tfdist.collective.all_reduce(tf.zeros([2]), communicator="nobody"),
        lambda: tfdist.collective.all_reduce(tf.zeros([2], tf.int32), "mean"),
        lambda: tfdist.collective.reduce_scatter(tf.zeros([size * 2 + 1])),
        lambda: tfdist.collective.all_gather(tf.zeros([])),
        lambda: tfdist.collective.broadcast(tf.zeros([2]), 99),
        lambda: tfdist.collective.send(tf.zeros([2]), 99),
        lambda: tfdist.collective.all_to_all(tf.zeros([4]), [9] * size),
    ]
    messages = [message(call) for call in calls]
    tfdist.collective.barrier()
    return messages


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_shape(strategy):
    rank = tfdist.collective.communicator().rank
    first = message(lambda: tfdist.collective.all_reduce(tf.zeros([3 + rank]), name="x"))
    return first, message(lambda: tfdist.collective.barrier())


def empty_rows_beyond_a_shape(strategy):
    """Rows of no bytes, of which all ranks together have more elements than a shape can count."""
    return message(lambda: tfdist.collective.all_gather(tf.zeros([1 << 42, 1 << 20, 0])))


def other_order(strategy):
    rank = tfdist.collective.communicator().rank

    @tf.function
    def step(value):
        names = ["a", "b"] if rank else ["b", "a"]
        for name in names:
            value = tfdist.collective.all_reduce(value, name=name)
        return value

    return message(lambda: step(tf.zeros([3])))


def one_aborts(strategy):
    group = tfdist.collective.communicator()
    tfdist.collective.barrier()
    if group.rank == 1:
        group.abort("the cat walked over the keyboard")
    return message(lambda: [tfdist.collective.all_reduce(tf.zeros([3])) for _ in range(100)])


def compressed(strategy, name, steps):
    """Sums in a graph, step after step, with what each step has lost."""
    encoding = CODECS[name]()._encoding
    group = tfdist.collective.communicator()
    shapes = [(700, 3), (0, 2), (5,), (300_000,)]
    errors = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    @tf.function
    def reduce(tensors, seed):
        return compressed_all_reduce(group, tensors, encoding, errors, seed, within_hosts=True)

    totals = []
    for step in range(steps):
        values = [gradient(shape, group.rank, step) for shape in shapes]
        totals.append(as_numpy(reduce([tf.constant(v) for v in values], tf.constant(step))))
    return totals, [e.numpy() for e in errors]


def gradient(shape, rank, step):
    """A rank's values, which others can know."""
    return np.random.default_rng([rank, step]).normal(size=shape).astype(np.float32)


def compressed_wrongly(strategy):
    group = tfdist.collective.communicator()
    encoding = CODECS["int8"]()._encoding
    messages = []
    for error in (tf.zeros([3]), tf.zeros([4], tf.float64)):
        try:
            compressed_all_reduce(group, [tf.zeros([4])], encoding, [tf.Variable(error)])
        except tf.errors.InvalidArgumentError as refusal:
            messages.append(refusal.message)
    return messages
