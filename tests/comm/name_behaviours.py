"""What becomes of the names of communicators."""

from __future__ import annotations

import tensorflow as tf

import tfdist
from tests.comm.behaviours import message


def taken_over(strategy):
    """Splits twice by one name, or by that of all workers; then what has the names still sums."""
    world = tfdist.collective.communicator()
    members = list(range(world.size))

    def total(name):
        return float(tfdist.collective.all_reduce(1.0, communicator=name))

    @tf.function
    def in_a_function():
        return tfdist.collective.all_reduce(1.0, communicator="half")

    half = world.split("half", members)
    refused = [
        message(lambda name=name: world.split(name, members)) for name in ("half", "workers")
    ]
    # One rank alone has the name.
    refused.append(message(lambda: world.split("half", [0] if world.rank == 0 else [])))
    refused += [message(lambda n=n: world.split(n, members)) for n in ("session", "notices")]
    before = float(in_a_function())
    sums = [total("half"), total("workers")]
    half.close()
    successor = world.split("half", members)
    after = float(in_a_function())
    successor.close()
    return refused, [*sums, before, after]


def with_a_strategy_of_one(strategy):
    """A strategy of this process alone, in a worker of a job."""
    before = tfdist.collective.communicator()
    alone = tfdist.MirroredStrategy()
    size = tfdist.collective.communicator().size
    same = tfdist.collective.communicator() is before
    mine = float(alone.reduce("SUM", 1.0, axis=None))
    traffic = tfdist.collective.statistics().collectives
    total = float(tfdist.collective.all_reduce(1.0))
    more = tfdist.collective.statistics().collectives - traffic
    return same, size, mine, total, more


def with_a_strategy_of_one_by_tensorflow(strategy):
    tfdist.MirroredStrategy()
    return message(lambda: tfdist.collective.all_reduce(1.0))


def a_strategy_of_one_first():
    """A worker's program."""
    alone = tfdist.MirroredStrategy()
    first = float(tfdist.collective.all_reduce(1.0))
    tfdist.MultiWorkerMirroredStrategy()
    print(first, float(alone.reduce("SUM", 1.0, axis=None)), end=" ")
    print(float(tfdist.collective.all_reduce(1.0)))


if __name__ == "__main__":
    a_strategy_of_one_first()
