"""Workers with several devices each are lost, and come."""

import pytest

from tests.harness.tiers import exhaustive
from tests.recovery.behaviours.data_kinds import DATA
from tests.recovery.behaviours.features import FEATURES
from tests.recovery.test_features import MODULE as FEATURE
from tests.recovery.test_features import check as check_feature
from tests.recovery.test_rows_per_worker import PER_WORKER
from tests.recovery.test_rows_per_worker import check as check_redrawn
from tests.recovery.test_surviving import SURVIVING, check, lose
from tests.strategy.comparison import assert_equal

pytestmark = exhaustive


@pytest.mark.parametrize("phase", ["before", "forward", "backward", "after", "evaluation"])
@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (3, 1)])
def test_whoever_is_killed_whenever(start, workers, victim, phase):
    for result in lose(start, workers, {victim: (phase, 10, "kill")}, devices=2).values():
        assert result["changes"] == [(workers, workers - 1)]


def test_a_lost_host_is_survived(start):
    lose(start, 3, {2: ("backward", 10, "kill")}, hosts=3, devices=2)


@pytest.mark.parametrize("data", [kind for kind in DATA if kind != "dataset"])
def test_kinds_of_data(start, data):
    """Also where one of a worker's devices has read its rows when the step fails, but not all."""
    lose(start, 3, {1: ("backward", 18, "kill")}, {"data": data}, devices=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_execution": 3},
        {"steps_per_epoch": 5},
        {"optimizer": {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1}},
    ],
)
def test_ways_to_train(start, settings):
    lose(start, 3, {1: ("backward", 10, "kill")}, settings, devices=2)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_survive_a_loss(start, feature):
    faults = {1: ("backward", 18, "kill")}
    ranks = start(3, devices=2)
    answers = ranks.answers(f"{FEATURE}:trained", {"feature": feature}, faults, silent={1})
    check_feature(answers, [0, 2], feature)


def test_rows_per_worker(start):
    # The Python function of a step runs once for all devices of a worker.
    faults = {1: ("backward", 9, "kill")}
    answers = start(3, devices=2).answers(f"{SURVIVING}:trained", PER_WORKER, faults, silent={1})
    check_redrawn(answers, [0, 2], [(0, 3), (9, 2)], {})


@pytest.mark.parametrize("data", ["dataset", "sparse", "generator"])
def test_a_worker_comes(start, tmp_path, data):
    ranks = start(3, strategy=False, devices=2)
    arguments = [0, 1], 10, {}, str(tmp_path / "come"), {"data": data}
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    results, _ = check(answers, [0, 1, 2], {"data": data})
    assert results[0]["changes"] == [(2, 3)]


def test_a_worker_comes_to_compressed_gradients(start, tmp_path):
    arguments = [0, 1], 4, {}, str(tmp_path / "come"), {"compression": "onebit"}
    ranks = start(3, strategy=False, hosts=3, devices=2)
    answers = ranks.answers(f"{SURVIVING}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    for _, result in answers:
        assert_equal(result["weights"], answers[0][1]["weights"], "weights")
