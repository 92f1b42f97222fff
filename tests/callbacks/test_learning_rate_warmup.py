"""The warmup multiplies each update's learning rate, and leaves all else as it was."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal
from tfdist.callbacks import LearningRateWarmup

SGD = keras.optimizers.SGD
# Keras's, of the learning rate as an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__")
BEHAVIOURS = "tests.callbacks.behaviours"


def cosine():
    return keras.optimizers.schedules.CosineDecay(0.5, decay_steps=20)


def scaling(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)


class Given(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of each batch, from a list."""

    def __init__(self, rates):
        self._rates = rates

    def __call__(self, step):
        return tf.gather(tf.constant(self._rates, tf.float32), step)


def the_prediction(y, prediction):
    """A loss."""
    return prediction


def slope(optimizer, **settings):
    """A model with one weight, from which each update takes its learning rate."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, the_prediction, **settings)
    return model


def rates(model, *callbacks, data=None, **settings):
    """The learning rates of a training: what each call of the step takes from the weight."""
    seen = [float(model.get_weights()[0][0, 0])]

    def look(batch, logs):
        seen.append(float(model.get_weights()[0][0, 0]))

    look_each = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    ones = np.ones((4, 1), "float32")
    settings = {"epochs": 2, "verbose": 0, "shuffle": False, **settings}
    if data is None:
        model.fit(ones, ones, batch_size=1, callbacks=[*callbacks, look_each], **settings)
    else:
        model.fit(data, callbacks=[*callbacks, look_each], **settings)
    return -np.diff(seen)


def ramp(steps, initial=0.0, batches=8):
    return np.array([initial + (1 - initial) * min(1, i / steps) for i in range(batches)])


def check(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_each_batch_has_its_learning_rate():
    for given, steps, initial in [
        ({"steps": 5}, 5, 0.0),
        ({"epochs": 1.25, "initial": 0.2}, 5, 0.2),
        ({"epochs": 0.6, "initial": 1}, 2.4, 1.0),
    ]:
        check(rates(slope(SGD(0.5)), LearningRateWarmup(**given)), 0.5 * ramp(steps, initial))
    scheduled = np.array([float(cosine()(i)) for i in range(8)]) * ramp(5)
    found = rates(slope(SGD(cosine()), steps_per_execution=3), LearningRateWarmup(5))
    check(found, [sum(scheduled[:3]), scheduled[3], sum(scheduled[4:7]), scheduled[7]])


@exhaustive
@pytest.mark.parametrize("eagerly", [False, True])
def test_what_counts_as_a_batch(eagerly):
    scheduled = np.array([float(cosine()(i)) for i in range(8)]) * ramp(5)
    accumulating = slope(SGD(cosine(), gradient_accumulation_steps=2), run_eagerly=eagerly)
    check(rates(accumulating, LearningRateWarmup(5)), scheduled * ([0, 1] * 4))
    scaled = slope(scaling(SGD(0.5)), run_eagerly=eagerly)
    ones = np.ones((4, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((ones * [[1], [np.inf], [1], [1]], ones)).batch(1)
    # The second batch overflows each time.
    check(rates(scaled, LearningRateWarmup(5), data=data), [0, 0, 0.1, 0.2, 0.3, 0, 0.4, 0.5])


@exhaustive
@pytest.mark.parametrize(
    "make",
    [
        lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1, use_ema=True),
        lambda rate: keras.optimizers.Nadam(rate, gradient_accumulation_steps=3),
        lambda rate: scaling(keras.optimizers.Lion(rate, weight_decay=0.1)),
        lambda rate: keras.optimizers.Lamb(rate),
        keras.optimizers.Adafactor,
    ],
)
def test_it_is_the_schedule_with_these_rates(make):
    """What else depends on the learning rate is multiplied too, such as the decay of weights."""
    warmed, scheduled = slope(make(0.5)), slope(make(Given(0.5 * ramp(5))))
    for model in (warmed, scheduled):
        model.set_weights([np.full((1, 1), 2.0)])
    check(rates(warmed, LearningRateWarmup(5)), rates(scheduled))


@exhaustive
def test_other_callbacks_read_and_set_the_target():
    read = []

    def halve(epoch, rate):
        read.append(rate)
        return rate / 2

    targets = np.repeat([0.5, 0.25], 4)
    for order in (1, -1):
        model = slope(SGD(1.0))
        others = keras.callbacks.LearningRateScheduler(halve)
        found = rates(model, *[LearningRateWarmup(6), others][::order])
        check(found, targets * ramp(6))
    assert read == [1.0, 0.5] * 2
    model = slope(SGD(0.5))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1e3)
    check(rates(model, plateau, LearningRateWarmup(6), epochs=3)[4:8], 0.5 * ramp(6)[4:])
    assert model.optimizer.learning_rate == 0.125


def own_methods(optimizer):
    return {name for name, value in vars(optimizer).items() if callable(value)}


@exhaustive
def test_an_optimizer_is_saved_and_left_as_it_was(tmp_path):
    for rate in (0.5, cosine()):
        model = slope(SGD(rate))
        config, methods = model.optimizer.get_config(), own_methods(model.optimizer)
        path = str(tmp_path / "model.keras")
        saved = keras.callbacks.ModelCheckpoint(path)
        rates(model, LearningRateWarmup(100), saved)
        known = {"the_prediction": the_prediction}
        loaded = keras.saving.load_model(path, custom_objects=known)
        assert loaded.optimizer.get_config() == config == model.optimizer.get_config()
        assert own_methods(model.optimizer) == methods
        plain = [0.5] * 4 if rate == 0.5 else [float(cosine()(8 + i)) for i in range(4)]
        check(rates(model, epochs=1), plain)


@exhaustive
def test_a_training_resumes_where_it_was(tmp_path):
    warmup = LearningRateWarmup(epochs=1.5)
    first, again, anew = slope(SGD(0.5)), slope(SGD(0.5)), slope(SGD(0.5))
    found = rates(first, warmup, epochs=1)
    again.optimizer.build(again.trainable_variables)
    for variable, value in zip(again.optimizer.variables, first.optimizer.variables, strict=True):
        variable.assign(value)
    for model in (first, again):
        resumed = rates(model, warmup, epochs=3, initial_epoch=1)
        check([*found, *resumed], 0.5 * ramp(6, batches=12))
        check(rates(model, warmup), [0.5] * 8)
    # Weights alone: the epochs before are in the past.
    check(rates(anew, warmup, epochs=3, initial_epoch=2), [0.5] * 4)
    check(rates(anew, warmup, epochs=4, initial_epoch=3), [0.5] * 4)


@exhaustive
def test_an_interrupted_training_is_taken_up():
    def interrupt(epoch, logs):
        raise KeyboardInterrupt

    model, warmup = slope(SGD(0.5)), LearningRateWarmup(8)
    methods = own_methods(model.optimizer)
    interrupting = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rates(model, warmup, interrupting, steps_per_epoch=1)
    check(rates(model, warmup, epochs=1), 0.5 * ramp(8)[2:6])
    check(rates(model, LearningRateWarmup(16), epochs=1), 0.5 * ramp(16, batches=10)[6:])
    assert own_methods(model.optimizer) == methods

    for keep in (True, False):
        model = slope(SGD(0.5), run_eagerly=True)
        interrupted = [LearningRateWarmup(100)]
        with pytest.raises(KeyboardInterrupt):
            rates(model, *interrupted, interrupting, steps_per_epoch=1)

        def forget(epoch, logs, interrupted=interrupted, keep=keep):
            del interrupted[keep:]
            gc.collect()

        forgetting = keras.callbacks.LambdaCallback(on_epoch_end=forget)
        check(rates(model, LearningRateWarmup(6), forgetting), 0.5 * ramp(6, batches=9)[1:])
        assert own_methods(model.optimizer) == methods
        check(rates(model, epochs=1), [0.5] * 4)


@exhaustive
def test_the_step_is_traced_anew_once():
    traces = []

    def loss(y, prediction):
        traces.append(1)
        return prediction

    model = slope(SGD(0.5))
    model.compile(SGD(0.5), loss)
    rates(model)
    once = len(traces)
    check(rates(model, LearningRateWarmup(12)), 0.5 * ramp(12, batches=16)[8:])
    assert len(traces) == 2 * once


@exhaustive
def test_what_is_printed(capsys):
    model = slope(SGD(0.5))
    rates(model, LearningRateWarmup(6, initial=0.1, verbose=1), epochs=4)
    assert capsys.readouterr().out == (
        "\nEpoch 1: LearningRateWarmup has reached the factor 0.7.\n"
        "\nEpoch 2: LearningRateWarmup has reached the factor 1.\n"
    )


def test_wrong_arguments_are_refused():
    for wrong, message in [
        ({}, "Exactly one of `steps` and `epochs`"),
        ({"steps": 5, "epochs": 1}, "Received: steps=5, epochs=1"),
        ({"steps": 0}, "must be a positive number of batches"),
        ({"steps": 2.5}, "must be a positive number of batches"),
        ({"epochs": 0}, "`epochs` must be a positive number"),
        ({"epochs": float("nan")}, "`epochs` must be a positive number"),
        ({"epochs": "5"}, "`epochs` must be a positive number"),
        ({"steps": 5, "initial": -0.1}, "between 0 and 1"),
        ({"steps": 5, "initial": 1.1}, "between 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            LearningRateWarmup(**wrong)


@exhaustive
def test_epochs_of_unknown_length():
    ones = np.ones((4, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(1).filter(lambda x, y: True)
    with pytest.raises(ValueError, match="requires a known number of batches in an epoch"):
        rates(slope(SGD(0.5)), LearningRateWarmup(epochs=2), data=data)
    found = rates(
        slope(SGD(0.5)), LearningRateWarmup(epochs=2), data=data.repeat(), steps_per_epoch=4
    )
    check(found, 0.5 * ramp(8))


def check_workers(group, behaviour, *args):
    expected = reference(f"{BEHAVIOURS}:{behaviour}", *args)
    results = GROUPS[group].run(f"{BEHAVIOURS}:{behaviour}", *args)
    for rank, result in enumerate(results):
        assert_close(result, expected, f"rank {rank}")
        assert_equal(result["weights"], results[0]["weights"], f"rank {rank}")


@exhaustive
@pytest.mark.parametrize("group", ["2", "2 by TensorFlow", "2x2"])
def test_workers_train_as_one_process(group):
    check_workers(group, "warmed_up")


@exhaustive
def test_a_sharded_optimizer_is_warmed_up():
    check_workers("2", "warmed_up", True)


@exhaustive
@pytest.mark.parametrize(("group", "replicas"), [("2", 2), ("1x2", 2), ("2x2", 4)])
def test_the_target_grows_with_the_replicas(group, replicas):
    check_workers(group, "warmed_up_by_size", replicas)


@exhaustive
@pytest.mark.parametrize("alone", [False, True])
def test_workers_must_have_the_same_warmup(alone):
    for said in GROUPS["2"].run(f"{BEHAVIOURS}:warmed_up_differently", alone):
        assert "['LearningRateWarmup(steps=5, initial=None, scale_by_size=False)']" in said
        assert said.startswith("The workers do not run the same program: ")
