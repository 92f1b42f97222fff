"""Training ends on all workers together, or with an error on all."""

import itertools

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import some
from tests.strategy.comparison import PACKAGE, check_same_as_alone


@pytest.mark.parametrize(
    ("group", "kind"),
    some(
        itertools.product(
            ["2", "2 by TensorFlow"], ["all_stop_within_an_epoch", "one_stops_after_an_epoch"]
        ),
        always=[],
    ),
)
def test_training_stops_on_all_workers_as_in_one_process(group, kind):
    check_same_as_alone(group, f"stopping:{kind}")


def test_one_worker_cannot_stop_within_an_epoch():
    answers = GROUPS["2"].answers(f"{PACKAGE}.stopping:one_stops_within_an_epoch")
    GROUPS["2"].stop()  # Its collectives have failed.
    for done, said in answers:
        assert done, said
        assert "the end of an epoch, by its data or by stop_training" in said
        assert "worker 0" in said and "worker 1" in said
