"""When the actions of a real pipeline ran."""

from __future__ import annotations

import itertools

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tfdist._src.pipeline.schedules import make_schedule


@exhaustive
@pytest.mark.parametrize(("schedule", "frozen"), [("1f1b", 0), ("zbv", 0), ("zbv", 3)])
def test_a_step_is_recorded(schedule, frozen):
    results = GROUPS["2"].run("tests.pipeline.recording:record", schedule, frozen)
    expected = [[str(a) for a in own] for own in make_schedule(schedule, 2, 4).actions]
    for result in results:
        assert [[name for name, _, _ in own] for own in result["spans"]] == expected
        assert result["iterations"] == 3
        assert result["learning_rate"] == pytest.approx(0.01)
        assert result["losses"][1] < result["losses"][0]
        assert all(seconds > 0 for seconds in result["forward"])
    assert results[0]["spans"] == results[1]["spans"]
    times = {name: (start, end) for own in results[0]["spans"] for name, start, end in own}
    assert min(start for start, _ in times.values()) == 0
    for own in results[0]["spans"]:
        assert all(start <= end for _, start, end in own)
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(own))
    for m in range(4):
        assert times[f"F0.{m}"][1] <= times[f"F1.{m}"][0]


@exhaustive
def test_both_pipelines_are_recorded_by_themselves():
    results = GROUPS["4"].run("tests.pipeline.recording:record", "1f1b")
    assert [result["ranks"] for result in results] == [2, 2, 2, 2]
    assert len({str(result["spans"]) for result in results}) == 2


def test_only_a_compiled_model_is_recorded():
    results = GROUPS["2"].run("tests.pipeline.recording:record_uncompiled")
    assert all("Call `compile` first" in result for result in results)


@exhaustive
@pytest.mark.parametrize(("group", "pipelines"), [("2", 1), ("4", 2)])
def test_what_a_step_communicates(group, pipelines):
    results = GROUPS[group].run("tests.pipeline.recording:explained")
    sent = [
        f"send 384 B [12x8] for {what} at cut (stage 0 to 1)" for what in ("activation", "gradient")
    ]
    for found, again, noted, refused in results:
        assert found == again == results[0][0]
        assert found[:2] == sent
        assert [step["sent_bytes"] for step in noted] == [768]
        assert noted == results[0][2]
        assert "`explain` under a HybridStrategy of 2 workers per pipeline" in refused
        if pipelines == 1:
            assert found == sent
            continue
        kernel = "reduce 128 B [8x4] for gradient at head/kernel (stage 1 of all pipelines)"
        assert kernel in found
        sparse = [text for text in found if "a sparse gradient" in text]
        assert len(sparse) == 1
        assert "[?x8]" in sparse[0]
        assert any("4 B [scalar] for Sqrt at recording.py:" in text for text in found)
