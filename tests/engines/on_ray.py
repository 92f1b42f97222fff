"""Runs a script on two nodes of a local Ray cluster: python -m tests.engines.on_ray TRAINER SCRIPT…

The trainer is "tfdist" or "tensorflow", Ray's own one.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig

from tests.engines.conftest import clean_environment

# Ray would print everything twice.
_WITHOUT_PATCH = {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}


@contextlib.contextmanager
def cluster(nodes: int, **init: Any) -> Iterator[Cluster]:
    """A head without workers, and nodes for one worker each."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(nodes):
            found.add_node(num_cpus=1)
        variables = {**clean_environment(), **_WITHOUT_PATCH}
        ray.init(address=found.address, runtime_env={"env_vars": variables}, **init)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def on_workers(count: int | tuple[int, int]) -> ScalingConfig:
    """One worker on each node."""
    return ScalingConfig(
        num_workers=count, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"
    )


def run_script(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.argv = list(config["script"])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def main(trainer: str, *script: str) -> None:
    if trainer == "tfdist":
        from tfdist.ray import Trainer
    else:
        from ray.train.tensorflow import TensorflowTrainer as Trainer
    with cluster(2):
        config = {"script": script}
        Trainer(run_script, train_loop_config=config, scaling_config=on_workers(2)).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
