"""All-reduces of encoded values: the same everywhere, and what is lost is kept for later."""

from __future__ import annotations

import numpy as np
import pytest

from tests.comm.behaviours import gradient
from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

BEHAVIOURS = "tests.comm.behaviours"


@pytest.mark.parametrize("name", ["int8", "onebit", "qsgd"])
@pytest.mark.parametrize("group", ["2", "3"])
def test_sums_are_equal_everywhere_and_errors_are_kept(group, name):
    ranks, steps = int(group), 3
    results = GROUPS[group].run(f"{BEHAVIOURS}:compressed", name, steps)
    first, _ = results[0]
    for totals, _ in results:
        for mine, theirs in zip(totals, first, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert np.array_equal(a, b)
    for i, total in enumerate(zip(*first, strict=True)):
        shape = total[0].shape
        given = sum(gradient(shape, r, s) for r in range(ranks) for s in range(steps))
        left = sum(errors[i] for _, errors in results)
        np.testing.assert_allclose(sum(total) + left, given, atol=1e-4)


@exhaustive
def test_errors_stay_within_two_half_steps():
    """Two errors of half a step, however many ranks there are."""
    for group in ("2", "4"):
        totals, _ = GROUPS[group].run(f"{BEHAVIOURS}:compressed", "int8", 1)[0]
        for total in totals[0]:
            exact = sum(gradient(total.shape, rank, 0) for rank in range(int(group)))
            largest = np.abs(exact).max(initial=0) + 5 * int(group)
            assert np.abs(total - exact).max(initial=0) <= largest / 127


def test_wrong_arguments_are_refused():
    for messages in GROUPS["2"].run(f"{BEHAVIOURS}:compressed_wrongly"):
        assert len(messages) == 2
        for message in messages:
            assert "float32 variable with as many values as its tensor. The tensor: [4]" in message
