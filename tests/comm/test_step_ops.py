"""A step that was taken back can be redone, up to where it had been prepared."""

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive


@exhaustive
def test_a_step_is_taken_back_and_redone():
    states, has_undone = GROUPS["alone"].run("tests.comm.step_behaviours:redone")[0]
    assert states == [
        [[2.0, 3.0], [11.0]],
        [[102.0, 103.0], [1000.0]],
        [[102.0, 103.0], [1000.0]],
        [[103.0, 104.0], [11.0]],
    ]
    assert has_undone
