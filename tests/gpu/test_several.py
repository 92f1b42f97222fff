"""Several GPUs of one process: all collectives, each way."""

import pytest

from tfdist.native import nvidia


def test_collectives(execute, nccl):
    if len(nvidia.Driver("").devices()) < 2:
        pytest.skip("a single GPU")
    execute("device_gpus", FAKE_NCCL=nccl)
