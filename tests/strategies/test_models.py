"""Every kind of model trains on several workers as in one process."""

import pytest

from tests.strategies.comparison import behaviours, check_same_as_alone

MODELS = behaviours("models") + behaviours("losses")


@pytest.mark.parametrize("model", MODELS)
def test_two_workers(model):
    check_same_as_alone("2", model)


@pytest.mark.parametrize("group", ["1", "2 by TensorFlow", "3", "4", "1x2", "2x2"])
@pytest.mark.parametrize(
    "model",
    [
        "models:sequential",
        "models:masked_loss_over_time",
        "models:embedding_with_sparse_gradients",
        "models:synchronized_batch_normalization",
    ],
)
def test_groups(group, model):
    check_same_as_alone(group, model)
