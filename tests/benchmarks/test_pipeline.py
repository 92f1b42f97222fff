"""The benchmark of pipelines gives a row for each schedule, and says why one is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.flags import check_refused
from tests.benchmarks.test_step_time import TORCH_PYTHON, needs_torch
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]
SHORT = ["--starts=1", "--rounds=2", "--steps=1"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def measure(folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run."""
    file = folder / "rows.json"
    done = run(*SHORT, f"--json={file}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[dict[str, Any]]]:
    """What a short run of the real model's small equivalence leaves."""
    folder = tmp_path_factory.mktemp("pipeline")
    table, rows = measure(
        folder,
        "--model=tiny",
        "--schedules=1f1b,zb_h1",
        "--microbatches=4",
        f"--torch_python={TORCH_PYTHON}",
        f"--png={folder}",
    )
    return folder, table, rows


@exhaustive
def test_every_schedule_has_a_row(measured: tuple[Path, str, list[dict[str, Any]]]) -> None:
    _, table, rows = measured
    ours = [row for row in rows if row["backend"] == "tfdist"]
    assert [row["schedule"] for row in ours] == ["1f1b", "zb_h1"]
    for row in ours:
        assert (row["stages"], row["microbatches"]) == (2, 4)
        assert 0 < row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        assert row["simulated_ms"] > 0
        assert row["speedup"] > 0
        assert f"{row['step_ms']:.1f}" in table
    assert ours[0]["limit"] == pytest.approx(1.6)
    assert [row["stages"] for row in rows if row["backend"] == "single"] == [1]


@exhaustive
def test_what_ran_is_drawn(measured: tuple[Path, str, list[dict[str, Any]]]) -> None:
    pytest.importorskip("matplotlib")
    folder = measured[0]
    assert {file.name for file in folder.glob("*.png")} == {"1f1b_2x4.png", "zb_h1_2x4.png"}


@exhaustive
@needs_torch
def test_torch_is_compared(measured: tuple[Path, str, list[dict[str, Any]]]) -> None:
    _, _, rows = measured
    by_name = {(row["backend"], row["schedule"]): row for row in rows}
    assert by_name["tfdist", "1f1b"]["ratio"] > 0
    assert by_name["torch", "1f1b"]["speedup"] > 0
    assert by_name["torch", "zb_h1"]["missing"] == "torch has no such schedule"


@exhaustive
def test_stages_that_wait_take_what_the_simulator_says(tmp_path: Path) -> None:
    wait = ["--padded", "--stages=4", "--microbatches=4", "--pass_ms=10"]
    table, rows = measure(tmp_path, *wait, "--schedules=gpipe,zbv")
    assert [row["simulated_ms"] for row in rows] == pytest.approx([210, 135])
    assert all(row["step_ms"] >= row["simulated_ms"] for row in rows)
    assert all(row["overhead_us"] >= 0 for row in rows)
    assert "step/simulated" in table


def test_without_torch_it_is_reported_with_what_installs_it() -> None:
    done = run(*SHORT, "--backends=torch", "--schedules=gpipe", "--torch_python=/no/python")
    assert done.returncode == 0, done.stderr
    assert "missing: /no/python does not run" in done.stdout
    assert "pip install torch==" in done.stdout


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "pipeline",
        {
            "--stages=0": "a number from 1",
            "--schedules=pigeons": "any of gpipe, 1f1b",
            "--backends=pigeons": "any of tfdist, torch",
        },
    )
