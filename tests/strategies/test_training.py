"""Optimizers, ways of running, files and callbacks give the result of one process."""

import pytest

from tests.strategies.comparison import behaviours, check_same_as_alone

ALL = behaviours("optimizers") + behaviours("execution")


@pytest.mark.parametrize("behaviour", ALL)
def test_two_workers(behaviour):
    check_same_as_alone("2", behaviour)


@pytest.mark.parametrize("group", ["1", "2 by TensorFlow", "3", "4", "1x2", "2x2"])
@pytest.mark.parametrize(
    "behaviour",
    [
        "optimizers:global_clipnorm",
        "optimizers:gradient_accumulation",
        "optimizers:overflow_on_one_worker",
        "execution:several_steps_per_execution",
        "execution:eagerly_with_accumulation_and_clipping",
        "execution:eagerly_with_loss_scaling",
        "execution:predict_with_any_division",
        "execution:custom_loop",
        "execution:collectives_by_hand",
        "execution:assigned_variables",
    ],
)
def test_groups(group, behaviour):
    check_same_as_alone(group, behaviour)


def test_xla_with_one_replica():
    check_same_as_alone("1", "xla:compiled_by_xla")
