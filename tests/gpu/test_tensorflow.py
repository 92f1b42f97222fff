"""TensorFlow on a GPU: operations and sums in graphs, training, compressed gradients.

Two workers share it, or have one each where there are two. With TESTS_GPU_OF_THREADS=1 threads
stand for it, as in tests/strategy/test_gpus.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.strategy.comparison import PACKAGE, assert_close, assert_equal

BEHAVIOURS = f"{PACKAGE}.on_a_gpu"
TRAININGS = (
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
)
# By own kernels and by NCCL: one for each collective and type.
SELECTED = (
    "models:embedding_with_sparse_gradients",
    "models:synchronized_batch_normalization",
    "optimizers:mixed_float16",
    "on_a_gpu:train_with_shards",
    "on_a_gpu:train_in_stages",
)
TRANSPORTS = {
    "host": "2 GPUs through the host",
    "p2p": "2 GPUs by own kernels",
    "nccl": "2 GPUs by NCCL",
}
CODECS = ("fp16", "int8", "onebit", "ef_signsgd", "signum", "topk", "threshold")


@dataclass(frozen=True)
class Groups:
    """Who trains: one process without a strategy, one with all GPUs, and two workers.

    Attributes:
        alone: the first.
        mirrored: the second.
        workers: the third, by how they compute sums.
    """

    alone: Ranks
    mirrored: Ranks
    workers: Mapping[str, Ranks]


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("there is no TensorFlow")
    if os.environ.get("TESTS_GPU_OF_THREADS"):
        workers = {transport: GROUPS[name] for transport, name in TRANSPORTS.items()}
        yield Groups(GROUPS["alone"], GROUPS["1x2 GPUs"], workers)
        return
    visible = _visible()
    if not visible:
        pytest.skip("TensorFlow sees no GPU")
    each = (visible * 2)[:2]
    workers = {transport: Ranks(2, gpus=transport, real_gpus=each) for transport in TRANSPORTS}
    alone = Ranks(0, real_gpus=visible[:1])
    mirrored = Ranks(0, real_gpus=[",".join(visible)])
    yield Groups(alone, mirrored, workers)
    for group in (alone, mirrored, *workers.values()):
        group.stop()


@cache
def _visible() -> list[str]:
    """The GPUs that TensorFlow sees, each as CUDA_VISIBLE_DEVICES says it."""
    code = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = [str(number) for number in range(int(done.stdout))]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[: len(numbers)] if given else numbers


@pytest.fixture
def workers(request: pytest.FixtureRequest, groups: Groups, transport: str) -> Ranks:
    """The two workers, which compute sums that way; skips the test where they cannot."""
    if transport == "nccl" and not os.environ.get("TESTS_GPU_OF_THREADS") and len(_visible()) < 2:
        request.getfixturevalue("sharing")
    return groups.workers[transport]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_and_sums_in_a_graph(workers: Ranks) -> None:
    results = workers.run(f"{BEHAVIOURS}:compute_and_sum")
    for x, y, _, devices in results:
        np.testing.assert_allclose(y, np.tanh(x) * 2 + np.sqrt(abs(x) + 1), rtol=1e-6, atol=1e-6)
        assert devices == ["GPU", "GPU"]
    xs, ys = (np.stack(each) for each in list(zip(*results, strict=True))[:2])
    halves = ys.astype("float16").astype("float32").sum(0).astype("float16")
    expected = [ys.sum(0), halves, (xs * 10).astype("int32").sum(0)]
    for rank, (_, _, sums, _) in enumerate(results):
        assert_equal(sums, expected, f"rank {rank}")


@pytest.mark.parametrize(
    ("transport", "training", "xla"),
    [
        *(("host", training, xla) for training in TRAININGS for xla in ("without", "as_elsewhere")),
        *((way, training, "as_elsewhere") for way in ("p2p", "nccl") for training in SELECTED),
    ],
)
def test_two_workers_train_as_one_process(
    groups: Groups, workers: Ranks, training: str, xla: str
) -> None:
    (expected,) = groups.alone.run(f"{PACKAGE}.{training}")
    results = workers.run(f"{PACKAGE}.xla:{xla}", f"{PACKAGE}.{training}")
    for rank, result in enumerate(results):
        assert_close(result, expected, f"rank {rank}")
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


def test_a_mirrored_strategy_of_all_gpus(groups: Groups) -> None:
    (expected,) = groups.alone.run(f"{BEHAVIOURS}:train")
    ((losses, replicas),) = groups.mirrored.run(f"{BEHAVIOURS}:train_mirrored")
    if replicas < 2:
        pytest.skip("TensorFlow sees one GPU")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        *(("host", name) for name in CODECS),
        *(("nccl", name) for name in ("int8", "onebit", "topk")),
    ],
)
def test_compressed_gradients_are_those_of_cpus(workers: Ranks, name: str) -> None:
    step = f"{BEHAVIOURS}:step_with_codec"
    (expected, on_cpus), _ = GROUPS["2"].run(step, name)
    assert "GPU" not in on_cpus
    for weights, devices in workers.run(step, name):
        assert np.array_equal(weights, expected)
        assert devices == ["GPU" for _ in on_cpus]
