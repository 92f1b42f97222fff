"""The example, started by engines, against one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "examples" / "char_lm.py"), "--epochs=1", "--steps=20"]
_ENGINES = re.compile("TF_CONFIG|TFDIST_|SLURM|OMPI_|PMI|MPI_|RANK$|WORLD_SIZE|MASTER_|JOB_|SM_")
SECONDS = 300


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what engines set."""
    kept = {name: value for name, value in os.environ.items() if not _ENGINES.search(name)}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **quiet, "PYTHONPATH": path, "TFDIST_START_TIMEOUT": "120", **more}


def needs(*programs: str, package: str) -> None:
    """Skips a test where a program is missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed (Debian: {package})")


def run(command: list[str], environment: dict[str, str], **given: object) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        timeout=SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **given,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def loss_in(output: str) -> float:
    """The loss that the chief, and nobody else, has printed."""
    (found,) = re.findall(r"validation loss (\d+\.\d+)", output)
    return float(found)


@pytest.fixture(scope="session")
def alone() -> float:
    """The loss of one process."""
    return loss_in(run(SCRIPT, clean_environment()))


@pytest.fixture
def train(alone):
    """Has an engine run the example on two workers, which must reach the loss of one process."""

    def train(prefix: list[str], script: list[str] = SCRIPT, **variables: str) -> str:
        output = run([*prefix, *script], clean_environment(**variables))
        assert loss_in(output) == pytest.approx(alone, abs=2e-3), output
        assert "Traceback" not in output, output
        return output

    return train
