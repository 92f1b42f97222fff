"""Trainings in pipelines that lose workers and get others."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline.layers import TiedHead
from tests.recovery.behaviours import surviving
from tests.strategy.behaviours.common import scope
from tfdist._src import cluster
from tfdist._src.cluster import ResolvedJob
from tfdist._src.comm import tokens
from tfdist._src.strategy import multi_worker

MICROBATCHES, TOKENS = 2, 10


def _stack(settings: dict[str, Any]) -> keras.Model:
    dense = keras.layers.Dense
    if settings.get("tied"):
        inputs = keras.Input((8,))
        x = keras.layers.Lambda(lambda t: tf.cast(tf.abs(t) * 3.0, tf.int32) % TOKENS)(inputs)
        embedding = keras.layers.Embedding(TOKENS, 8, name="embedding")
        x = surviving.Dying()(embedding(x))
        x = dense(8, activation="tanh", name="first")(x)
        x = surviving.Dying()(dense(8, activation="tanh")(x))
        x = keras.layers.GlobalAveragePooling1D()(TiedHead(embedding, name="head")(x))
        return keras.Model(inputs, dense(3, dtype="float32")(x))
    return keras.Sequential(
        [
            keras.Input((8,)),
            dense(16, activation="tanh"),
            surviving.Dying(),
            dense(16, activation="tanh", name="first"),
            dense(16, activation="tanh"),
            surviving.Dying(),
            dense(3, dtype="float32"),
        ]
    )


def _model(strategy: Any, settings: dict[str, Any]) -> keras.Model:
    with scope(strategy):
        if strategy is None:
            model = _stack(settings)
        else:
            model = tfdist.PipelineModel(lambda: _stack(settings), cuts=["first"])
        model.compile(
            keras.optimizers.Adam(0.01, **settings.get("optimizer", {})),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=settings.get("steps_per_execution", 1),
        )
    return model


def trained(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """As `surviving.trained`; in pipelines of two workers."""
    me = tfdist.rank() if strategy else 0
    fault = faults.get(me) if strategy else None
    context: Any = contextlib.nullcontext()
    if strategy is not None and not isinstance(strategy, tfdist.HybridStrategy):
        strategy = make(settings)
    if fault is not None and fault[0] in ("forward", "backward"):
        faults = {**faults, me: (fault[0], fault[1] * MICROBATCHES, fault[2])}
    if fault is not None and fault[0] in ("prepares", "commits"):
        context = _dying_before(*fault[:2])
        faults = {rank: what for rank, what in faults.items() if rank != me}
    late = settings.get("late", {}).get(me)
    if strategy is not None and late is not None:
        context = _failing_late(strategy.extended.group, late)
    if settings.get("saved"):
        others, backup = settings.get("more", list), tfdist.callbacks.BackupAndRestore
        saving = functools.partial(backup, settings["saved"], save_every=3, asynchronous=False)
        settings = {**settings, "more": lambda: [*others(), saving()]}
    made: list[keras.Model] = []

    def build(*given: Any) -> keras.Model:
        made.append(_model(*given))
        return made[-1]

    with (
        context,
        mock.patch.object(surviving, "make_model", build),
        mock.patch.object(tokens, "redo", wraps=tokens.redo) as redo,
    ):
        result = surviving.trained(strategy, settings, faults)
    if strategy is not None:
        result["held"] = {key: np.asarray(v) for key, v in held_of(made[0]).items()}
        result["redone"] = redo.call_count
    result["standing"] = strategy.extended.progress.committed_steps if strategy else None
    return result


def held_of(model: keras.Model) -> dict[str, Any]:
    """This worker's weights and slots, by their numbers in the whole model."""
    weights, slots = model.held_variables()
    return {**weights, **slots}


def make(settings: dict[str, Any]) -> Any:
    """The strategy."""
    return tfdist.HybridStrategy(
        pipeline_size=2, microbatches=MICROBATCHES, schedule=settings.get("schedule", "1f1b")
    )


def _dying_before(name: str, step: int) -> Any:
    """This worker dies before an operation of a step that others may have ended."""
    return _before(name, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _before(name: str, step: int, call: Any) -> Any:
    original, taken = getattr(tokens, name), 0

    def count() -> Any:
        nonlocal taken
        taken += 1
        if taken == step + 1:
            call()
        return np.int32(0)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(count, [], tf.int32)]):
            return original(*args, **kwargs)

    return mock.patch.object(tokens, name, hooked)


def _failing_late(group: Any, step: int) -> Any:
    """A step fails here when all is communicated, and another worker is lost, which had it."""

    def fail() -> None:
        surviving._await(lambda: group.session.lost_ranks)
        raise RuntimeError("this worker has not heard the end of the step")

    return _before("commits", step, fail)


def coming(
    _: Any,
    first: list[int],
    places: dict[int, int],
    step: int,
    faults: dict[int, Any],
    sign: str,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Trains on some of the workers, to which others come.

    Args:
        first: the workers.
        places: for each of the others, in whose place it comes.
        step: after how many steps those that train wait until they have come.
        faults: as of `trained`.
        sign: a file that tells the others to come.
        settings: as of `trained`; "dying" has the faults of those that come, by their numbers.
    """
    settings = settings or {}
    everyone = cluster.from_environment()
    came = everyone.rank not in first
    place = places[everyone.rank] if came else first.index(everyone.rank)
    workers = [everyone.workers[rank] for rank in first]
    os.environ["TFDIST_ELASTIC"] = "1"
    if came:
        surviving._await(pathlib.Path(sign).exists)
        workers[place] = everyone.workers[everyone.rank]
    topology = cluster.Topology(tuple(workers), place, "worker", everyone.rank)
    with mock.patch.object(
        multi_worker, "read_cluster", return_value=ResolvedJob("test", topology)
    ):
        strategy = make(settings)
    wait = functools.partial(surviving.AwaitNewcomers, step, sign, len(places))
    if came:  # It is rank 0 as long as it is alone.
        dying = settings.get("dying", {}).get(everyone.rank)
        faults = {} if dying is None else {0: dying}
    return trained(strategy, {**settings, "more": lambda: [wait()]}, faults)


def refused(_: Any) -> dict[str, str]:
    """What is said where the workers of a model in stages cannot change."""
    data = np.ones((8, 8), "float32"), np.zeros(8)

    def said(**settings: Any) -> str:
        cuts = settings.pop("cuts", None)
        strategy = tfdist.HybridStrategy(microbatches=MICROBATCHES, **settings)
        with strategy.scope():
            model = tfdist.PipelineModel(lambda: _stack({}), cuts=cuts)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        try:
            model.fit(*data, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
        except tfdist.errors.UnsupportedError as error:
            return str(error)
        return "nothing"

    return {
        "cut by time": said(pipeline_size=2),
        "compression": said(pipeline_size=1, compression="int8"),
    }
