"""Workers that shard their optimizer are lost at places that only this reaches."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery.behaviours import surviving
from tests.strategy.behaviours.common import compile_mlp, rows
from tfdist._src.comm import tokens
from tfdist._src.keras.optimizers import sharded_optimizers
from tfdist._src.sharding import FullState, PreviousRankCopies, sharded_by
from tfdist._src.snapshots.shard_state import ShardState
from tfdist._src.strategy.commit_point import Progress
from tfdist.errors import UnsupportedError

_WAIT_SECONDS = 120


def halfway(
    strategy: Any, settings: dict[str, Any], place: str, step: int, late: list[int]
) -> dict[str, Any]:
    """Trains; the last worker dies after a step, which stands on some of the others only.

    Args:
        strategy: of all workers.
        settings: as for `surviving.trained`.
        place: where it fails on the others, all having been communicated: before the "update", or
            before the "commit".
        step: how many steps have ended then.
        late: the others.
    """
    group, calls = strategy.extended.group, 0

    def fail(value: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == step:
            deadline = time.monotonic() + _WAIT_SECONDS
            while not group.session.lost_ranks:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            raise RuntimeError("The last message of this step has not come.")
        return value

    announce = sharded_optimizers.announce_update

    def announce_late(arrived: Any) -> None:
        with tf.control_dependencies(arrived):
            passed = tf.numpy_function(fail, [tf.zeros([])], tf.float32)
        announce([*arrived, passed])

    commits = tokens.commits

    def commit_late() -> Any:
        passed = tf.numpy_function(fail, [tf.zeros([])], tf.float32)
        with tf.control_dependencies([passed]):
            return commits()

    redo, redone = Progress.redo, []

    def redo_once(self: Progress) -> None:
        redone.append(self.committed_steps)
        redo(self)

    patches: list[Any] = [mock.patch.object(Progress, "redo", redo_once)]
    if tfdist.rank() in late and place == "update":
        patches.append(mock.patch.object(sharded_optimizers, "announce_update", announce_late))
    elif tfdist.rank() in late:
        patches.append(mock.patch.object(tokens, "commits", commit_late))
    faults = {tfdist.size() - 1: ("after", step, "kill")}
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in (*patches, contextlib.redirect_stderr(said)):
            stack.enter_context(patch)
        results = surviving.trained(strategy, settings, faults)
    return {**results, "redone": redone, "said": said.getvalue()}


def taking(
    strategy: Any, settings: dict[str, Any], faults: dict[int, Any], victim: int, broadcasts: int
) -> dict[str, Any]:
    """Trains; a worker dies while shards are taken over, after so many of them."""
    take = ShardState.receive_slots

    def take_and_die(self: ShardState, *args: Any) -> None:
        workers, count = strategy.extended.workers, 0
        broadcast = workers.broadcast

        def counting(*given: Any) -> Any:
            nonlocal count
            if count == broadcasts:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return broadcast(*given)

        with mock.patch.object(type(workers), "broadcast", lambda _, *given: counting(*given)):
            take(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    if tfdist.rank() != victim:
        return surviving.trained(strategy, settings, faults)
    with mock.patch.object(ShardState, "receive_slots", take_and_die):
        return surviving.trained(strategy, settings, faults)


class _Stop(keras.callbacks.Callback):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("This training is to end here.")


def stopped(strategy: Any, settings: dict[str, Any], faults: dict[int, Any], step: int) -> str:
    """Trains, and raises an error after so many steps on all workers."""
    try:
        surviving.trained(strategy, {**settings, "more": lambda: [_Stop(step)]}, faults)
    except RuntimeError as error:
        return str(error)
    return ""


def in_turn(_: Any) -> list[tuple[int, int, bool]]:
    """Trains with copies, without Elastic, and again with copies.

    Returns:
        For each, how often a graph was made that prepares and one that exchanges copies, and
        whether any are left.
    """
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    model = compile_mlp(strategy, lambda: keras.optimizers.Adam(0.01))
    seen = []
    for callbacks in ([tfdist.callbacks.Elastic(copies=1)], [], [tfdist.callbacks.Elastic()]):
        with (
            mock.patch.object(tokens, "prepares", wraps=tokens.prepares) as prepares,
            mock.patch.object(PreviousRankCopies, "exchange", autospec=True) as exchanges,
        ):
            exchanges.side_effect = _exchange
            model.fit(*rows(32), batch_size=8, verbose=0, callbacks=callbacks)
        copies = sharded_by(model.optimizer).copies
        seen.append((prepares.call_count > 0, exchanges.call_count > 0, copies is None))
    return seen


_exchange = PreviousRankCopies.exchange


def refused(_: Any) -> list[str]:
    """What is refused before the first step."""
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    model = compile_mlp(strategy, lambda: keras.optimizers.Adam(0.01, use_ema=True))
    messages = []
    swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    for others in (0, 1):
        with strategy.scope():
            optimizers = [keras.optimizers.Adam(0.01) for _ in range(others)]
            for optimizer in optimizers:
                optimizer.build(model.trainable_variables[:1])
        callbacks = [tfdist.callbacks.Elastic(), *([] if others else swaps)]
        try:
            model.fit(*rows(32), verbose=0, callbacks=callbacks)
        except UnsupportedError as error:
            messages.append(str(error))
    return messages


def rebuilt(_: Any, kind: str, scales: bool) -> Any:
    """The forms of an optimizer's variables, and its scalars, before and after it is built again.

    Args:
        kind: the class.
        scales: whether it is inside one that scales the loss.
    """
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5)])
        settings = {"momentum": 0.5} if kind == "SGD" else {}
        inner = getattr(keras.optimizers, kind)(0.01, use_ema=True, **settings)
        optimizer = keras.optimizers.LossScaleOptimizer(inner) if scales else inner
        model.compile(optimizer, "mse")
    x = np.ones([16, 8], np.float32)

    def state() -> Any:
        model.make_train_function(force=True)
        model.fit(x, x[:, :5], batch_size=8, verbose=0)
        scalars = {n: v for n, v in vars(inner).items() if isinstance(v, keras.Variable)}
        forms = [(_name(v), tuple(v.shape), v.dtype) for v in optimizer.variables]
        full = FullState(optimizer)  # It checks them, too.
        return forms, scalars, len(full.variables), len(full.own)

    first = state()
    values = {name: float(variable) for name, variable in first[1].items()}
    with strategy.scope():
        sharded_optimizers.rebuild(optimizer)
    kept = {name: float(vars(inner)[name]) for name in values}
    slots = [np.abs(np.asarray(v)).max() for v in optimizer.variables if v.shape.rank]
    second = state()
    return (first[0], *first[2:]), (second[0], *second[2:]), values, kept, slots


def _name(variable: keras.Variable) -> str:
    """A variable's name, unless Keras has numbered it."""
    return "" if variable.name.startswith("variable") else variable.name
