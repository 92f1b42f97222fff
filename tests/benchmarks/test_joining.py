"""The benchmark of joining starts real ranks, and says what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.joining", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@exhaustive
def test_a_row_for_each_number_of_ranks(tmp_path):
    file = tmp_path / "rows.json"
    done = run(
        "--ranks=1,5",
        "--ranks_per_host=2",
        "--backends=native,gloo",
        "--torch_python=/no/python",
        "--idle=0",
        f"--json={file}",
    )
    assert done.returncode == 0, done.stderr
    one, five = json.loads(file.read_text())
    assert (one["ranks"], five["ranks"]) == (1, 5)
    assert five["seconds"] >= five["mesh_s"] > 0 and five["cpu_s"] > 0
    assert five["sent_bytes"] > one["sent_bytes"] == 0
    assert "/no/python does not run" in done.stdout


def test_an_unknown_backend():
    done = run("--backends=horovod")
    assert done.returncode and "--backends: horovod" in done.stderr + done.stdout
