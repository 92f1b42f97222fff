"""Who reads the dataset: ranks that need its values, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close

PACKAGE = "tests.pipeline.batches_behaviours"


@exhaustive
def test_ranks_in_the_middle_read_nothing():
    expected, weights, _ = reference(f"{PACKAGE}:train")
    results = GROUPS["4"].run(f"{PACKAGE}:train")
    for rank, (found, own, count) in enumerate(results):
        assert_close(found, expected, f"rank {rank}")
        for i, value in own.items():
            np.testing.assert_allclose(value, weights[i], rtol=1e-5, atol=1e-5)
        assert (count > 0) == (rank in (0, 3))


@exhaustive
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("other_targets", "targets of structure"),
        ("other_rows", "has no more"),
        ("another_order", "as many rows with other targets"),
    ],
)
def test_different_data_is_refused_on_all_workers(behaviour, said):
    for done, text in GROUPS["4"].answers(f"{PACKAGE}:{behaviour}"):
        assert not done
        assert "ProgramMismatchError" in text
        assert said in text
        assert "worker 0" in text
        assert "worker 3" in text


def test_what_the_model_does_not_take():
    """All ranks get an error, and go on afterwards."""
    for shape, after in GROUPS["2"].run(f"{PACKAGE}:wrong_shape"):
        assert "has the shape (None, 6). Received: a batch of shape (8, 7)" in shape
        assert after == [8, 3]


@exhaustive
def test_replicas_with_few_rows():
    """No average is taken of no rows."""
    for statistics, loss in GROUPS["2"].run(f"{PACKAGE}:few_rows"):
        assert np.isfinite(statistics).all()
        assert np.isfinite(loss)
