"""Workers that are killed or told to go, as real processes: started again, they go on."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.options import PREEMPTED

SCRIPT = pathlib.Path(__file__).parent / "dying.py"


def run(folder, how, rank, after=9, workers=2):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tfdist", "run", "-n", str(workers), "--output", "all"]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(SCRIPT.parent.parent.parent),
    }
    return subprocess.run(
        [*command, str(SCRIPT), str(folder), how, str(rank), str(after)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )


def weights(folder, workers=2):
    return [(folder / f"weights-{rank}").read_text() for rank in range(workers)]


@exhaustive
@pytest.mark.parametrize(
    ("how", "rank", "after"),
    [
        ("killed", 0, 9),
        ("killed", 1, 9),
        ("told to go", 0, 9),
        ("told to go", 1, 9),
        ("told to go", 1, 11),  # All batches of the second epoch are trained then.
        ("told to go", 0, 18),  # The last batch: no step will hear of it.
        ("told to go", 1, 18),
    ],
)
def test_a_job_that_is_started_again_ends_like_one_undisturbed(tmp_path, how, rank, after):
    first = run(tmp_path / "a", how, rank, after)
    if how == "killed":
        assert first.returncode == 137, first.stderr
    else:
        assert first.returncode == PREEMPTED, first.stderr
        # The request travels with the next step.
        assert f"SIGTERM: the state after {min(after + 1, 18)} steps is saved in" in first.stderr
    assert not (tmp_path / "a" / "weights-0").exists()
    second = run(tmp_path / "a", how, rank, after)
    assert second.returncode == 0, second.stderr
    # The last snapshot may have been in the writing when the worker was killed.
    steps = "[48]" if how == "killed" else str(min(after + 1, 18))
    assert re.search(f"training resumes at .* after {steps} steps", second.stderr)
    whole = run(tmp_path / "b", "undisturbed", 0)
    assert whole.returncode == 0, whole.stderr
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    losses = [np.load(tmp_path / name / "losses-0.npy") for name in "ab"]
    assert np.array_equal(*losses)
    assert not (tmp_path / "a" / "snapshots").exists()
