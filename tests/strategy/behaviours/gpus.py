"""What computes sums of what is on GPUs, which threads stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.harness import gpus
from tests.strategy.behaviours.common import compile_mlp, fit, mlp, outcome, rows
from tests.strategy.behaviours.compression import codec_of, strategy_of
from tfdist._src.comm import gpu, native_ops, tracing
from tfdist._src.keras.fit import atomic_step
from tfdist._src.native import gpu_kernels
from tfdist._src.strategy.commit_point import find_writes
from tfdist.compression import Auto, Int8, OneBit, Policy
from tfdist.errors import NativeUnavailableError, ProgramMismatchError

_NCCL = ("ncclAllReduce", "ncclReduceScatter", "ncclBroadcast", "ncclAllGather")


def reduce(strategy):
    """What a reduction of several types has taken, and its sums."""

    def values(rank):
        return [
            tf.fill([5], float(rank)),
            tf.fill([3], rank),
            tf.fill([7], tf.cast(2 * rank, "half")),
        ]

    @tf.function
    def run():
        return [each.all_reduce(values(each.rank + 1)) for each in strategy.extended.replicas]

    with _taken() as taken:
        found = [[value.numpy()[0].item() for value in sums] for sums in run()]
    return [type(each).__name__ for each in strategy.extended.replicas], taken, found


def move(strategy):
    """What each replica has of a gather of unlike parts, a broadcast and a scattered sum."""

    @tf.function
    def run():
        found = []
        for each in strategy.extended.replicas:
            with tf.device(strategy.extended.worker_devices[len(found)]):
                rows = tf.fill([each.rank + 1, 2], float(each.rank))
                whole = tf.reshape(tf.range(2.0 * each.size), [-1, 2])
                found.append(
                    [
                        each.all_gather(rows),
                        each.broadcast(tf.fill([3], each.rank + 7.0)),
                        each.reduce_scatter(whole),
                    ]
                )
        return found

    with _taken() as taken:
        return [[value.numpy().tolist() for value in values] for values in run()], taken


def train_mirrored(strategy):
    """The losses on all GPUs of this process, by a mirrored strategy, and what sums have taken."""
    mirrored = strategy and tfdist.MirroredStrategy(communication="native")
    with _taken() if strategy else contextlib.nullcontext() as taken:
        history = fit(compile_mlp(mirrored), *rows(20), batch_size=10)
    return history["loss"], taken


def train_in_many_buckets(strategy):
    """Training where each gradient has a collective of its own; and how many all-reduces wait."""
    waits = []
    await_launched = native_ops.await_launched

    def note(*args, **settings):
        waits.append(len(args[1]))
        return await_launched(*args, **settings)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(native_ops, "await_launched", note))
        for each in strategy.extended.replicas if strategy else ():
            stack.enter_context(mock.patch.object(each.on_gpu, "bucket_bytes", 64))
        model = compile_mlp(strategy, keras.optimizers.Adam)
        history = fit(model, *rows(40), batch_size=10, epochs=2)
    return {"loss": history["loss"], "weights": model.get_weights()}, waits


def train_with_checked_numerics(strategy):
    """The same where TensorFlow looks at the result of each operation."""
    tf.debugging.enable_check_numerics()
    try:
        return train_in_many_buckets(strategy)
    finally:
        tf.debugging.disable_check_numerics()


def reduce_much(strategy):
    """What the sum of a tensor has taken that is larger than kernels are for; and what traffic."""
    communicator = strategy.extended.replicas[0]
    communicator.all_reduce([tf.ones([100])])
    before = tfdist.collective.statistics()
    with _taken() as taken:
        communicator.all_reduce([tf.ones([100_000])])
    after = tfdist.collective.statistics()
    moved = after.device_bytes - before.device_bytes
    return taken, moved, after.shared_bytes - before.shared_bytes


def reduce_what_comes_late(strategy):
    """The sum of what GPUs have not computed yet when it is asked for, in a graph."""

    def later(x):
        # Its library was loaded as that of a device, which gives no functions for its operations.
        value = tf.compat.v1.get_default_graph().create_op("TestsLater", [x], [x.dtype]).outputs[0]
        return tf.ensure_shape(value, x.shape)

    @tf.function(input_signature=[tf.TensorSpec([1000])])
    def run(x):
        sums = []
        for each in strategy.extended.replicas:
            with tf.device(f"GPU:{len(sums)}"):
                sums.append(each.all_reduce([later(x)])[0])
        return sums[0]

    return [run(tf.fill([1000], float(i))).numpy().tolist() for i in range(3)]


def compress(strategy, name, *, within_hosts=True):
    """The outcome of training with a codec, what it has taken, and where the codec keeps state.

    What it has taken ends with whether encoded values went by NCCL.
    """
    x, y = rows(96)
    sent = gpus.nccl_calls("ncclSend")
    with _taken() as taken:
        model = compile_mlp(strategy_of(name, within_hosts=within_hosts))
        history = fit(model, x, y, batch_size=16, epochs=4)
    taken.append(gpus.nccl_calls("ncclSend") > sent)
    kept = model.optimizer.compression_state.variables
    devices = sorted({tf.DeviceSpec.from_string(variable.device).device_type for variable in kept})
    return outcome(model, history), taken, devices


def compress_between_hosts(strategy, name):
    """As `compress`, where the GPUs of a host sum exactly; and where it did so by itself.

    That is whether the communicators of the host's workers, and of their GPUs, have run anything.
    """
    result = compress(strategy, name, within_hosts=False)
    if strategy.extended.replicas[0].rank == 2:  # alone on its host
        return *result, []
    names = ("host", "host, GPUs")
    return *result, [tfdist.collective.statistics(each).collectives > 0 for each in names]


def compress_on_several(strategy, name):
    """As `compress`, and the communicators by which encoded values go."""
    names = set()
    all_reduce = native_ops.compressed_all_reduce

    def note(*args, **settings):
        names.add(args[6])
        return all_reduce(*args, **settings)

    with mock.patch.object(native_ops, "compressed_all_reduce", note):
        return *compress(strategy, name), sorted(names)


def compress_in_buckets(strategy, name):
    """The outcome where each gradient has a collective of its own; and which are awaited."""
    awaited = []
    all_reduce = native_ops.compressed_all_reduce

    def note(*args, **settings):
        awaited.append(settings["awaited"])
        return all_reduce(*args, **settings)

    with mock.patch.object(native_ops, "compressed_all_reduce", note):
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=64)
        policy = Policy(codec_of(name), smallest=0, within_hosts=True)
        compressing = tfdist.MultiWorkerMirroredStrategy(
            compression=policy, communication_options=options
        )
        model = compile_mlp(compressing)
        history = fit(model, *rows(96), batch_size=16, epochs=4)
    return outcome(model, history), awaited


def compress_with_kernels_on_one(_, name):
    """As `compress`, where the GPUs of other workers than the first have no kernels."""
    find = gpu.find

    def find_without(*args):
        return [dataclasses.replace(each, kernels="") for each in find(*args)]

    is_first = os.environ["FAKE_CUDA_FIRST"] == "0"
    with contextlib.nullcontext() if is_first else mock.patch.object(gpu, "find", find_without):
        return compress(None, name)


def choose(strategy):
    """The losses with a codec that is chosen by measurement, and what the choice has taken."""
    policy = Policy(Auto((Int8(), OneBit())), smallest=0, within_hosts=True)
    model = compile_mlp(tfdist.MultiWorkerMirroredStrategy(compression=policy))
    with _taken() as taken:
        history = fit(model, *rows(96), batch_size=16, epochs=2)
    return history["loss"], taken


def writes(strategy):
    """How many variables a step keeps, and whether it holds the others' writes back."""
    found = []

    def note(graph):
        found.append(find_writes(graph))
        return found[-1]

    with mock.patch.object(atomic_step, "find_writes", note):
        model = _with_counts(strategy)
        fit(model, *rows(20), batch_size=10)
    return [(len(one.kept), one.gated) for one in found]


def stalls(strategy):
    """The communicators that are told of a step that waits for sums which it has begun."""
    told = set()
    ready = tracing.ready

    def note(communicator, key="", **settings):
        if not key:
            told.add(communicator)
        return ready(communicator, key, **settings)

    with mock.patch.object(tracing, "ready", note):
        fit(_with_counts(strategy), *rows(20), batch_size=10)
    return sorted(told)


def train_with(_, settings):
    """What a strategy with these settings sums by, what that has taken, and what was said.

    Or why there is no strategy.
    """
    with _said() as lines:
        try:
            with mock.patch.dict(os.environ, settings):
                strategy = tfdist.MultiWorkerMirroredStrategy(communication="native")
        except NativeUnavailableError as error:
            return str(error)
        with _taken() as taken:
            history = fit(compile_mlp(strategy), *rows(20), batch_size=10)
    assert np.isfinite(history["loss"]).all()
    return type(strategy.extended.replicas[0]).__name__, taken, lines


def train_without_nvrtc(_):
    """As `train_with`, where no kernels have been compiled, and nothing can compile them."""
    with contextlib.ExitStack() as stack:
        for place, name, found in [
            (gpu_kernels, "find", None),
            (gpu_kernels.nvidia, "folders", []),
            (gpu_kernels.ctypes.util, "find_library", None),
        ]:
            stack.enter_context(mock.patch.object(place, name, lambda *_, found=found: found))
        return train_with(None, {})


def without_a_gpu_on_one(_):
    """What strategies say where another worker than the first sees no GPU."""
    if os.environ["FAKE_CUDA_FIRST"] != "0":
        tf.config.set_visible_devices([], "GPU")
    try:
        tfdist.MultiWorkerMirroredStrategy(communication="native")
    except ProgramMismatchError as error:
        return str(error)
    return "nothing"


class _Count(keras.metrics.Metric):
    """Of all rows."""

    def __init__(self):
        super().__init__(name="count")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.shape(y_true)[0])

    def result(self):
        return self.rows


def _with_counts(strategy):
    with strategy.scope():
        model = mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=[_Count()])
    return model


@contextlib.contextmanager
def _said():
    """Collects the lines that this process writes to stderr, in C++, too."""
    lines = []
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        lines += file.read().decode().splitlines()


@contextlib.contextmanager
def _taken():
    """Notes whether kernels of tfdist, NCCL, and copies were taken."""
    counts = [gpus.launches, lambda: sum(map(gpus.nccl_calls, _NCCL)), gpus.copies]
    before = [count() for count in counts]
    taken = []
    yield taken
    taken += [count() > old for count, old in zip(counts, before, strict=True)]
