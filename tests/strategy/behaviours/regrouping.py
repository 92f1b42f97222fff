"""Training by workers that come and go, in processes that stay.

The members of a group are given as numbers of the entries in TF_CONFIG. A worker that is not in the
first group starts alone.
"""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import threading
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import cross_entropy, rows, scope
from tests.strategy.behaviours.compression import codec_of
from tfdist._src import cluster, native
from tfdist._src.cluster import ResolvedJob
from tfdist._src.comm import functions as collective
from tfdist._src.group import join
from tfdist._src.launch.flight.log import parse
from tfdist._src.strategy import multi_worker
from tfdist.compression import Policy
from tfdist.errors import PeerLostError


class Member:
    """This process, as a member of one group after the other.

    Args:
        first: the members of the first group.
        settings: arguments of the strategy.
    """

    def __init__(self, first: list[int], **settings: Any) -> None:
        self._everyone = cluster.from_environment()
        self._generation = 0
        self.number = self._everyone.rank
        topology = self._topology(first if self.number in first else [self.number])
        with (
            mock.patch.object(
                multi_worker, "read_cluster", return_value=ResolvedJob("test", topology)
            ),
            mock.patch.object(multi_worker, "join", functools.partial(join, elastic=True)),
        ):
            self.strategy = tfdist.MultiWorkerMirroredStrategy(**settings)

    @property
    def group(self) -> Any:
        return self.strategy.extended.group

    def regroup(self, members: list[int]) -> bool:
        """Goes on with the next group; returns whether this process is in it."""
        self._generation += 1
        if self.number not in members:
            return False
        self.group.session.address.evict()
        self.group.regroup(cluster.meet(self._topology(members), self.group.options))
        return True

    def _topology(self, members: list[int]) -> cluster.Topology:
        return cluster.Topology(
            workers=tuple(self._everyone.workers[number] for number in members),
            rank=members.index(self.number),
            task_type="worker",
            task_index=self.number,
            generation=self._generation,
        )


class Traced(keras.layers.Layer):
    """Counts how often a graph is made of it."""

    count = 0

    def call(self, inputs):
        Traced.count += not tf.executing_eagerly()
        return inputs


def _compiled(strategy: Any) -> keras.Model:
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=strategy is not None),
                keras.layers.Dropout(0.25, seed=3),
                Traced(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.5), cross_entropy(), metrics=["accuracy"]
        )
        model.optimizer.build(model.trainable_variables)
    return model


def _adopt_chiefs(model: keras.Model) -> None:
    for variable in [*model.variables, *model.optimizer.variables]:
        value = tf.convert_to_tensor(variable.value)
        variable.assign(tfdist.collective.broadcast(value))


def _phase(model: keras.Model, number: int) -> dict[str, Any]:
    history = model.fit(*rows(30, seed=number), batch_size=12, epochs=2, shuffle=False, verbose=0)
    x, y = rows(17, seed=100 + number)
    return {
        "history": dict(history.history),
        "evaluated": model.evaluate(x, y, batch_size=8, verbose=0),
        "predicted": model.predict(x, batch_size=8, verbose=0),
        "weights": model.get_weights(),
    }


def trained(_: Any, groups: list[list[int]], settings: dict[str, Any]) -> dict[str, Any]:
    """Trains a while in each group that this process is in; what came of it, and new traces."""
    member = Member(groups[0], **settings)
    model = _compiled(member.strategy)
    outcome: dict[str, Any] = {"traces": [], "known": []}
    for number, members in enumerate(groups):
        if number == 0 and member.number not in members:
            # Makes the metrics' variables, which the others have already.
            model.evaluate(*rows(4), verbose=0)
            continue
        if number > 0:
            if not member.regroup(members):
                continue
            _adopt_chiefs(model)
            if member.strategy.extended.traces_know_group:
                model.train_function = model.test_function = model.predict_function = None
                member.strategy.extended.traces_know_group = False
        assert (tfdist.rank(), tfdist.size()) == (members.index(member.number), len(members))
        before = Traced.count
        outcome[f"phase {number}"] = _phase(model, number)
        outcome["traces"].append(Traced.count - before)
        outcome["known"].append(member.strategy.extended.traces_know_group)
    member.group.close()
    return outcome


def survived(_: Any) -> dict[str, Any]:
    """Worker 2 is killed in the middle of a training; what the others come to without it."""
    member = Member([0, 1, 2])
    model = _compiled(member.strategy)

    class Killed(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and member.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        model.fit(*rows(400), batch_size=12, verbose=0, callbacks=[Killed()])
    except (tf.errors.UnavailableError, PeerLostError) as error:
        lost = str(error)
    member.regroup([0, 1])
    _adopt_chiefs(model)
    before = Traced.count
    model.fit(*rows(30), batch_size=12, verbose=0)
    traces, weights = Traced.count - before, model.get_weights()
    member.group.close()
    return {"lost": lost, "weights": weights, "traces": traces}


def compressed(_: Any, groups: list[list[int]], codec: str, settings: dict[str, Any]) -> Any:
    """The same with compressed gradients."""
    policy = Policy(codec_of(codec), smallest=0, **settings)
    return trained(_, groups, {"compression": policy})


def trained_alone(_: Any, phases: int) -> list[dict[str, Any]]:
    """The same in one process."""
    model = _compiled(None)
    return [_phase(model, number) for number in range(phases)]


def read_by(_: Any) -> dict[str, bool]:
    """Which readings, while a graph is traced, make it know the group."""
    member = Member([0])
    extended = member.strategy.extended

    def known(read: Any, *, in_replica: bool = True) -> bool:
        extended.traces_know_group = False

        def step() -> Any:
            read()
            return tf.constant(0)

        run = functools.partial(member.strategy.run, step) if in_replica else step
        tf.function(run, autograph=False)()
        return bool(extended.traces_know_group)

    def replica() -> Any:
        return tf.distribute.get_replica_context()

    return {
        "nothing": known(lambda: None),
        "place": known(lambda: extended.place_here()),
        "mean": known(lambda: replica().all_reduce("MEAN", tf.ones([2]))),
        "gather": known(lambda: replica().all_gather(tf.ones([2]), axis=0)),
        "collectives": known(lambda: collective.all_gather(tf.ones([2])), in_replica=False),
        "replicas": known(lambda: member.strategy.num_replicas_in_sync),
        "replicas of a context": known(lambda: replica().num_replicas_in_sync),
        "replica": known(lambda: replica().replica_id_in_sync_group),
        "worker": known(lambda: extended.worker_rank),
        "rank": known(lambda: collective.communicator().rank, in_replica=False),
        "size": known(lambda: collective.communicator().size, in_replica=False),
    }


def collectives_of_one(_: Any) -> list[Any]:
    """All collectives, with their gradients, on a communicator of one rank."""
    Member([0])
    calls = {
        **{op: functools.partial(collective.all_reduce, op=op) for op in collective.REDUCTIONS},
        "reduce_scatter": collective.reduce_scatter,
        "all_gather": collective.all_gather,
        "broadcast": collective.broadcast,
        "all_to_all": lambda value: collective.all_to_all(value)[0],
    }
    wrong = []
    for count in (0, 1, 5, 300_000):
        value = tf.reshape(tf.range(float(3 * count)), [count, 3])
        for name, call in calls.items():
            same = np.array_equal(tf.function(call)(value), value)
            same &= np.array_equal(call(value), value)
            if name not in ("min", "max", "product"):
                with tf.GradientTape() as tape:
                    tape.watch(value)
                    total = tf.reduce_sum(tf.function(call)(value))
                same &= np.array_equal(tape.gradient(total, value), tf.ones_like(value))
            if not same:
                wrong.append((name, count))
    collective.barrier()
    if not np.array_equal(
        collective.communicator().all_gather(tf.constant(["a", "b"])), [b"a", b"b"]
    ):
        wrong.append(("all_gather of strings", 2))
    return wrong


def live_iterators(_: Any, groups: list[list[int]]) -> list[list[int]]:
    """The rows that an iterator yields which goes on through all groups."""
    member = Member(groups[0])
    batches = tf.data.Dataset.range(12 * len(groups)).batch(12)
    iterator = iter(member.strategy.experimental_distribute_dataset(batches))
    seen = []
    for number, members in enumerate(groups):
        if number > 0 and not member.regroup(members):
            break
        seen.append(member.strategy.experimental_local_results(next(iterator))[0].numpy().tolist())
    return seen


def many_times(_: Any, times: int) -> dict[str, list[int]]:
    """The numbers of threads and descriptors after the first groups and after many others."""
    member = Member([0, 1])
    strategy, group = member.strategy, member.group
    counts: dict[str, list[int]] = {"threads": [], "descriptors": [], "segments": []}
    for number in range(times):
        if number % 2 and strategy.extended.worker_rank == 1:
            group.native().abort("on purpose")
        members = [0, 1] if number % 3 else [1, 0]
        assert member.regroup(members)
        total = collective.all_reduce(tf.constant(member.number + 1.0))
        assert total.numpy() == 3.0
        if number in (5, times - 1):
            group.exchange("counted", "")
            counts["threads"].append(_settled(lambda: len(os.listdir("/proc/self/task"))))
            counts["descriptors"].append(_settled(lambda: len(os.listdir("/proc/self/fd"))))
            with open("/proc/self/maps", encoding="ascii") as maps:
                counts["segments"].append(sum("tfdist" in line for line in maps))
            group.exchange("counted", "")
    return counts


def _settled(count: Any) -> int:
    """A count once threads that are about to end have ended."""
    waiting, least = threading.Event(), count()
    for _ in range(20):
        waiting.wait(0.1)
        least = min(least, count())
    return int(least)


def logged(_: Any) -> tuple[int, int, str]:
    """The rank, the generation and the worker that this process's flight log names."""
    member = Member([0, 1])
    member.regroup([1, 0])
    core = native.load().library
    core.tfd_flight_ask(b"signal", b"", b"A test has asked for it.")
    core.tfd_flight_flush(60.0)
    folder = pathlib.Path(os.environ["TFDIST_FLIGHT_DIR"])
    log = parse((folder / f"flight-rank{tfdist.rank()}.json").read_bytes())
    assert log.pid == os.getpid()
    return log.rank, log.generation, str(log.worker)


def split_off(_: Any) -> str:
    """What a communicator says that the user has split off, after a change."""
    member = Member([0, 1])
    part = member.group.native().split("pair", [0, 1])
    member.regroup([1, 0])
    try:
        part.all_reduce([tf.ones([])])
    except tf.errors.FailedPreconditionError as error:
        return str(error)
    return ""
