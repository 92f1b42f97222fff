"""The ways to ask for a partition, by numbers and by names."""

from __future__ import annotations

import doctest
import importlib

import keras
import pytest
from keras import layers

from tests.harness.tiers import exhaustive
from tests.pipeline.zoo import gpt, nested, shared
from tfdist._src.pipeline.partition import COSTS, boundaries_after, linearize, partition, summary
from tfdist.errors import PartitionError


def last_calls(model, **arguments):
    return [stage.calls[-1].name for stage in partition(model, **arguments).stages]


def small():
    inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(5, 4, name="embedding")(inputs)
    own = keras.Input((3, 4))
    y = layers.Dense(4, name="dense_1")(layers.Dense(4, name="dense")(own))
    y = keras.Model(own, y, name="encoder")(x)
    return keras.Model(inputs, layers.Add(name="add")([x, y]))


def long():
    names = [*(f"block_{n}" for n in range(8)), "head"]
    return keras.Sequential([keras.Input((2,)), *(layers.Dense(2, name=name) for name in names)])


@pytest.mark.parametrize(("module", "model"), [("linearize", small), ("choose", long)])
def test_docstrings(module, model):
    module = importlib.import_module(f"tfdist._src.pipeline.partition.{module}")
    result = doctest.testmod(module, extraglobs={"model": model and model()})
    assert result.attempted and not result.failed


@exhaustive
@pytest.mark.parametrize("cost", COSTS)
def test_each_cost_gives_stages(cost):
    stages = partition(gpt(), 3, balance=cost, rows=2).stages
    assert [stage.index for stage in stages] == [0, 1, 2]


@exhaustive
def test_estimates_give_the_same_partition_each_time():
    boundaries = {partition(gpt(blocks=4), 4, balance="parameters").boundaries for _ in range(3)}
    assert len(boundaries) == 1


def test_cuts_by_name():
    assert last_calls(gpt(), stages=3, cuts=["block_0", "block_1"]) == [
        "block_0",
        "block_1",
        "head",
    ]


def test_cuts_by_the_name_of_a_nested_model():
    assert last_calls(nested(), stages=3, cuts=["block", "outer/inner"])[1:] == ["block", "head"]
    assert last_calls(nested(), stages=2, cuts=["one/dense"]) == ["one/dense", "head"]
    # It is called twice.
    assert last_calls(nested(), stages=2, cuts=["one"])[0].startswith("one/")


def test_cuts_by_a_repeated_call():
    assert last_calls(shared(), stages=3, cuts=["again#4", "again"])[:2] == ["again", "again#4"]


def test_names_that_are_not_there():
    graph = linearize(gpt())
    with pytest.raises(PartitionError, match=r"Received: 'block_2'.* Similar .* 'block_[01]'"):
        boundaries_after(graph, ["block_2"])
    with pytest.raises(PartitionError, match="the last call of the model"):
        boundaries_after(graph, ["head"])
    with pytest.raises(PartitionError, match="two of which mean the same cut"):
        boundaries_after(graph, ["block_0", "block_0"])
    with pytest.raises(PartitionError, match="one name fewer than stages, 3"):
        partition(gpt(), 3, cuts=["block_0"])


@pytest.mark.parametrize("stages", [0, 4])
def test_too_few_calls(stages):
    inputs = keras.Input((2,))
    x = layers.Dense(2)(layers.Dense(2)(inputs))
    model = keras.Model(inputs, layers.Dense(2)(x), name="small")
    with pytest.raises(PartitionError, match=f"'small' can be divided into 1 to 3 .*: {stages} st"):
        partition(model, stages)


def test_another_cost():
    with pytest.raises(ValueError, match=r"`balance` must be one of 'time', .*\. Received: 'size'"):
        partition(gpt(), 2, balance="size")


def test_summary():
    model = gpt(blocks=1, dropout=0.0)
    divided = partition(model, 2, cuts=["block_0"])
    seconds = [0.0] * len(divided.graph.calls)
    seconds[0], seconds[-1] = 3.0, 1.0
    title, first, second = summary(divided, seconds, rows=1000)
    assert title.split("  ")[0] == "stage"
    assert "embedding ... block_0" in first
    assert "75.0%" in first
    assert "0.512 MB" in first
    assert "norm ... head" in second
    assert "25.0%" in second
    # The tied matrix is counted in both.
    counted = [int(line.split("%")[1].split()[0].replace(",", "")) for line in (first, second)]
    assert sum(counted) == model.count_params() + 24 * 16
    assert summary(divided)[1].count(" - ") == 1
