"""What docs/guide/pipelines.md and the docstrings show is what comes out."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import re

import pytest

from tfdist._src.launch.cli import main
from tfdist._src.pipeline.plan.schedule import Action, Kind, Schedule
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.pipeline.simulation import simulate

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "guide" / "pipelines.md").read_text()


def test_commands_in_the_docs_print_what_is_shown(capsys):
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    commands = [part for block in blocks for part in block.split("$ tfdist ")[1:]]
    assert len(commands) >= 4
    for command in commands:
        line, shown = command.split("\n", 1)
        assert main(line.split()) == 0
        assert capsys.readouterr().out == shown


def test_the_table_of_bubbles():
    rows = re.findall(r"^\| (`.*?) \|((?: [\d.]+% \|){4})$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for names, bubbles in rows:
        for name in re.findall(r"`(\w+)`", names):
            for (p, m), shown in zip(
                ((2, 8), (4, 8), (4, 16), (8, 16)), re.findall(r"[\d.]+%", bubbles), strict=True
            ):
                assert f"{simulate(make_schedule(name, p, m)).bubble:.1%}" == shown


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (code,) = (code for code in codes if "last_first" in code)
    exec(compile(code, "pipelines.md", "exec"), {})
    assert capsys.readouterr().out.startswith("last_first: 4 ranks")
    assert (tmp_path / "last_first.png").exists()


@pytest.mark.parametrize(
    "module",
    [
        "plan.lowering",
        "plan.schedule",
        "plan.validation",
        "schedules",
        "schedules.one_f_one_b",
        "schedules.zero_bubble",
        "simulation",
    ],
)
def test_examples_in_docstrings_hold(module, tmp_path, monkeypatch):
    if module == "simulation":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = (Action, Kind, Schedule, make_schedule, simulate)
    result = doctest.testmod(
        importlib.import_module(f"tfdist._src.pipeline.{module}"),
        extraglobs={each.__name__: each for each in names},
    )
    assert result.attempted and not result.failed
