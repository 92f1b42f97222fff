"""Who reads the dataset: ranks that need its values, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.groups import GROUPS
from tests.strategies.comparison import assert_close

PACKAGE = "tests.pipeline.batches_behaviours"


def test_ranks_in_the_middle_read_nothing():
    expected, weights, _ = GROUPS["alone"].run(f"{PACKAGE}:train")[0]
    results = GROUPS["4"].run(f"{PACKAGE}:train")
    for rank, (found, own, count) in enumerate(results):
        assert_close(found, expected, f"rank {rank}")
        for i, value in own.items():
            np.testing.assert_allclose(value, weights[i], rtol=1e-5, atol=1e-5)
        assert (count > 0) == (rank in (0, 3))


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [("other_targets", "targets of form"), ("other_rows", "has no more")],
)
def test_different_data(behaviour, said):
    for done, text in GROUPS["4"].answers(f"{PACKAGE}:{behaviour}", timeout=100):
        assert not done
        assert "ProgramMismatchError" in text
        assert said in text
        assert "worker 0" in text
        assert "worker 3" in text
