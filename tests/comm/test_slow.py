"""A slow connection is no failure."""

from __future__ import annotations

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

BEHAVIOURS = "tests.comm.slow_behaviours"
# More than twice the patience with an operation that is canceled and makes no progress.
SECONDS = 2.5


@exhaustive
def test_the_end_of_the_data_does_not_end_what_is_on_its_way():
    for ended, took, behind in GROUPS["2 hosts"].run(
        f"{BEHAVIOURS}:at_the_end_of_the_data", SECONDS
    ):
        assert ended.startswith("OutOfRangeError")
        assert took > SECONDS / 2
        assert behind == 2.0
