"""A training that loses workers and gets others; one process has neither."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery.behaviours import data_kinds
from tests.recovery.behaviours.data_kinds import DATA, VALIDATION
from tests.strategy.behaviours.common import cross_entropy, rows, scope
from tfdist._src import cluster
from tfdist._src.cluster import ResolvedJob
from tfdist._src.recovery.next_group import membership_of
from tfdist._src.sharding import FullState, sharded_by
from tfdist._src.strategy import multi_worker

_WAIT_SECONDS = 120
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}


class Fault(keras.callbacks.Callback):
    """Something happens to this worker before or after a step, or in another event.

    Args:
        phase: the name of the event.
        step: how many steps have ended then.
        what: what happens.
    """

    def __init__(self, phase: str, step: int, what: str) -> None:
        super().__init__()
        self._phase, self._step, self._what = phase, step, what
        self._steps = self._begun = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._begun += 1
        self._meet("train begin")
        if self._begun > 1:
            self._meet("begun anew")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._meet("epoch begin")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._meet("before")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._meet("after")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._meet("evaluation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._meet("epoch end")

    def on_group_change(self, old: Any, new: Any) -> None:
        self._meet("change")

    def _meet(self, phase: str) -> None:
        if phase == self._phase and self._steps >= self._step:
            self._step = sys.maxsize  # one that was stopped may go on
            os.kill(os.getpid(), SIGNALS[self._what])


class Journal(tfdist.callbacks.Callback):
    """Which events a callback sees."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.changes: list[tuple[int, int]] = []
        self.changed_after: list[int] = []  # steps

    def on_train_begin(self, logs: Any = None) -> None:
        self.events.append("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.events.append(("epoch", epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.events.append(("batch", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append(("batch ended", batch))

    def on_test_begin(self, logs: Any = None) -> None:
        self.events.append("test")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.events.append(("test batch", batch))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append(("test batch ended", batch))

    def on_test_end(self, logs: Any = None) -> None:
        self.events.append("test ended")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.events.append(("epoch ended", epoch))

    def on_group_change(self, old: Any, new: Any) -> None:
        self.changes.append((old.size, new.size))
        self.changed_after.append(sum("batch ended" in event for event in self.events))


class AwaitNewcomers(keras.callbacks.Callback):
    """Before a step, the first worker waits until processes wait to be admitted.

    If it is lost before they are, the next one waits in its place.

    Args:
        step: how many steps have ended then.
        sign: a file that tells such processes to come.
        count: how many there are.
    """

    def __init__(self, step: int, sign: str, count: int = 1) -> None:
        super().__init__()
        self._step, self._sign, self._count = step, pathlib.Path(sign), count
        self._steps = 0
        self._wanted = self._waits = False

    def on_group_change(self, old: Any, new: Any) -> None:
        none_has_come = set(new.workers) <= set(old.workers)
        self._wanted &= none_has_come and old.workers[0] not in new.workers
        self._waits = self._wanted

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == self._step:
            self._sign.touch()
            self._wanted = self._waits = True
        if self._waits and tfdist.is_chief():
            membership = membership_of(self.model.distribute_strategy.extended.group)
            _await(lambda: len(membership.waiting) >= self._count)
        self._waits = False


class AwaitLate(keras.callbacks.Callback):
    """While the group changes for the first time, the first worker waits for another process.

    Args:
        sign: a file that tells it to come.
    """

    def __init__(self, sign: str) -> None:
        super().__init__()
        self._sign = pathlib.Path(sign)

    def on_group_change(self, old: Any, new: Any) -> None:
        if tfdist.is_chief() and not self._sign.exists():
            self._sign.touch()
            membership = membership_of(self.model.distribute_strategy.extended.group)
            _await(lambda: membership.waiting)


class Dying(keras.layers.Layer):
    """Kills the process in the forward or the backward pass of a step.

    All workers have the same program, and one of them the phase and the step.
    """

    counts = False
    step = -1
    phase = ""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not training or not Dying.counts:
            return inputs

        @tf.custom_gradient
        def identity(x: tf.Tensor) -> Any:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                return self._pass("backward", gradient)

            return self._pass("forward", x), backward

        return identity(inputs)

    def _pass(self, phase: str, tensor: tf.Tensor) -> tf.Tensor:
        def count() -> np.ndarray:
            self._calls += phase == "forward"
            if phase == Dying.phase and self._calls > Dying.step:
                os.kill(os.getpid(), signal.SIGKILL)
            return np.int32(0)

        # Without operands: a function of rows would be given those of all workers.
        with tf.control_dependencies([tensor]):
            counted = tf.numpy_function(count, [], tf.int32)
        with tf.control_dependencies([counted]):
            return tf.identity(tensor)


def make_model(strategy: Any, settings: dict[str, Any]) -> keras.Model:
    """A model for `settings`, compiled."""
    if settings.get("policy"):
        keras.mixed_precision.set_global_policy(settings["policy"])
    try:
        with scope(strategy):
            model = keras.Sequential(
                [
                    keras.Input((8,)),
                    keras.layers.Dense(16, activation="tanh"),
                    keras.layers.BatchNormalization(synchronized=strategy is not None),
                    keras.layers.Dropout(0.25, seed=3),
                    Dying(),
                    keras.layers.Dense(3, dtype="float32"),
                ]
            )
            model.compile(
                keras.optimizers.Adam(0.01, **settings.get("optimizer", {})),
                cross_entropy(),
                metrics=["accuracy", *settings.get("metrics", [])],
                steps_per_execution=settings.get("steps_per_execution", 1),
                run_eagerly=settings.get("run_eagerly", False),
            )
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return model


def trained(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """Trains; `faults` has a phase, a step and what happens then, by rank."""
    if settings.get("sharded") and strategy:
        if not strategy.extended.shards_optimizers:
            strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
        for communicator in strategy.extended.replicas:
            communicator.bucket_bytes = 256  # several buckets
    me = tfdist.rank() if strategy else 0
    fault = faults.get(me) if strategy else None
    Dying.counts = strategy is not None
    if fault is not None and fault[0] in ("forward", "backward"):
        Dying.phase, Dying.step = fault[:2]
    model = make_model(strategy, settings)
    callbacks: list[Any] = [journal := Journal()]
    if fault is not None:
        callbacks.append(Fault(*fault))
    if strategy:
        callbacks.append(tfdist.callbacks.Elastic(**settings.get("elastic", {})))
    callbacks += settings.get("more", list)()
    if settings.get("watched"):
        callbacks += [
            tfdist.callbacks.StragglerMonitor(every=2),
            tfdist.callbacks.ThroughputLogger(every=2),
            tfdist.callbacks.ReplicaAudit(every=3),
            tfdist.callbacks.TrafficLogger(),
            tfdist.callbacks.Timeline(settings["watched"], steps=(14, 17)),
        ]
    if settings.get("codecs"):
        callbacks.append(tfdist.callbacks.CompressionSchedule(settings["codecs"]))
    if settings.get("scaled"):
        callbacks.append(tfdist.callbacks.LearningRateWarmup(steps=10, scale_by_size=True))
    if settings.get("snapshots"):  # None but those that the workers take on their own account.
        every = settings.get("save_every", 1000)
        callbacks.append(tfdist.callbacks.BackupAndRestore(settings["snapshots"], save_every=every))
    if settings.get("patience"):
        group = strategy.extended.group
        group.options = dataclasses.replace(group.options, start_timeout=settings["patience"])
    if settings.get("files"):
        folder = pathlib.Path(settings["files"])
        callbacks += [
            tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=2),
            keras.callbacks.ModelCheckpoint(str(folder / "model.keras")),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.EarlyStopping(patience=9, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(patience=1),
        ]
    data = DATA[settings.get("data", "dataset")](*rows(50))
    if strategy is None and settings.get("data") == "generator dataset":
        # Without it, the step of Keras that finds no more data changes seeds and Adam's count.
        data["x"] = data["x"].apply(tf.data.experimental.assert_cardinality(7))
    if settings.get("steps_per_epoch"):
        data["x"] = data["x"].repeat()
    validation: dict[str, Any] = {
        "validation_data": rows(20, seed=1),
        "validation_batch_size": 8,
    }
    if kind := settings.get("validation"):
        validation = VALIDATION[kind](data)
    history = model.fit(
        **data,
        epochs=3,
        verbose=0,
        **validation,
        callbacks=callbacks,
        **{key: settings[key] for key in ("steps_per_epoch", "class_weight") if key in settings},
    )
    return _outcome(model, history, journal)


def _outcome(model: keras.Model, history: Any, journal: Journal) -> dict[str, Any]:
    return {
        "weights": model.get_weights(),
        "slots": _slots(model),
        "history": dict(history.history),
        "epochs": history.epoch,
        "events": journal.events,
        "changes": journal.changes,
        "changed after": journal.changed_after,
    }


def _slots(model: keras.Model) -> list[np.ndarray]:
    """The optimizer's variables, those of all workers together."""
    optimizer = model.optimizer
    if sharded_by(optimizer) is None:
        return [np.asarray(variable) for variable in optimizer.variables]
    state = FullState(optimizer)
    state.gather(model.distribute_strategy.extended.workers, keep=True)
    return [np.asarray(tf.convert_to_tensor(variable)) for variable in state.variables]


def coming(_: Any, *arguments: Any) -> Any:
    """Trains on some of the workers, to which another one comes."""
    return come(trained, *arguments)


def come(
    train: Callable[..., Any],
    first: list[int],
    step: int,
    faults: dict[int, Any],
    sign: str,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Trains on some of the workers, to which another one comes.

    Args:
        train: trains, as `trained` does.
        first: the ranks of those that begin.
        step: after which step they wait for the other one.
        faults: as for `trained`.
        sign: a file that tells the other one to come.
        settings: as for `trained`, and unprepared: whether the first ones start without
            TFDIST_ELASTIC, which `tfdist run --elastic` sets; seed: of the other one's order; late:
            the rank of one that comes while the group changes.
    """
    everyone = cluster.from_environment()
    given = settings or {}
    make_strategy = functools.partial(
        tfdist.MultiWorkerMirroredStrategy,
        compression=given.get("compression"),
        shard_optimizer=given.get("sharded", False),
    )
    is_new, late = everyone.rank not in first, f"{sign}.late"
    if is_new or not given.get("unprepared"):
        os.environ["TFDIST_ELASTIC"] = "1"
    if not is_new:
        topology = cluster.Topology(
            tuple(everyone.workers[rank] for rank in first),
            first.index(everyone.rank),
            "worker",
            everyone.rank,
        )
        with mock.patch.object(
            multi_worker, "read_cluster", return_value=ResolvedJob("test", topology)
        ):
            strategy = make_strategy()
    else:
        faults = {}  # It is rank 0 as long as it is alone.
        if "seed" in given:
            os.environ[data_kinds.SEED] = str(given["seed"])
        _await(pathlib.Path(late if everyone.rank == given.get("late") else sign).exists)
        strategy = make_strategy()
    count = len(everyone.workers) - len(first) - ("late" in given)
    later = [late] if "late" in given else []
    more = {"more": lambda: [AwaitNewcomers(step, sign, count), *map(AwaitLate, later)]}
    return train(strategy, {**(settings or {}), **more}, faults)


def _await(condition: Any) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
