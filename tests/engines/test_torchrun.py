"""torchrun's variables, set by torchrun itself where it is installed, and by hand."""

import os
import subprocess
import sys

import pytest

from tests.engines.conftest import ROOT, SCRIPT, clean_environment, loss_in
from tests.harness.tiers import exhaustive


@exhaustive
def test_torchrun_trains_as_one_process(train):
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import torch"], capture_output=True)
    if found.returncode:
        pytest.skip("torch is not installed; TORCH_PYTHON names a Python that has it")
    run = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    train(run, [*SCRIPT])


@exhaustive
def test_variables_that_a_script_sets(alone):
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29518"}
    workers = [
        subprocess.Popen(
            SCRIPT,
            env=clean_environment(**place, RANK=str(rank)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert loss_in("".join(outputs)) == pytest.approx(alone, abs=2e-3)
