"""Losses and metrics that need the outputs of a whole batch are those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.pipeline.output_behaviours import EXAMPLES
from tests.strategy.comparison import assert_close

PLACE = "tests.pipeline.output_behaviours"
NAMES = list(EXAMPLES)


def check(ranks, name):
    expected = reference(f"{PLACE}:run", name)
    weights = expected.pop("own")
    held = {}
    for rank, result in enumerate(GROUPS[ranks].run(f"{PLACE}:run", name)):
        own = result.pop("own")
        assert_close(result, expected, f"rank {rank}")
        for i, value in own.items():
            np.testing.assert_allclose(value, weights[i], rtol=1e-5, atol=1e-5)
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(weights)


@exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_has_the_losses_and_metrics_of_one_process(name):
    check("2", name)


@exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_two_pipelines_have_the_losses_and_metrics_of_one_process(name):
    check("4", name)
