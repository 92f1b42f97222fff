"""One process with several devices; and a strategy's `communication_options`."""

import pytest

from tests.enumeration.programs import difference
from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, assert_close, check_same_as_alone

MIRRORED = f"{PACKAGE}.mirrored"


@pytest.mark.smoke
@pytest.mark.parametrize(
    "devices", some([None, ["CPU:1"], ["CPU:1", "CPU:0"]], always=[["CPU:1", "CPU:0"]]), ids=str
)
def test_mirrored_training_gives_the_result_of_one_device(devices):
    check_same_as_alone("1x2", "mirrored:train", devices)


@pytest.mark.parametrize("group", some(["1x2", "2x2", "2 by TensorFlow"], always=[]))
def test_loops_that_communicate(group):
    assert not difference("patterns:loop_over_the_batch", group)


@pytest.mark.parametrize("group", some(["1x2", "2x2", "2"], always=["1x2"]))
@pytest.mark.parametrize(
    "kind",
    some(
        [
            "compiled",
            "function",
            "generator",
            "keras variable",
            "loop",
            "python",
            "seeds",
            "table",
            "table of rows",
            "variable",
        ],
        always=["python"],
    ),
)
def test_state_outside_of_the_scope(group, kind):
    check_same_as_alone(group, "mirrored:state_outside", kind)


@pytest.mark.parametrize("group", some(["2", "1x2", "2x2"], always=[]))
def test_elements_of_a_variable(group):
    check_same_as_alone(group, "mirrored:elements_of_a_variable")


def test_replicas_are_on_the_devices_that_were_asked_for():
    (found,) = GROUPS["1x2"].run(f"{MIRRORED}:replicas")
    both, second = ["device:CPU:0", "device:CPU:1"], ["device:CPU:1"]
    assert list(found.values()) == [both, second, both[::-1]]


@exhaustive
def test_weights_are_on_every_device():
    assert GROUPS["1x2"].run(f"{MIRRORED}:weights_everywhere") == [True]


def test_cross_device_ops():
    assert GROUPS["1x2"].run(f"{MIRRORED}:reduced_by") == [(7.0, 1)]


@exhaustive
def test_bytes_per_pack():
    expected, _ = reference(f"{MIRRORED}:small_packs", 0)
    (result, whole), _ = GROUPS["2"].run(f"{MIRRORED}:small_packs", 0)
    assert_close(result, expected, "whole")
    (result, packs), _ = GROUPS["2"].run(f"{MIRRORED}:small_packs", 64)
    assert_close(result, expected, "packs")
    # The four gradients and what goes with the metrics no longer go together.
    assert packs > whole


def test_an_implementation_that_the_native_collectives_do_not_have():
    (said,), others = GROUPS["2"].run(f"{MIRRORED}:another_implementation")
    assert said.startswith("`implementation` of `communication_options` is for TensorFlow's")
    assert "NCCL" in said
    assert others == []


def test_a_timeout_that_only_the_first_strategy_sets():
    (said,), others = GROUPS["2"].run(f"{MIRRORED}:another_timeout")
    assert "`timeout_seconds` of `communication_options`" in said
    assert "Received: 7 s" in said
    assert others == []
