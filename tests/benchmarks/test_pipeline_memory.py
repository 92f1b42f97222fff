"""A worker of a pipeline holds its own stages' weights, gradients and slots, and little more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


@exhaustive
def test_the_peak_is_little_more_than_what_is_needed(tmp_path: Path) -> None:
    """What a step needs in passing is some layers, and so less of a larger model."""
    file = tmp_path / "memory.json"
    arguments = ["--width=3000", "--layers=12", "--schedules=1f1b", f"--json={file}"]
    # Without oneDNN, whose pool keeps what is freed.
    environment = {"PYTHONPATH": str(ROOT), "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pipeline_memory", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1f1b" in done.stdout
    single, pipelined = json.loads(file.read_text())
    assert pipelined["needed_mib"] > 800
    # Half of the model, with Adam's two slots, in one process and in two.
    assert pipelined["needed_mib"] == single["needed_mib"]
    assert pipelined["peak/needed"] < 1.2
