"""Every kind of model trains on several workers as in one process."""

import pytest

from tests.groups import OTHER_GROUPS
from tests.strategies.comparison import behaviours, check_same_as_alone
from tests.tiers import rotating

MODELS = behaviours("models") + behaviours("losses")
ON_GROUPS = [
    "models:sequential",
    "models:masked_loss_over_time",
    "models:embedding_with_sparse_gradients",
    "models:synchronized_batch_normalization",
]


@pytest.mark.parametrize("model", MODELS)
def test_two_workers(model):
    check_same_as_alone("2", model)


@pytest.mark.parametrize(("model", "group"), rotating(ON_GROUPS, OTHER_GROUPS))
def test_groups(group, model):
    check_same_as_alone(group, model)
