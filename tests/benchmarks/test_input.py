"""The benchmark of input pipelines has a row for each number of workers and each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


@exhaustive
@pytest.mark.timeout(600)
def test_every_way_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.input", "--rounds=2", "--steps=2", f"--json={file}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    entries = [(row["pipeline"], row["workers"], row["division"]) for row in rows]
    several = [(2, "never"), (2, "auto"), (2, "files")]
    assert entries == [
        *(("jpeg", *entry) for entry in [(1, "never"), *several]),
        *(("text", *entry) for entry in [(1, "never"), *several]),
        *(("numpy", *entry) for entry in [(1, "never"), *several[:2]]),
    ]
    for row in rows:
        assert row["rows_per_second"] > 0 and row["cpu_seconds_per_1000_rows"] > 0
        assert ("speedup" in row) == ("waiting_share" in row) == (row["workers"] > 1)
        if row["division"] == "auto":
            assert 0.3 < row["processed_share"] < 1.0
    assert "CPU/alone" in done.stdout
