"""`tfdist pipeline`: pictures, the comparison, and complaints in one line."""

from __future__ import annotations

import re
import sys

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.cli import main
from tfdist._src.pipeline.schedules import SCHEDULES

SIZES = ["pipeline", "--ranks", "4", "--microbatches", "8"]


def test_the_comparison_has_a_row_for_each_schedule(capsys):
    assert main(SIZES) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert list(rows)[2:-1] == list(SCHEDULES)
    assert rows["1f1b"] == ["1", "33", "27.3%", "2.91", "4"]
    assert rows["zb_h1"] == ["1", "27", "11.1%", "3.56", "4"]
    assert rows["interleaved"] == ["2", "28.5", "15.8%", "3.37", "5.5"]
    assert rows["zbv"] == ["2", "25.5", "5.9%", "3.76", "4"]


def test_the_comparison_with_more_stages(capsys):
    assert main([*SIZES, "--virtual-stages", "3", "--costs", "1,1.5,0.5", "--transfer", "0.1"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["interleaved_zb"][0] == "3"
    assert rows["zbv"][0] == "2"
    assert rows["gpipe"][:2] == ["1", "33.6"]


def test_a_picture_in_characters(capsys):
    assert main([*SIZES, "--schedule", "interleaved", "--virtual-stages", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("interleaved: 4 ranks, 4 stages, 8 microbatches; 33 s, bubble 27.3%")
    assert [line[:6] for line in lines[1:]] == [f"rank {rank}" for rank in range(4)]


def test_costs_reach_the_schedule_and_the_time(capsys):
    main([*SIZES, "--schedule", "zb_h1", "--costs", "1,2,1", "--transfer", "0"])
    assert "; 38 s," in capsys.readouterr().out


@exhaustive
def test_a_picture_as_a_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "zbv.png"
    assert main([*SIZES, "--schedule", "zbv", "--png", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "zbv: 4 ranks" in capsys.readouterr().out


def test_a_picture_without_matplotlib_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SIZES, "--schedule", "zbv", "--png", str(tmp_path / "zbv.png")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install matplotlib" in said


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--ranks 4", "required: --microbatches"),
        ("--ranks 0 --microbatches 8", "--ranks: must be an integer >= 1"),
        ("--ranks 4 --microbatches 8 --schedule fly", "invalid choice: 'fly'.*gpipe"),
        (
            "--ranks 4 --microbatches 8 --virtual-stages 0",
            "--virtual-stages: must be an integer >= 1",
        ),
        ("--ranks 4 --microbatches 8 --costs 1,2", "three numbers F,I,W, .* Received: '1,2'"),
        ("--ranks 4 --microbatches 8 --costs 1,2,x", "Received: '1,2,x'"),
        ("--ranks 4 --microbatches 8 --costs 0,0,0", "not all 0"),
        ("--ranks 4 --microbatches 8 --transfer -1", "number of seconds|expected one argument"),
        ("--ranks 4 --microbatches 8 --png a.png", "--png requires --schedule"),
    ],
)
def test_a_wrong_line_is_one_clear_line(line, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["pipeline", *line.split()])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tfdist pipeline: error: ")
    assert said.count("\n") == 1
    assert re.search(complaint, said)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            "--schedule zbv --virtual-stages 3",
            "zbv has 8 stages on 4 ranks",
        ),
        ("--schedule zbv --png no/such/folder/a.png", "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(options, complaint, capsys):
    assert main([*SIZES, *options.split()]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tfdist pipeline: error: ")
    assert said.count("\n") == 1
    assert complaint in said


def test_the_help_names_all_schedules(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["pipeline", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "processes in the pipeline" in text
    assert all(name in text for name in SCHEDULES)
    assert max(map(len, text.splitlines())) <= 100
