"""Code of one's own takes what it needs of the whole batch, and has the result of one process."""

import pytest

from tests.harness.groups import GROUPS
from tests.strategy.comparison import PACKAGE, check_same_as_alone


@pytest.mark.parametrize(
    ("group", "behaviour"),
    [
        pytest.param("2", "contrastive_loss", marks=pytest.mark.exhaustive),
        pytest.param("2", "clipped_in_the_train_step", marks=pytest.mark.exhaustive),
        ("2", "in_a_loop_by_hand"),
        pytest.param("2x2", "in_a_loop_by_hand", marks=pytest.mark.exhaustive),
        pytest.param("2 by TensorFlow", "in_a_loop_by_hand", marks=pytest.mark.exhaustive),
        pytest.param("2", "ratio_of_sums", marks=pytest.mark.exhaustive),
        pytest.param("2x2", "contrastive_loss", marks=pytest.mark.exhaustive),
        pytest.param("2 by TensorFlow", "contrastive_loss", marks=pytest.mark.exhaustive),
    ],
)
def test_same_as_alone(group, behaviour):
    check_same_as_alone(group, f"global_batch:{behaviour}")


def test_means_in_a_loop_by_hand():
    for kept, means in GROUPS["2"].run(f"{PACKAGE}.global_batch:means_by_hand"):
        assert kept == [[1, 1], [1, 1], [1, 1]]
        assert means == [0.5]
