"""Trainings in stages in which a worker fails in a step, and the state that all are left in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline.compressed_behaviours import policy_of
from tests.pipeline.layers import TiedHead
from tests.strategy.behaviours.hooks import calling_before, running
from tfdist._src.comm import native_ops, tokens
from tfdist._src.sharding import sharded_by

BATCH, STEPS, WIDTH, TOKENS = 12, 6, 8, 10
_COLLECTIVES = {
    "all_reduce": 4,
    "compressed_all_reduce": -1,
    "reduce_scatter": -1,
    "all_gather": -1,
    "broadcast": -1,
    "send": -1,
    "receive": -1,
}


def undisturbed(strategy, case):
    """Trains.

    Returns:
        The state before the first step and after each; the communication of a step on this worker,
        in the order of the program; whether all that a step writes is kept; how many steps count.
    """
    model = _make(case)
    before, states, keeps = _progress(model).committed_steps, [], []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: None if batch else states.append(_state(model)),
        on_train_batch_end=lambda batch, logs: states.append(_state(model)),
    )
    begins = tokens.begins

    def note(*, complete):
        keeps.append(complete)
        return begins(complete=complete)

    with mock.patch.object(tokens, "begins", note), _hooked(lambda name, number: None) as traced:
        _fit(model, case, record)
    return states, traced[-1], keeps[-1], _progress(model).committed_steps - before


def until(strategy, case, step, rank, place, dies):
    """Trains; in a step, a worker fails.

    Args:
        case: what to train.
        step: the number of the step.
        rank: the worker.
        place: before which part of its communication it fails, by the number in the program; None
            for after all, when variables are updated; -1 before the step.
        dies: whether its process does, otherwise it raises.

    Returns:
        The state after the error, how many steps count, and whether the state is torn.
    """
    model = _make(case)
    fails = strategy.extended.worker_rank == rank
    taken = -1

    def begin(batch, logs):
        nonlocal taken
        taken = batch
        if place == -1:
            fail()

    def fail(name=None, number=None):
        if fails and taken == step and number == (None if place == -1 else place):
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this worker fails")

    before = _progress(model).committed_steps
    hook = calling_before(tokens, "commits", fail) if place is None else _hooked(fail)
    with hook if fails else contextlib.nullcontext():
        try:
            _fit(model, case, keras.callbacks.LambdaCallback(on_train_batch_begin=begin))
        except (tf.errors.OpError, RuntimeError) as error:
            progress = _progress(model)
            return _state(model), progress.committed_steps - before, progress.torn, str(error)
    return None


def _progress(model):
    return model.distribute_strategy.extended.progress


@contextlib.contextmanager
def _hooked(call):
    """Calls a function before all that a step communicates, with its name and its number.

    Yields:
        For each trace of a step, the names.
    """
    traced = []

    def hook(name, position, original):
        def hooked(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            if tf.executing_eagerly() or graph.outer_graph.building_function:
                return original(*args, **kwargs)
            if not hasattr(graph, "communication"):
                graph.communication = []
                traced.append(graph.communication)
            key, number = args[position] or name, len(graph.communication)
            graph.communication.append(key)
            with running(lambda: call(key, number)):
                return original(*args, **kwargs)

        return hooked

    with contextlib.ExitStack() as patches:
        for name, position in _COLLECTIVES.items():
            original = getattr(native_ops, name)
            hooked = hook(name, position, original)
            patches.enter_context(mock.patch.object(native_ops, name, hooked))
        yield traced


def _state(model):
    """A digest of each variable's value on this worker."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    compression, sharded = getattr(inner, "compression_state", None), sharded_by(model.optimizer)
    variables = [*model.variables, *model.metrics_variables, *model._read_variables]
    variables += model.optimizer.variables
    variables += [] if compression is None else compression.variables
    variables += [] if sharded is None else sharded.shards
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    copies = [v.values[0] if hasattr(v, "values") else v for v in values]
    return [
        f"{v.name} {hashlib.sha256(np.asarray(v.numpy()).tobytes()).hexdigest()}" for v in copies
    ]


def _fit(model, case, *callbacks):
    rows, random = BATCH * STEPS - 5, np.random.default_rng(0)
    if "tied" in case:
        x = random.integers(0, TOKENS, (rows, 4)).astype("int32")
        y = np.roll(x, 1, axis=1)
    else:
        x = random.normal(size=(rows, WIDTH)).astype("float32")
        y = random.integers(0, 3, rows)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))


def _make(case):
    """A compiled model, made of the words of a case."""
    words = set(case.split())
    hybrid = "hybrid" in words
    codec = next((word for word in words if word in ("int8", "topk", "powersgd")), None)
    schedule = next((s for s in ("zb_h1", "interleaved", "zbv") if s in words), "1f1b")
    strategy = tfdist.HybridStrategy(
        pipeline_size=2 if hybrid else None,
        microbatches=4,
        schedule=schedule,
        compression=policy_of(codec) if codec else None,
        shard_optimizer="sharded" in words,
    )
    keras.utils.set_random_seed(1)
    policy = keras.mixed_precision.dtype_policy()
    with strategy.scope():
        try:
            if "mixed" in words:
                keras.mixed_precision.set_dtype_policy("mixed_float16")
            build = next((b for word, b in _MODELS.items() if word in words), _dense)
            model = tfdist.PipelineModel(build, balance="parameters")
        finally:
            keras.mixed_precision.set_dtype_policy(policy)
        optimizer = _optimizer(words)

        def iterations(y_true, y_pred):
            return tf.cast(optimizer.iterations, tf.float32)

        metrics = [Iterations(optimizer)] if "reading" in words else []
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy", *metrics])
    return model


class Iterations(keras.metrics.Mean):
    """Whose result depends on how far the optimizer is."""

    def __init__(self, optimizer):
        super().__init__(name="iterations")
        self._counted = optimizer

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(1.0)

    def result(self):
        return super().result() * tf.cast(self._counted.iterations, tf.float32)


def _optimizer(words):
    settings = {}
    if "accumulation" in words:
        settings["gradient_accumulation_steps"] = 2
    if "clipped" in words:
        settings["global_clipnorm"] = 0.1
    if "averages" in words:
        settings |= {"use_ema": True, "ema_overwrite_frequency": 2}
    optimizer = keras.optimizers.Adam(0.01, **settings)
    if "mixed" in words or "scaled" in words:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=4.0, dynamic_growth_steps=2
        )
    return optimizer


def _dense():
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            *(
                layer
                for seed in range(4)
                for layer in (
                    keras.layers.Dense(WIDTH, activation="tanh"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.3, seed=seed),
                )
            ),
            keras.layers.Dense(3),
        ]
    )


def _tied():
    inputs = keras.Input((4,), dtype="int32")
    embedding = keras.layers.Embedding(TOKENS, WIDTH, name="embedding")
    x = embedding(inputs)
    for _ in range(4):
        x = keras.layers.Dense(WIDTH, activation="tanh")(x)
    return keras.Model(inputs, TiedHead(embedding, name="head")(x))


def _shared():
    """With a layer whose state changes in several stages."""
    inputs = x = keras.Input((WIDTH,))
    dropout = keras.layers.Dropout(0.3, seed=1)
    for _ in range(4):
        x = dropout(keras.layers.Dense(WIDTH, activation="tanh")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def _untrained():
    """Whose last stage has nothing to train."""
    layers = [keras.layers.Dense(WIDTH, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Activation("tanh")])


_MODELS = {"tied": _tied, "shared": _shared, "untrained": _untrained}
