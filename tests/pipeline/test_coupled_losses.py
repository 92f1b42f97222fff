"""A loss that couples the rows of a batch is refused, since a microbatch has but some of them."""

from tests.groups import GROUPS


def test_dice_is_refused_on_all_ranks():
    for said in GROUPS["2"].run("tests.pipeline.coupled_behaviours:dice"):
        assert "couples the rows of a batch" in said
