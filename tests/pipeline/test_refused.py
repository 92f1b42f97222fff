"""What is not exact in microbatches is refused, as each of them has only some of the rows."""

import pytest

from tests.groups import GROUPS


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("coupling_loss", "couples the rows of a batch"),
        ("float8", "A float8 layer records the largest values"),
    ],
)
def test_on_all_ranks(behaviour, said):
    for message in GROUPS["2"].run(f"tests.pipeline.refused_behaviours:{behaviour}"):
        assert said in message
