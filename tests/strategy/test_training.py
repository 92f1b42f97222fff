"""Optimizers, ways of running, files and callbacks give the result of one process."""

import itertools

import pytest

from tests.harness.groups import OTHER_GROUPS
from tests.harness.tiers import exhaustive, some, spread
from tests.strategy.comparison import behaviours, check_same_as_alone

ALL = behaviours("optimizers") + behaviours("execution")
OPTIMIZERS = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Adafactor",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    # The oldest supported Keras does not have them yet.
    "Muon",
    "ScheduleFreeAdamW",
]
ON_GROUPS = [
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
    "execution:functions_of_python_on_both_sides_of_the_update",
]
# By default; some of the others run on other groups below, or with sharded optimizers.
USUAL = [
    "optimizers:momentum_and_schedule",
    "execution:ragged_predictions",
    "execution:custom_loop",
]
SMOKE = [
    "optimizers:momentum_and_schedule",
    "execution:custom_loop",
]
OLDEST = [
    "optimizers:global_clipnorm",
    "optimizers:gradient_accumulation",
    "optimizers:gradient_accumulation_with_moving_average",
    "optimizers:loss_scaling",
    "execution:several_steps_per_execution",
    "execution:several_steps_over_a_generator",
    "execution:eagerly_with_accumulation_and_clipping",
    "execution:eagerly_with_loss_scaling",
]


@pytest.mark.parametrize("behaviour", some(ALL, always=USUAL, smoke=SMOKE, oldest=OLDEST))
def test_two_workers_give_the_result_of_one_process(behaviour):
    check_same_as_alone("2", behaviour)


@exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_result_of_one_process(name):
    check_same_as_alone("2", "optimizers:by_name", name)


@exhaustive
@pytest.mark.parametrize(
    ("behaviour", "group"),
    some(
        itertools.product(ON_GROUPS, OTHER_GROUPS),
        always=[],
        covering=spread(ON_GROUPS, OTHER_GROUPS, 2),
    ),
)
def test_other_groups_give_the_result_of_one_process(group, behaviour):
    check_same_as_alone(group, behaviour)
