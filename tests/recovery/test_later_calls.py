"""A process comes to a script that calls `fit` several times, or with another script."""

from __future__ import annotations

import h5py
import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal

BEHAVIOURS = "tests.recovery.behaviours.later_calls"
CALLS = 3


def check(results, comes_in=0):
    expected = reference(f"{BEHAVIOURS}:several", {}, {})
    for result in results:
        assert_close(result["weights"], expected["weights"], "weights", 1e-5)
        assert_close(result["histories"], expected["histories"], "histories", 1e-5)
        # What a process that came evaluates before that is of its own weights.
        assert_close(result["losses"][comes_in:], expected["losses"][comes_in:], "losses", 1e-5)
        for what in ("weights", "slots"):
            assert_equal(result[what], results[0][what], what)


@exhaustive
@pytest.mark.parametrize(
    ("call", "unprepared"), [*((call, False) for call in range(CALLS)), (1, True)]
)
def test_a_worker_comes_in_any_call(start, tmp_path, call, unprepared):
    settings = {"comes_in": call, "folder": str(tmp_path), "unprepared": unprepared}
    arguments = [0, 1], 5, {}, str(tmp_path / "come"), settings
    answers = start(3, strategy=False).answers(f"{BEHAVIOURS}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    results = [result for _, result in answers]
    check(results, call)
    assert [result["size"] for result in results] == [3, 3, 3]
    lines = [line for line in results[2]["said"].splitlines() if "ended before" in line]
    assert [line.split()[2] for line in lines] == [str(n + 1) for n in range(call)]
    # It writes nothing before it is admitted, as if it were the chief.
    assert results[2]["said"].count("is not written") == call
    for number in range(CALLS):
        rows = (tmp_path / f"{number}.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]
        with h5py.File(tmp_path / f"{number}.weights.h5") as file:
            kernel = file["layers/dense/vars/0"][()]
        assert_equal(kernel, results[0]["after"][number][0], f"the file of call {number}")


@exhaustive
def test_a_worker_learns_of_a_long_history(start, tmp_path):
    curve = {"curve": 150_000}  # 6 MiB in two epochs, as text
    settings = {"comes_in": 1, "folder": str(tmp_path), **curve}
    arguments = [0, 1], 5, {}, str(tmp_path / "come"), settings
    answers = start(3, strategy=False).answers(f"{BEHAVIOURS}:coming", *arguments)
    assert all(done for done, _ in answers), answers
    expected = reference(f"{BEHAVIOURS}:several", curve, {})
    for _, result in answers:
        assert_close(result["weights"], expected["weights"], "weights", 1e-5)
        assert_close(result["histories"], expected["histories"], "histories", 1e-5)


@exhaustive
@pytest.mark.parametrize(
    ("call", "differs", "named"),
    [
        (0, "epochs", "'epochs': 3"),
        (0, "callback", "max_workers=7"),
        (0, "batch", "batch='per_worker'"),
        (0, "model", "shapes and types"),
        (0, "devices", "on 1 CPU"),
        (1, "epochs", "'epochs': 3"),
    ],
)
def test_a_process_that_differs_is_refused_and_the_others_go_on(
    start, tmp_path, call, differs, named
):
    sign = str(tmp_path / "come")
    settings = {"comes_in": call, "differs": differs, "refused": sign, "folder": str(tmp_path)}
    arguments = [0, 1], 0, {}, sign, settings
    ranks = start(3, strategy=False, devices=[2, 2, 1] if differs == "devices" else 1)
    answers = ranks.answers(f"{BEHAVIOURS}:coming", *arguments)
    assert all(done for done, _ in answers[:2]), answers
    results = [result for _, result in answers[:2]]
    check(results)
    for result in results:
        assert result["size"] == 2
        assert "generation" not in result["said"]  # The group has never changed.
    done, said = answers[2]
    assert not done
    assert "ProgramMismatchError" in said
    assert "cannot join the running job, which continues without it" in said
    assert named in said
