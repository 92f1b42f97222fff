"""Pictures in characters and as files."""

from __future__ import annotations

import sys

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind
from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule
from tfdist._src.pipeline.simulation import Span, Timeline, draw, simulate, text


def test_one_f_one_b():
    assert text(make_schedule("1f1b", 2, 2)).splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches; 9 s, bubble 33.3%, peak activations 2 1",
        "rank 0 F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 .  F0 B0 -- F1 B1 -- .  .",
    ]


def test_small_letters_are_other_stages():
    assert text(make_schedule("zbv", 2, 2)).splitlines()[1:] == [
        "rank 0 F0 F1 .  f0 i0 f1 i1 I0 w0 I1 w1 W0 W1",
        "rank 1 .  F0 f0 F1 f1 i0 I0 i1 I1 w0 W0 w1 W1",
    ]


def test_wide_numbers_and_uneven_costs():
    line = text(simulate(make_schedule("gpipe", 1, 11), Costs(1, 0.2, 0.2))).splitlines()[1]
    assert line.startswith("rank 0 F0  --- F1  --- --- F2 ")
    assert line.endswith(" B9  B10")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_shown(name):
    schedule = make_schedule(name, 4, 8)
    lines = text(schedule).splitlines()
    assert len(lines) == 5
    assert max(map(len, lines)) <= 180
    for line, own in zip(lines[1:], schedule.actions, strict=True):
        shown = [word for word in line.split()[2:] if word[0] not in ".-"]
        assert [word.upper() for word in shown] == [f"{a.kind.value}{a.microbatch}" for a in own]


def test_a_measured_timeline(tmp_path):
    # A rank that does nothing, a very short action, and one that overlaps by its clock.
    spans = (
        Span(Action(Kind.FORWARD, 0, 0), 0.0001, 0.0002),
        Span(Action(Kind.FORWARD, 0, 1), 0.3, 0.7),
        Span(Action(Kind.BACKWARD, 0, 1), 0.69999, 1.0),
    )
    timeline = Timeline("measured", (spans, ()))
    lines = text(timeline).splitlines()
    assert len(lines[1].split()) == len(lines[2].split()) == 402
    assert [word for word in lines[1].split()[2:] if word[0] not in ".-"] == ["F0", "F1", "B1"]
    draw(timeline, tmp_path / "measured.png")


@exhaustive
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_picture_is_written(name, tmp_path):
    pytest.importorskip("matplotlib")
    draw(simulate(make_schedule(name, 3, 4)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="not installed: pip install matplotlib"):
        draw(simulate(make_schedule("gpipe", 1, 1)), tmp_path / "picture.png")
