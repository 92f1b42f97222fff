"""One process with several devices, and what a strategy is told of its communication."""

from __future__ import annotations

from unittest import mock

import numpy as np
import tensorflow as tf

import tfdist
from tests.strategies.behaviours.common import compile_mlp, fit, outcome, rows


def train(strategy, devices):
    """Trains under a MirroredStrategy of these devices; without any strategy in one process."""
    x, y = rows(45)
    mirrored = strategy and tfdist.MirroredStrategy(devices)
    model = compile_mlp(mirrored)
    history = fit(model, x, y, batch_size=20, validation_data=(x, y))
    evaluation = model.evaluate(x, y, verbose=0)
    return outcome(model, history, evaluation=evaluation, p=model.predict(x, verbose=0))


def replicas(strategy):
    """For some devices, how many replicas there are and where."""
    found = {}
    for devices in (None, ["CPU:1"], ["/CPU:1", "CPU:0"]):
        mirrored = tfdist.MirroredStrategy(devices)
        places = mirrored.extended.worker_devices
        found[str(devices)] = [place.rsplit("/", 1)[-1] for place in places]
        assert mirrored.num_replicas_in_sync == len(places)
    return found


def reduced_by(strategy):
    """The sum outside of replicas goes through the CrossDeviceOps that was given."""
    given = tf.distribute.ReductionToOneDevice()
    mirrored = tfdist.MirroredStrategy(cross_device_ops=given)
    values = mirrored.experimental_distribute_values_from_function(
        lambda context: tf.constant(3.0 + context.replica_id_in_sync_group)
    )
    with mock.patch.object(given, "reduce", wraps=given.reduce) as reduce:
        total = mirrored.reduce("sum", values, axis=None)
    return float(total), reduce.call_count


def small_packs(strategy, bytes_per_pack):
    """Trains with packs of so many bytes; and in how many collectives."""
    if strategy:
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        strategy = tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    x, y = rows(20)
    model = compile_mlp(strategy)
    fit(model, x, y, epochs=1, batch_size=20)
    before = _collectives(strategy)
    fit(model, x, y, epochs=1, batch_size=20)
    return outcome(model), _collectives(strategy) - before


def _collectives(strategy):
    return strategy.extended.workers.traffic().collectives if strategy else 0


def another_implementation(strategy):
    """What is said of an implementation that the native collectives do not have."""
    implementation = tf.distribute.experimental.CommunicationImplementation.NCCL
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    with mock.patch("tfdist.strategies.multi_worker.say") as say:
        tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    return [call.args[0] for call in say.call_args_list]


def another_timeout(strategy):
    """What is said of timeouts for strategies after the first."""
    with mock.patch("tfdist.strategies.communicators.say") as say:
        for seconds in (strategy.extended.group.options.collective_timeout, 7.0, 8.0):
            options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)
            tfdist.MultiWorkerMirroredStrategy(communication_options=options)
    return [call.args[0] for call in say.call_args_list]


def weights_everywhere(strategy):
    """Each device holds the same weights after training."""
    mirrored = tfdist.MirroredStrategy()
    model = compile_mlp(mirrored)
    fit(model, *rows(45), batch_size=20)
    copies = [[np.array(c) for c in v.value.values] for v in model.trainable_variables]
    return all(np.array_equal(one, other) for one, other in copies)
