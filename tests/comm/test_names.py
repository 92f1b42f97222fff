"""The name of a communicator is that of one at a time."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

BEHAVIOURS = "tests.comm.name_behaviours"


def test_a_name_is_not_taken_over():
    for refused, sums in GROUPS["2"].run(f"{BEHAVIOURS}:taken_over"):
        for said, name in zip(refused[:3], ("half", "workers", "half"), strict=True):
            assert said.startswith("ValueError: The open communicators of a process must have")
            assert f"Received: {name!r}, which worker 0 (127.0.0.1:" in said
        for said, name in zip(refused[3:], ("session", "notices"), strict=True):
            assert said.startswith(
                "ValueError: 'session' and 'notices' are the names of tfdist's own"
            )
            assert f"a communicator named {name!r}" in said
        assert sums == [2.0] * 4


def test_a_strategy_of_one_in_a_worker():
    for same, size, mine, total, more in GROUPS["2"].run(f"{BEHAVIOURS}:with_a_strategy_of_one"):
        assert same
        assert size == 2
        assert mine == 1.0
        assert total == 2.0
        assert more == 1


def test_a_strategy_of_one_where_tensorflows_collectives_are_used():
    behaviour = f"{BEHAVIOURS}:with_a_strategy_of_one_by_tensorflow"
    for said in GROUPS["2 by TensorFlow"].run(behaviour):
        assert said.startswith("ValueError: There is no communicator 'workers'")


@exhaustive
def test_a_strategy_of_one_that_comes_first():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdist",
            "run",
            "-n",
            "2",
            "-m",
            "tests.comm.name_behaviours",
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # The chief's.
    assert done.stdout == "1.0 1.0 2.0\n"
