"""KerasTuner finds on several workers what it finds in one process."""

import pytest

from tests.harness.tiers import exhaustive
from tests.strategy.comparison import check_same_as_alone

pytest.importorskip("keras_tuner")


@exhaustive
@pytest.mark.parametrize("kind", ["random", "hyperband"])
@pytest.mark.parametrize("given", [True, False])
def test_two_workers_find_what_one_process_finds(kind, given):
    check_same_as_alone("2", "tuner:searched", kind, given)


@exhaustive
def test_a_grid_search_finds_what_one_process_finds():
    check_same_as_alone("2", "tuner:searched", "grid", False)
