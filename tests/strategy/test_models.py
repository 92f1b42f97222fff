"""Every kind of model trains on several workers as in one process."""

import itertools

import pytest

from tests.harness.groups import OTHER_GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import behaviours, check_same_as_alone

MODELS = behaviours("models") + behaviours("losses")
ON_GROUPS = [
    "models:sequential",
    "models:masked_loss_over_time",
    "models:embedding_with_sparse_gradients",
    "models:synchronized_batch_normalization",
]


# By default.
USUAL = [
    "models:custom_train_step_with_other_logs",
]
OLDEST = [
    "models:sequential",
    "models:masked_loss_over_time",
    "models:synchronized_batch_normalization",
    "models:dropout_and_noise",
    "models:transformer_with_dropout",
]


@pytest.mark.parametrize("model", some(MODELS, always=USUAL, oldest=OLDEST))
def test_two_workers_give_the_result_of_one_process(model):
    check_same_as_alone("2", model)


@exhaustive
@pytest.mark.parametrize(
    ("model", "group"),
    list(itertools.product(ON_GROUPS, OTHER_GROUPS)),
)
def test_other_groups_give_the_result_of_one_process(group, model):
    check_same_as_alone(group, model)
