"""Where an operation of a stage fails, all workers raise soon, and name worker, stage and cause."""

from __future__ import annotations

import pytest

from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive

# The deadline of a collective is 60 s.
SOON = 30


@exhaustive
@pytest.mark.parametrize(("workers", "hosts"), [(2, 1), (4, 2)])
def test_a_layer_that_raises_in_numpy(workers, hosts):
    ranks = Ranks(workers, hosts=hosts)
    answers = ranks.answers("tests.pipeline.failing_behaviours:fit", 2)
    ranks.stop()
    for rank, (_, (message, seconds)) in enumerate(answers):
        assert "this layer is worn out" in message
        assert seconds < SOON
        if rank != workers - 1:
            assert f"worker {workers - 1} (127.0.0.1:" in message
            assert "which holds stage 1, failed: " in message
