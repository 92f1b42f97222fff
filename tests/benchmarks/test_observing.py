"""The benchmark of observing gives a row for each way to watch, against not being watched."""

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
WATCHES = [
    "none",
    "none_again",
    "recorder",
    "throughput",
    "straggler",
    "timeline",
    "metrics",
    "all",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, Any]]]:
    """The table, and the rows of a short run of everything by the way to watch."""
    pytest.importorskip("prometheus_client")
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    short = ["--models=tiny", "--starts=1", "--rounds=2", "--steps=10", f"--json={file}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.observing", *short],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, {row["watch"]: row for row in json.loads(file.read_text())}


@exhaustive
def test_every_way_to_watch_has_a_row(measured: tuple[str, dict[str, dict[str, Any]]]) -> None:
    table, rows = measured
    assert list(rows) == WATCHES
    for row in rows.values():
        assert 0 < row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        assert 0 < row["quick_ms"] < row["high_ms"]
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['step_ms']:.2f}" in table
    assert rows["none"]["ratio"] == rows["none"]["quick_ratio"] == 1


@exhaustive
def test_only_steps_without_the_recorder_are_not_recorded(
    measured: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    _, rows = measured
    # An input, the rows of all workers, the gradients, and the state of the metrics.
    least = {watch: 0 if watch.startswith("none") else 4 for watch in WATCHES}
    assert {watch: int(row["recorded"]) for watch, row in rows.items()} == least


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "observing",
        {
            "--workers=0": "positive",
            "--models=pigeons": "any of tiny, mlp, cnn, resnet, gpt, lstm",
            "--watch=birds": "any of none, none_again, recorder",
        },
    )


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.observing.figures import format_table, make_rows

    times = {
        "none": [[0.01, 0.01], [0.05, 0.15], [0.02, 0.02]],
        "recorder": [[0.02, 0.02], [0.1, 0.3], [0.02, 0.02]],
    }
    recorded = {"none": 0.0, "recorder": 7.0}
    rows = make_rows("mlp", 2, times, recorded, {"metrics": "there is none"})
    none, ours, metrics = rows
    assert (none["ratio"], none["recorded"]) == (1, 0)
    assert (ours["step_ms"], ours["quick_ms"]) == pytest.approx((20, 20))
    assert (none["quick_ms"], ours["quick_ratio"]) == pytest.approx((10, 2))
    assert (ours["ratio"], ours["ratio_low"], ours["recorded"]) == pytest.approx((2, 1.5, 7))
    assert set(metrics) == {"model", "workers", "watch", "missing"}
    assert "missing: there is none" in format_table(rows)
