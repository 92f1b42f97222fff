"""Training whose compression changes on the way."""

from __future__ import annotations

import unittest.mock

import keras
import numpy as np

import tfdist
from tests.harness.messages import messages_of
from tests.strategy.behaviours.common import compile_mlp, fit, outcome, rows
from tests.strategy.behaviours.compression import codec_of, errors_of, strategy_of
from tfdist._src.compression import auto as auto_module
from tfdist._src.compression.auto import Measurement
from tfdist._src.compression.policy import name_of
from tfdist._src.keras.fit import hooks
from tfdist.compression import CODECS, Auto, OneBit, Policy


def scheduled(strategy):
    x, y = rows(96)
    model = compile_mlp(strategy)
    first = Policy(CODECS["onebit"](), smallest=0, within_hosts=True)
    second = Policy(CODECS["topk"](), smallest=0, within_hosts=True)
    schedule = tfdist.callbacks.CompressionSchedule({1: first, 2: second, 4: None})
    names, kept = [], []

    def look(epoch, logs):
        names.append(strategy.extended.compressor.chosen)
        kept.append(errors_of(model) if epoch else [])

    look_each = keras.callbacks.LambdaCallback(on_epoch_end=look)
    history = fit(model, x, y, batch_size=16, epochs=5, callbacks=[schedule, look_each])
    strategy.extended.compressor.change(None)
    return {**outcome(model, history), "names": names, "kept": kept}


def scheduled_differently(strategy):
    x, y = rows(32)
    model = compile_mlp(strategy)
    name = "int8" if strategy.extended.worker_rank else "onebit"
    schedule = tfdist.callbacks.CompressionSchedule({0: name})
    try:
        fit(model, x, y, batch_size=16, epochs=1, callbacks=[schedule])
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return "no error"


def schedule_again(strategy):
    """A schedule has no memory of other fits."""
    x, y = rows(32)
    own = Policy(CODECS["int8"](), smallest=0, within_hosts=True)
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=own)
    model = compile_mlp(chosen)
    onebit = Policy(CODECS["onebit"](), smallest=0, within_hosts=True)
    schedule = tfdist.callbacks.CompressionSchedule({1: onebit})
    names = []

    def look(epoch, logs):
        names.append(chosen.extended.compressor.chosen)

    for _ in range(2):
        look_each = keras.callbacks.LambdaCallback(on_epoch_end=look)
        fit(model, x, y, batch_size=16, epochs=2, callbacks=[schedule, look_each])
    return names, chosen.extended.compressor.policy == own


def callback_list(strategy):
    """Keras's own list of callbacks, used twice."""
    x, y = rows(32)
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=Policy(Auto(), smallest=0))
    model = compile_mlp(chosen)
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model)
    for _ in range(2):
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    return sum(isinstance(c, hooks.LinkProbe) for c in callbacks.callbacks)


def chosen_by_measurement(strategy, candidates):
    x, y = rows(96)
    auto = Auto(tuple(codec_of(name) for name in candidates))
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=Policy(auto, smallest=0))
    model = compile_mlp(chosen)
    history = fit(model, x, y, batch_size=16, epochs=4)
    choice = chosen.extended.compressor.choice
    seconds = {name_of(codec): s for codec, s in choice.measurement.seconds.items()}
    return {
        **outcome(model, history),
        "chosen": chosen.extended.compressor.chosen,
        "seconds": seconds,
        "again": choice.reconsider(),
    }


def auto_on_one_machine(strategy):
    """What is said, and what is chosen."""
    with messages_of("compressor") as said:
        chosen = tfdist.MultiWorkerMirroredStrategy(compression="auto")
    x, y = rows(32)
    model = compile_mlp(chosen)
    fit(model, x, y, batch_size=16, epochs=1)
    return said, chosen.extended.compressor.chosen


def links_that_change(strategy):
    """What a probe finds is made up, and so the choice is made again, in an epoch's beginning."""
    x, y = rows(96)
    chosen = tfdist.MultiWorkerMirroredStrategy(compression=Policy(Auto((OneBit(),)), smallest=0))
    model = compile_mlp(chosen)
    found = [
        Measurement({None: 1e-3, OneBit(): 2e-3}, 1e-3),
        Measurement({None: 4e-3, OneBit(): 2e-3}, 4e-3),
    ]
    names = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: names.append(chosen.extended.compressor.chosen)
    )
    with (
        unittest.mock.patch.object(hooks, "_SECONDS", 0.0),
        unittest.mock.patch.object(auto_module, "probe", side_effect=[1.1e-3, 4e-3, 4e-3, 3e-3]),
        unittest.mock.patch.object(auto_module, "measure", side_effect=found),
    ):
        history = fit(model, x, y, batch_size=16, epochs=4, callbacks=[look])
    return {**outcome(model, history), "names": names, "errors": errors_of(model)}


def other_policies(strategy):
    """What is kept stays with its variable when a policy leaves others out."""
    x, y = rows(96)
    chosen = strategy_of("onebit")
    model = compile_mlp(chosen)
    data = {"batch_size": 16, "epochs": 1}
    fit(model, x, y, **data)
    before = _of_numbers(model)
    first = model.trainable_variables[0].path
    policy = Policy(CODECS["onebit"](), smallest=0, within_hosts=True, exclude=(f"^{first}$",))
    chosen.extended.compressor.change(policy)
    model.make_train_function(force=True)
    fit(model, x, y, **data)
    after = _of_numbers(model)
    return {n: np.array_equal(before[n], after[n]) for n in before}, set(before) == set(after)


def handed_over(strategy):
    """A codec's errors go on to the next one, also where a host's workers share them out."""
    x, y = rows(96)
    chosen = strategy_of("onebit", within_hosts=False)
    model = compile_mlp(chosen)
    fit(model, x, y, batch_size=16, epochs=1)
    before = _of_numbers(model)
    policy = Policy(CODECS["topk"](ratio=1.0), smallest=0)
    chosen.extended.compressor.change(policy)
    model.make_train_function(force=True)
    fit(model, x[:16], y[:16], batch_size=16, epochs=1)
    after = _of_numbers(model)
    return {n: (bool(before[n].any()), bool(after[n].any())) for n in before}, set(after)


def _of_numbers(model):
    values = model.optimizer.compression_state.values()
    return {int(name.split("/")[1]): value.copy() for name, value in values.items()}
