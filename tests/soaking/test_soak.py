"""Soaks: without faults, and minutes of them where workers can come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script."""
    command = [sys.executable, "-m", "tests.soaking", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@exhaustive
def test_without_faults_all_is_right() -> None:
    done = soak("--nofaults", "--minutes=0", "--epochs=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "seed 0: no faults: all is right\n"


@exhaustive
@pytest.mark.timeout(1800)
def test_minutes_of_faults() -> None:
    done = soak("--minutes=3", "--seed=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1: " in done.stdout
