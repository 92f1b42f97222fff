"""Mars starts a script with `TF_CONFIG`, and with nothing else in its environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.engines.conftest import SCRIPT, SECONDS, loss_in
from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.ports import Reservation

# A user without a home.
NOBODY = {"user": 54321, "group": 54321, "extra_groups": []}


def start(addresses, index, who):
    place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return subprocess.Popen(
        SCRIPT,
        env={"TF_CONFIG": json.dumps(place)},
        cwd="/",
        **who,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def readable_by_others():
    """Whether another user can run this Python."""
    command = [sys.executable, "-c", "import tfdist, tensorflow"]
    done = subprocess.run(command, env={}, capture_output=True, check=False, **NOBODY)
    return done.returncode == 0


@exhaustive
@pytest.mark.parametrize("who", [{}, NOBODY], ids=["this_user", "nobody"])
def test_the_example_with_an_empty_environment(alone, who):
    if who:
        try:
            usable = readable_by_others()
        except OSError:
            usable = False
        if not usable:
            pytest.skip("another user cannot run this Python")
    with Reservation(2) as reservation:
        addresses = [f"127.0.0.1:{port}" for port in reservation.ports]
        workers = [start(addresses, index, who) for index in range(2)]
        try:
            first, second = (worker.communicate(timeout=SECONDS)[0] for worker in workers)
        finally:
            for worker in workers:
                worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], first + second
    assert loss_in(first + second) == pytest.approx(alone, abs=2e-3)
    assert "slower" not in first + second  # The native collectives are there.
