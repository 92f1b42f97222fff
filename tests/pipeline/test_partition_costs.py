"""What calls cost, and that to find it out changes nothing."""

from __future__ import annotations

import collections
import itertools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.backend.common import global_state

from tests.harness.tiers import exhaustive
from tests.pipeline.zoo import ZOO, gpt, mlp, rnn, unet
from tfdist._src.pipeline.partition import decide, estimate, linearize, measure, profiler
from tfdist._src.pipeline.partition.choose import stage_costs
from tfdist.errors import PartitionError

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")


SOME = {"nested_mixed_float16"}


@exhaustive
@pytest.mark.parametrize("name", ZOO)
def test_every_model_can_be_measured_and_stays_as_it_is(name, monkeypatch):
    monkeypatch.setattr(profiler, "_SECONDS", 0.0)
    model = ZOO[name].build()
    before = [v.numpy() for v in model.variables]
    states = random.getstate(), np.random.get_state()[1].tolist()

    costs = measure(linearize(model), rows=2)

    assert all(cost.forward >= 0 and cost.backward >= 0 for cost in costs)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_the_median_of_some_runs_counts(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    def run():
        clock.now += next(durations)

    clock = Clock()
    monkeypatch.setattr(profiler, "time", clock)
    durations = iter([1000.0, 3.0, 1.0, 100.0, 2.0, 4.0])  # the first is not counted
    assert profiler.seconds_of(run) == 3.0
    durations = itertools.repeat(profiler._SECONDS / 20)
    begin = clock.now
    profiler.seconds_of(run)
    assert clock.now - begin == pytest.approx(profiler._SECONDS, rel=0.2)


@pytest.mark.parametrize(
    ("forward", "both", "cost"), [(5.0, 15.0, (3.0, 10.0)), (1.0, 0.5, (0, 0))]
)
def test_the_cost_is_what_the_passes_take_beside_the_overhead(monkeypatch, forward, both, cost):
    specs = (tf.TensorSpec((2, 3)),)
    timed = profiler.Timing(forward, both, specs, (None, None))
    monkeypatch.setattr(profiler, "seconds_of", lambda run: 2.0)
    monkeypatch.setattr(profiler, "time_call", lambda *args: timed)
    (measured,) = measure(linearize(keras.Sequential([keras.Input((4,)), layers.Dense(3)])), rows=2)
    assert (measured.forward, measured.backward) == cost


@exhaustive
def test_random_numbers_without_a_seed_go_on_as_before():
    drawn = []
    for is_measured in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with keras.StatelessScope():
            pass  # At its end Keras makes its list of variables that wait for values.
        inputs = keras.Input((4,))
        noise = layers.Lambda(lambda x: x + keras.random.normal((4,)), output_shape=(4,))
        model = keras.Model(inputs, layers.Dense(2)(noise(inputs)))
        if is_measured:
            measure(linearize(model), rows=2)
            assert not global_state.get_global_attribute("uninitialized_variables")
        drawn.append(keras.random.normal((4,)).numpy())
    np.testing.assert_array_equal(*drawn)


@exhaustive
def test_equal_layers_are_timed_once(monkeypatch):
    timed = collections.Counter()
    time_call = profiler.time_call

    def counting(call, *args):
        timed[type(call.operation).__name__] += 1
        return time_call(call, *args)

    monkeypatch.setattr(profiler, "time_call", counting)
    costs = measure(linearize(gpt(blocks=4)), rows=2)
    assert timed["MultiHeadAttention"] == 1
    assert timed["LayerNormalization"] == 1
    assert timed["Dense"] == 2
    assert len(costs) > 30


def test_a_layer_that_cannot_run_on_made_up_numbers_is_named():
    def refuse(x):
        raise RuntimeError("Not these.")

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Lambda(refuse, output_shape=(4,), name="picky")(inputs))
    with pytest.raises(PartitionError, match=r"RuntimeError from 'picky'.*balance=\"parameters\""):
        measure(linearize(model), rows=2)


def test_estimates_follow_the_multiplications():
    inputs = keras.Input((100,))
    model = keras.Model(inputs, layers.Dense(1000)(layers.Dense(1000)(inputs)))
    small, large = estimate(linearize(model), rows=64)
    assert 8 < large.seconds / small.seconds < 11
    assert small.backward == 2 * small.forward
    assert small.parameters == 101_000
    assert small.parameter_bytes == 404_000
    assert small.output_bytes == 64 * 4000
    # An embedding is looked up, a recurrent layer multiplies at each step.
    graph = linearize(rnn())
    names = [call.name.rstrip("_0123456789") for call in graph.calls]
    costs = dict(zip(names, estimate(graph, rows=64), strict=True))
    assert costs["lstm"].seconds > 5 * costs["embedding"].seconds


def largest_share(graph, costs, stages):
    """Of the stages that are decided on by these costs; 1 where all cost the same."""
    seconds = [cost.seconds for cost in costs]
    boundaries = [0, *decide(graph, stages, seconds, rows=8), len(graph.calls)]
    shares = [sum(seconds[begin:end]) for begin, end in itertools.pairwise(boundaries)]
    return max(shares) / sum(seconds) * stages


@exhaustive
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_of_a_gpt_are_even(stages):
    graph = linearize(gpt(blocks=8, width=64, length=32))
    assert largest_share(graph, estimate(graph, rows=8), stages) <= 1.02


@exhaustive
@pytest.mark.parametrize("stages", [2, 4])
def test_measured_stages_of_a_gpt_are_even(stages):
    """On a busy machine one of equal layers may seem to take longer."""
    graph = linearize(gpt(blocks=8, width=64, length=32))
    assert any(largest_share(graph, measure(graph, rows=8), stages) <= 1.3 for _ in range(20))


def test_bytes_count_where_values_cross():
    graph = linearize(unet())
    calls = len(graph.calls)
    free = stage_costs(graph, [1.0] * calls, rows=1, seconds_per_byte=0.0)
    paid = stage_costs(graph, [1.0] * calls, rows=1, seconds_per_byte=1.0)
    part = (1 << 20) / calls
    assert free[0, calls] == paid[0, calls] == pytest.approx(1 << 20)
    # The first convolution's 16 x 16 x 4 floats leave, and their gradient comes back.
    assert paid[0, 1] - free[0, 1] == pytest.approx(2 * 4 * 16 * 16 * 4 * part, rel=1e-6)
    # The pooled ones leave too, once, however many take them.
    assert paid[0, 2] - free[0, 2] == pytest.approx(2 * 4 * (1024 + 256) * part, rel=1e-6)
    # The last convolution takes what the one before it makes.
    assert paid[calls - 1, calls] - free[calls - 1, calls] == pytest.approx(
        2 * 4 * 1024 * part, rel=1e-6
    )


def test_a_limit_of_memory_is_kept():
    graph = linearize(mlp())
    seconds = [1.0, *[0.0] * 7]
    sizes = [cost.parameter_bytes for cost in estimate(graph, rows=1)]
    limit = max(sizes) + 1000

    def most(boundaries):
        ends = [0, *boundaries, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise(ends))

    assert most(decide(graph, 4, seconds, rows=1)) > limit
    assert most(decide(graph, 4, seconds, rows=1, memory_limit=limit)) <= limit
    with pytest.raises(PartitionError, match="limits of a stage"):
        decide(graph, 2, seconds, rows=1, memory_limit=limit)
