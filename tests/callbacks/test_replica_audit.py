"""The audit is quiet where replicas are equal, and names what differs where they are not."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tfdist.callbacks import ReplicaAudit

AUDITED = "tests.callbacks.behaviours:audited"


@exhaustive
@pytest.mark.parametrize("group", ["1", "2", "2x2"])
def test_equal_replicas_train_on(group):
    assert GROUPS[group].run(AUDITED, 3) == [True] * GROUPS[group].workers


def test_the_first_difference_is_named_on_all_workers():
    for said in GROUPS["2"].run(AUDITED, 3, (1, 4)):
        assert said.startswith("After 6 batches the replicas are not equal: the variable '")
        assert "/bias' differs between worker 0 and worker 1." in said


@exhaustive
@pytest.mark.parametrize(("sharded", "accumulation"), [(True, None), (False, 3), (True, 3)])
def test_what_is_a_workers_own_is_not_compared(sharded, accumulation):
    """And the difference that comes with the fourth batch is found."""
    behaviour = "tests.callbacks.behaviours:audited_apart"
    for said in GROUPS["2"].run(behaviour, sharded, accumulation):
        assert said.startswith("After 4 batches the replicas are not equal: the variable '")


@exhaustive
def test_the_end_is_audited_too():
    for said in GROUPS["2"].run(AUDITED, 1000, (0, 9)):
        assert "After 10 batches" in said


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="must be a positive number"):
        ReplicaAudit(every=0)
