"""The example trains alone and on two workers, to the same losses."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal

ROOT = Path(__file__).parents[2]
SCRIPT = "char_lm.py"
SHORT = ["--epochs=2", "--steps=8", "--batch_size=15"]
SMALL = {"LENGTH": 16, "WIDTH": 32, "BLOCKS": 1}


@exhaustive
def test_a_small_one_trains_as_in_one_process() -> None:
    arguments = ("tests.examples.behaviours:fit_of", SCRIPT, SMALL, *SHORT, "--steps=4")
    (alone,) = GROUPS["alone"].run(*arguments)
    first, second = GROUPS["2"].run(*arguments)
    for name in ("loss", "val_loss"):
        before, after = alone["losses"][name]
        assert after < before < math.log(128) + 0.5
    assert_close(first["losses"], alone["losses"], "worker 0")
    assert_close(second["losses"], alone["losses"], "worker 1")
    assert_equal(second["weights"], first["weights"], "worker 1")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs the whole one."""
    script = str(ROOT / "examples" / SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command, script, *SHORT, "--check"],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def alone() -> subprocess.CompletedProcess[str]:
    return run()


@pytest.fixture(scope="module")
def together() -> subprocess.CompletedProcess[str]:
    return run("-m", "tfdist", "run", "-n", "2")


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss: ([\d.]+)", output)]


@exhaustive
def test_the_loss_falls(alone: subprocess.CompletedProcess[str]) -> None:
    first, first_unseen, last, last_unseen = losses(alone.stdout)
    assert last < first < math.log(128) + 0.5
    assert last_unseen < first_unseen


@exhaustive
def test_two_workers_train_as_one(
    alone: subprocess.CompletedProcess[str], together: subprocess.CompletedProcess[str]
) -> None:
    # The last of the four decimals that are shown may be rounded otherwise.
    assert losses(together.stdout) == pytest.approx(losses(alone.stdout), rel=1e-5, abs=1.1e-4)


@exhaustive
@pytest.mark.parametrize("how", ["alone", "together"])
def test_the_chief_reports_speed_loss_and_a_sample(
    how: str, request: pytest.FixtureRequest
) -> None:
    output = request.getfixturevalue(how).stdout
    (speed,) = re.findall(r"^([\d,]+) characters per second$", output, re.MULTILINE)
    assert int(speed.replace(",", "")) > 0
    (final,) = re.findall(r"^validation loss ([\d.]+) nats per character$", output, re.MULTILINE)
    assert float(final) == pytest.approx(losses(output)[-1], abs=1e-3)
    sample = output[output.index("nats per character\n") :]
    assert "def " in sample
    assert len(sample) > 300


@exhaustive
@pytest.mark.parametrize("how", ["alone", "together"])
def test_too_high_a_loss_fails_the_check(how: str, request: pytest.FixtureRequest) -> None:
    done = request.getfixturevalue(how)
    assert done.returncode == 1
    assert "The loss must be at most" in done.stderr
