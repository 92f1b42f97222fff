"""Workers are asked to leave by SIGTERM; the others train on, or all save their state."""

from __future__ import annotations

import pytest

from tests.harness.tiers import exhaustive
from tests.recovery import test_surviving_pipelines as pipelines
from tests.recovery.test_surviving import SURVIVING, check

FAULTY = "tests.recovery.behaviours.faults"


@pytest.fixture
def elastic(monkeypatch):
    """Sets what `tfdist run --elastic` sets."""
    monkeypatch.setenv("TFDIST_ELASTIC", "1")


def leave(start, workers, asked, phase, step, folder, elastic=None, **settings):
    settings |= {"snapshots": str(folder / "snapshots"), "elastic": elastic or {}}
    faults = dict.fromkeys(asked, (phase, step, "end"))
    return start(workers).answers(f"{SURVIVING}:trained", settings, faults)


def left(answers, ranks):
    return all("SystemExit: 75" in answers[rank][1] for rank in ranks)


@exhaustive
@pytest.mark.parametrize(
    ("workers", "asked", "phase", "step"),
    [
        (2, [1], "after", 9),
        (2, [0], "after", 9),
        (3, [0, 1], "after", 9),  # Without their last words, the third has no majority.
        (3, [2], "after", 6),  # It leaves after an epoch's last batch.
        (2, [0], "evaluation", 7),
        (3, [0], "epoch end", 7),
        (2, [0], "after", 21),  # No step hears of it any more.
        (2, [1], "epoch end", 21),
    ],
)
def test_only_those_leave_that_are_asked(start, elastic, tmp_path, workers, asked, phase, step):
    answers = leave(start, workers, asked, phase, step, tmp_path)
    assert left(answers, asked), answers
    others = [rank for rank in range(workers) if rank not in asked]
    results, expected = check(answers, others)
    for result in results.values():
        assert result["changes"] == [(workers, workers - len(asked))]
        assert result["events"] == expected["events"]


@exhaustive
def test_the_others_have_copies_of_the_shards_of_one_that_leaves(start, elastic, tmp_path):
    settings = {"sharded": True, "elastic": {"copies": 1}}
    answers = leave(start, 3, [1], "after", 9, tmp_path, **settings)
    assert left(answers, [1]), answers
    check(answers, [0, 2], settings)


@exhaustive
def test_the_other_pipeline_goes_on(start, elastic, tmp_path):
    settings, faults = {"saved": str(tmp_path / "snapshots")}, {1: ("after", 9, "end")}
    answers = start(4).answers(f"{pipelines.PIPELINES}:trained", settings, faults)
    assert left(answers, [1]), answers
    over = pipelines.LEAVES[1]
    assert "leaves: too few workers remain for its pipeline" in answers[over][1]
    results, _ = pipelines.check(answers, [rank for rank in range(4) if rank not in (1, over)])
    assert all(result["changes"] == [(4, 2)] for result in results.values())


@exhaustive
@pytest.mark.parametrize(
    ("asked", "settings"),
    [([0, 1], {}), ([0], {"elastic": {"min_workers": 2}}), ([0], {"sharded": True})],
)
def test_all_save_and_leave_if_too_few_are_left(start, elastic, tmp_path, asked, settings):
    answers = leave(start, 2, asked, "after", 9, tmp_path, **settings)
    assert left(answers, [0, 1]), answers
    [snapshot] = (tmp_path / "snapshots").iterdir()
    assert snapshot.name.startswith("step-0000000010-")
    check(leave(start, 2, [], "", 0, tmp_path, **settings), [0, 1])


@exhaustive
def test_one_that_waits_for_others_leaves_with_its_state_saved(start, tmp_path):
    settings = {"folder": str(tmp_path), "saved": "mine", "elastic": {"min_workers": 2}}
    faults, points = {1: ("backward", 9, "kill")}, {0: [("wait", 1, "end")]}
    answers = start(2, strategy=False).answers(
        f"{FAULTY}:faulty", settings, faults, points, silent=[1]
    )
    assert left(answers, [0]), answers
    steps = [path.name[:15] for path in (tmp_path / "mine" / "snapshots").iterdir()]
    assert max(steps) == "step-0000000009"


@exhaustive
def test_all_save_and_leave_without_an_elastic_launcher(start, tmp_path):
    assert left(leave(start, 2, [1], "after", 9, tmp_path), [0, 1])
    check(leave(start, 2, [], "", 0, tmp_path), [0, 1])
