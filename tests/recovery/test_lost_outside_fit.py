"""A worker is lost between two calls of `fit`: the others learn of it, and train on without it."""

import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal

USED = "tests.recovery.behaviours.outside_fit:used"


def lose(start, first, call, fault):
    """The results of the two of three workers that are left, which then have trained on alike."""
    victim = fault[0]
    answers = start(3).answers(USED, first, call, fault, silent={victim})
    expected = reference(USED, first, call, None)
    survivors = [rank for rank in range(3) if rank != victim]
    results = []
    for rank in survivors:
        done, result = answers[rank]
        assert done, result
        results.append(result)
        for what in ("weights", "history"):
            assert_close(result[what], expected[what], f"rank {rank}: {what}", 1e-5)
        assert_equal(result["weights"], results[0]["weights"], f"rank {rank}")
        if result["result"] is not None:
            assert_close(result["result"], expected["result"], f"rank {rank}: result", 1e-5)
    return results


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("when", ["before", 0, 2])
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_in_the_call(start, call, when, victim):
    for result in lose(start, True, call, (victim, when, "kill")):
        assert f"worker {victim} (127.0.0.1:" in result["failure"], result["failure"]


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
def test_between_the_calls(start, victim):
    for result in lose(start, True, "evaluate", (victim, "after", "kill")):
        assert result["failure"] == ""


@exhaustive
@pytest.mark.parametrize("when", ["before", 2, "after"])
@pytest.mark.parametrize("victim", [0, 2])
def test_before_the_first_training(start, monkeypatch, victim, when):
    monkeypatch.setenv("TFDIST_ELASTIC", "1")
    lose(start, False, "evaluate", (victim, when, "kill"))


@exhaustive
def test_before_the_first_training_of_workers_that_do_not_expect_it(start):
    answers = start(3).answers(USED, False, "evaluate", (2, 2, "kill"), silent={2})
    for done, said in answers[:2]:
        assert not done
        assert "lost before it first trained" in said
        assert "TFDIST_ELASTIC=1" in said


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_worker_that_is_stopped(start, monkeypatch, call, victim):
    monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", "15")
    for result in lose(start, True, call, (victim, 2, "stop")):
        assert f"worker {victim} (127.0.0.1:" in result["failure"], result["failure"]
