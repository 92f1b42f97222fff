"""The benchmark of recovery gives a row for each feature, against steps without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.flags import check_refused
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


@exhaustive
def test_every_feature_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    short = ["--models=tiny", "--starts=1", "--rounds=2", "--steps=3", f"--json={file}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", *short],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    features = ["none", "none_again", "agreement", "snapshots", "elastic", "sharded", "copies"]
    assert [row["feature"] for row in rows] == features
    for row in rows:
        assert row["model"] == "tiny" and row["workers"] == 2
        assert row["step_ms"] > 0
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert f"{row['step_ms']:.2f}" in done.stdout
    assert rows[0]["ratio"] == rows[0]["quick_ratio"] == 1


@exhaustive
def test_wrong_flags_are_refused() -> None:
    check_refused(
        "recovery",
        {
            "--workers=2,1": "a number from 2",
            "--models=pigeons": "any of mlp, batchnorm, pipeline, tiny",
            "--features=birds": "any of none, none_again, agreement, snapshots, elastic",
            "--faults=flood": "any of kill, stop",
            "--backends=birds": "any of elastic, restart, torchrun",
            "--respawn=maybe": "any of yes, no",
            "--victim=all": "last|chief",
            "--json=/no/folder/rows.json": "its folder does not exist",
            "--rounds=1": "--rounds is 2 or more",
        },
    )
