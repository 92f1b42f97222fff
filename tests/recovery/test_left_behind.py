"""An error ends `fit` on some workers, whose processes go on: the others do, too."""

import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal

TRAINED = "tests.recovery.behaviours.left_behind:trained"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("TFDIST_STALL_WARNING", "3")


def train(start, workers, folder, silent=(), **settings):
    settings = {"folder": str(folder), **settings}
    answers = start(workers).answers(TRAINED, settings, silent=set(silent))
    for rank, (done, result) in enumerate(answers):
        assert done or rank in silent, result
    common = len(settings["raisers"]) == workers
    expected = reference(TRAINED, {"common": common, "folder": str(folder)})["weights"]
    results = [result if done else None for done, result in answers]
    stay = [one for one in results if one and (common or not one["raised"])]
    for result in stay:
        assert_close(result["weights"], expected, "weights", 1e-5)
        assert_equal(result["weights"], stay[0]["weights"], "weights")
        assert result["failure"] == ""
        assert result["size"] == len(stay)
    return results


@exhaustive
@pytest.mark.parametrize(("error", "elastic"), [("ValueError", "1"), ("KeyboardInterrupt", "0")])
@pytest.mark.parametrize("raisers", [[0], [2], [0, 1]])
def test_the_others_go_on(start, tmp_path, monkeypatch, raisers, error, elastic):
    monkeypatch.setenv("TFDIST_ELASTIC", elastic)
    workers = 2 * len(raisers) + 1
    results = train(start, workers, tmp_path, raisers=raisers, error=error)
    for rank in raisers:
        assert results[rank]["raised"] == f"{error}('the disk is gone')"
        assert results[rank]["failure"].startswith("GroupLostError")
        assert f"worker {rank} (127.0.0.1:" in results[rank]["failure"]
        assert f"has left the others: {error}: the disk is gone" in results[rank]["failure"]


@exhaustive
@pytest.mark.parametrize("raiser", [0, 1])
def test_while_a_group_forms(start, tmp_path, raiser):
    train(start, 4, tmp_path, raisers=[raiser], dies=3, silent=[3])


@exhaustive
def test_an_error_of_all_workers(start, tmp_path):
    late = 10.0  # much longer than the others wait for a worker that they need
    for result in train(start, 3, tmp_path, raisers=[0, 1, 2], late=late):
        assert result["raised"]
