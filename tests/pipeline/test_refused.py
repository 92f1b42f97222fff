"""What is not exact in microbatches is refused, as each of them has only some of the rows."""

import pytest

from tests.groups import GROUPS
from tests.tiers import some

ROWS = "must treat the rows of a batch independently"
LINE = "refused_behaviours.py:"
SAID = {
    "centering": [ROWS, LINE],
    "a_penalty_that_couples_rows": [ROWS, LINE],
    "statistics_of_all_replicas": [ROWS],
    "float8": ["A float8 layer records the largest values"],
    "unlike_rows": ["for a pipeline must have the same number of rows. Received: (10, 4), (26, 2)"],
    "a_model_in_one_piece": ["requires a model in stages", "tfdist.PipelineModel"],
}


@pytest.mark.parametrize(
    "behaviour", some(list(SAID), always=["centering", "a_model_in_one_piece"])
)
def test_on_all_ranks(behaviour):
    for message in GROUPS["2"].run(f"tests.pipeline.refused_behaviours:{behaviour}"):
        for part in SAID[behaviour]:
            assert part in message
