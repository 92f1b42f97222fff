"""TensorFlow on a GPU: operations and sums in graphs, training, compressed gradients.

With TESTS_GPU_OF_THREADS=1 threads stand for it, as in tests/strategies/test_gpus.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.groups import GROUPS
from tests.ranks import Ranks
from tests.strategies.comparison import PACKAGE, assert_close, assert_equal

BEHAVIOURS = f"{PACKAGE}.on_a_gpu"
# A GPU adds in another order than a CPU, and two halves of a batch in another one than the whole.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Groups:
    """Who trains: one process without a strategy, two workers that share a GPU, and all GPUs."""

    alone: Ranks
    workers: Ranks
    mirrored: Ranks


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("there is no TensorFlow")
    if os.environ.get("TESTS_GPU_OF_THREADS"):
        through_host = GROUPS["2 GPUs through the host"]
        yield Groups(GROUPS["alone"], through_host, GROUPS["1x2 GPUs"])
        return
    visible = _visible()
    if not visible:
        pytest.skip("TensorFlow sees no GPU")
    first = visible.split(",")[0]
    found = Groups(
        Ranks(0, real_gpus=first), Ranks(2, real_gpus=first), Ranks(0, real_gpus=visible)
    )
    yield found
    for each in (found.alone, found.workers, found.mirrored):
        each.stop()


def _visible() -> str:
    """The GPUs that TensorFlow sees, as CUDA_VISIBLE_DEVICES says it."""
    code = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))) if count else ""


def test_operations_and_sums_in_a_graph(groups: Groups) -> None:
    results = groups.workers.run(f"{BEHAVIOURS}:compute_and_sum")
    for x, y, _, devices in results:
        np.testing.assert_allclose(y, np.tanh(x) * 2 + np.sqrt(abs(x) + 1), rtol=1e-6, atol=1e-6)
        assert devices == ["GPU", "GPU"]
    xs, ys = (np.stack(each) for each in list(zip(*results, strict=True))[:2])
    halves = ys.astype("float16").astype("float32").sum(0).astype("float16")
    expected = [ys.sum(0), halves, (xs * 10).astype("int32").sum(0)]
    for rank, (_, _, sums, _) in enumerate(results):
        assert_equal(sums, expected, f"rank {rank}")


@pytest.mark.parametrize("xla", ["without", "as_elsewhere"])
@pytest.mark.parametrize(
    "behaviour",
    [
        "models:convolution",
        "models:embedding_with_sparse_gradients",
        "models:synchronized_batch_normalization",
        "optimizers:momentum_and_schedule",
        "optimizers:gradient_accumulation",
        "optimizers:mixed_float16",
        "optimizers:mixed_bfloat16",
        "execution:custom_loop",
        "execution:several_steps_per_execution",
        "on_a_gpu:train_with_shards",
        "on_a_gpu:train_in_stages",
    ],
)
def test_two_workers_train_as_one_process(groups: Groups, behaviour: str, xla: str) -> None:
    (expected,) = groups.alone.run(f"{PACKAGE}.{behaviour}")
    results = groups.workers.run(f"{PACKAGE}.xla:{xla}", f"{PACKAGE}.{behaviour}")
    for rank, result in enumerate(results):
        assert_close(result, expected, f"rank {rank}", TOLERANCE)
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


def test_a_mirrored_strategy_of_all_gpus(groups: Groups) -> None:
    (expected,) = groups.alone.run(f"{BEHAVIOURS}:train")
    ((losses, replicas),) = groups.mirrored.run(f"{BEHAVIOURS}:train_mirrored")
    if replicas < 2:
        pytest.skip("TensorFlow sees one GPU")
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["fp16", "int8", "onebit", "ef_signsgd", "signum", "topk", "threshold"]
)
def test_compressed_gradients_are_those_of_cpus(groups: Groups, name: str) -> None:
    step = f"{BEHAVIOURS}:step_with_codec"
    (expected, on_cpus), _ = GROUPS["2"].run(step, name)
    assert "GPU" not in on_cpus
    for weights, devices in groups.workers.run(step, name):
        assert np.array_equal(weights, expected)
        assert devices == ["GPU" for _ in on_cpus]
