"""The benchmark of convergence gives a row for each task, codec and loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.flags import check_refused
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.convergence", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run."""
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    done = run("--codecs=int8", "--steps=3", f"--json={file}")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@exhaustive
def test_every_loss_has_a_row(trained: tuple[str, list[dict[str, Any]]]) -> None:
    table, rows = trained
    assert [(row["task"], row["codec"], row["on"]) for row in rows] == [
        ("char_lm", "none", "held out"),
        ("char_lm", "int8", "held out"),
        ("digits", "none", "trained on"),
        ("digits", "none", "held out"),
        ("digits", "int8", "trained on"),
        ("digits", "int8", "held out"),
    ]
    for row in rows:
        assert (row["steps"], row["settings"]) == (3, "defaults")
        assert row["relative"] == pytest.approx(row["loss"] / row["exact_loss"] - 1)
        assert abs(row["relative"]) < 0.02
        assert row["sent"] == 1 if row["codec"] == "none" else row["sent"] < 0.8
        assert (row["codec"] == "none") == (row["loss"] == row["exact_loss"])
        assert f"{row['loss']:.4f}" in table
    assert "above" not in table


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "convergence",
        {
            "--task=pigeons": "any of char_lm, digits",
            "--task=": "any of char_lm, digits",
            "--codecs=none,pigeons": "any of none, fp16",
            "--codecs=": "any of none, fp16",
            "--steps=0": "positive integer",
            "--seeds=0": "positive integer",
            "--json=/no/folder/file": "its folder does not exist",
        },
    )


def test_rows_are_means_and_name_what_is_beyond() -> None:
    from benchmarks.convergence.figures import format_table, is_beyond, make_rows
    from benchmarks.convergence.job import Outcome

    def rows(losses: list[float], exact: list[float]) -> list[dict[str, Any]]:
        outcomes = [Outcome({"held out": loss}, "", 10) for loss in losses]
        others = [Outcome({"held out": loss}, "", 40) for loss in exact]
        return make_rows(outcomes, others, {"codec": "int8"})

    (row,) = rows([2.0, 2.02], [1.0, 3.0])
    assert (row["loss"], row["exact_loss"]) == pytest.approx((2.01, 2.0))
    assert (row["relative"], row["sent"]) == pytest.approx((0.005, 0.25))
    assert not is_beyond(row)
    assert "+0.50 %" in format_table([row])
    assert not is_beyond(rows([1.0], [2.0])[0])
    assert is_beyond(rows([2.1], [2.0])[0])
    (diverged,) = rows([float("nan"), 2.0], [2.0, 2.0])
    assert (diverged["loss"], diverged["relative"]) == (None, None)
    assert is_beyond(diverged)
    assert is_beyond(rows([2.0], [])[0])
    missing = {"codec": "topk", "missing": "no luck"}
    assert is_beyond(missing)
    assert "missing: no luck" in format_table([row, missing])


def test_every_recipe_is_one_of_a_codec() -> None:
    from benchmarks.convergence.recipes import RECIPES, Recipe, codec_of, recipe_of
    from benchmarks.convergence.tasks import TASKS
    from tfdist.compression import CODECS

    assert set(RECIPES) == set(TASKS)
    for task, recipes in RECIPES.items():
        assert set(recipes) <= set(CODECS)
        for name, recipe in recipes.items():
            assert isinstance(codec_of(name, recipe_of(task, name)), CODECS[name])
            assert str(recipe) != "defaults"
    assert codec_of("none", Recipe()) is None
    assert str(Recipe({"ratio": 0.1}, 2.0)) == "ratio=0.1, learning rate * 2"
