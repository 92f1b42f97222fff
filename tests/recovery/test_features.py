"""What Keras can do stays what it is when workers are lost and others come."""

import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.recovery.behaviours.features import FEATURES
from tests.strategy.comparison import assert_close, assert_equal

MODULE = "tests.recovery.behaviours.features"


def check(answers, ranks, feature):
    expected = reference(f"{MODULE}:trained", {"feature": feature}, {})
    for rank in ranks:
        done, result = answers[rank]
        assert done, result
        for what in ("weights", "history", "epochs"):
            assert_close(result[what], expected[what], f"rank {rank}: {what}", 1e-5)
        for what in ("weights", "slots"):
            assert_equal(result[what], answers[ranks[0]][1][what], f"rank {rank}: {what}")


@exhaustive
@pytest.mark.parametrize("feature", FEATURES)
def test_a_worker_is_lost(start, feature):
    faults = {1: ("backward", 9, "kill")}
    answers = start(3).answers(f"{MODULE}:trained", {"feature": feature}, faults, silent={1})
    check(answers, [0, 2], feature)


@exhaustive
@pytest.mark.parametrize("feature", FEATURES)
def test_a_worker_comes(start, tmp_path, feature):
    ends = 4 if feature == "several steps at once" else 9
    arguments = [0, 1], ends, {}, str(tmp_path / "come"), {"feature": feature}
    answers = start(3, strategy=False).answers(f"{MODULE}:coming", *arguments)
    check(answers, [0, 1, 2], feature)
