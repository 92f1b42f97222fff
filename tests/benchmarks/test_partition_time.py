"""The benchmark of partitioning measures each of its phases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


@exhaustive
def test_every_phase_takes_time() -> None:
    command = [sys.executable, "-m", "benchmarks.partition_time", "--blocks=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--rounds=1"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, *phases = map(str.split, done.stdout.splitlines())
    assert size[:2] == ["1", "blocks,"] and int(size[2]) > 500
    assert [name for name, *_ in phases] == ["trace", "analyze", "partition"]
    assert all(float(seconds) > 0 for _, _, _, seconds, *_ in phases)
