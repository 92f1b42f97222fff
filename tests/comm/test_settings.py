"""The settings of the native collectives, between ranks that are threads of this process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist._src.comm.device_communicator import open_local_communicators
from tfdist._src.group import Communicators, Group
from tfdist._src.options import Options
from tfdist._src.strategy.communication import worker_communicator

ALGORITHMS = ("auto", "shm", "one_shot", "two_shot", "ring", "hierarchical")


def communicators(ranks, **variables):
    options = Options.from_environment(variables)
    return open_local_communicators("ranks", [f"rank {i}" for i in range(ranks)], options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_sums_the_same(algorithm):
    three = communicators(3, TFDIST_ALGORITHM=algorithm)
    sums = [None] * 3

    def reduce(rank):
        sums[rank] = three[rank].all_reduce([tf.fill([1001], float(rank + 1))])[0].numpy()

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in three:
        one.close()
    assert all(np.array_equal(total, np.full(1001, 6.0)) for total in sums)


def test_an_algorithm_that_there_is_not():
    with pytest.raises(ValueError, match=r"smoke") as raised:
        communicators(2, TFDIST_ALGORITHM="smoke")
    assert all(name in str(raised.value) for name in ALGORITHMS[1:])


def test_who_does_not_come_is_named(capfd):
    """First in a warning, then in the error."""
    first, second = communicators(2, TFDIST_STALL_WARNING="0.1", TFDIST_COLLECTIVE_TIMEOUT="1")
    with pytest.raises(tf.errors.OpError) as raised:
        first.all_reduce([tf.ones([3])])
    for one in (first, second):
        one.close()
    assert "rank 1" in str(raised.value)
    assert any("rank 1" in line for line in capfd.readouterr().err.splitlines())


def test_the_timeout_of_a_strategy():
    """`communication_options` of the first strategy sets it, and without, the setting."""
    asked = []

    class Recording(Group):
        def __init__(self):
            self.options = Options(collective_timeout=60.0)
            self.topology = type("Two", (), {"size": 2})

        def native(self, name="workers", timeout=None):
            asked.append(Communicators(self.options)._with(timeout).collective_timeout)

    for seconds in (None, 7.0):
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
        worker_communicator(Recording(), options, native=True)
    assert asked == [60.0, 7.0]
