"""A trainer of Ray Train whose workers train together under a strategy of tfdist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tfdist._src.ray.backend import TfdistConfig


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on several workers of a Ray cluster, as Ray's `TensorflowTrainer` does.

    In the function, `tfdist.MultiWorkerMirroredStrategy()` finds the workers by itself, `ray.train`
    tells of the run, and `ray.train.get_dataset_shard` gives the worker's part of a Ray dataset. If
    a worker is lost, Ray starts all of them again, as often as `FailureConfig(max_failures=…)`
    allows, or with another number of workers where `ScalingConfig(num_workers=(2, 4))` does;
    `tfdist.callbacks.BackupAndRestore` in a folder that all nodes see then resumes.

    Args:
        train_loop_per_worker: what each worker runs; it takes nothing, or `train_loop_config`.
        train_loop_config: what it is passed.
        tfdist_config: settings of the workers.
        scaling_config: how many workers there are, and with which resources.
        dataset_config: how `datasets` are divided; evenly by default.
        run_config: the run's name, its storage, and what happens after failures.
        datasets: Ray datasets by name.
        validation_config: how Ray validates the checkpoints that are reported.

    Example:
        ```python
        def train_loop(config):
            strategy = tfdist.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = build_model()
                model.compile("adam", "mse")
            backup = tfdist.callbacks.BackupAndRestore("/shared/run7")
            report = tfdist.ray.ReportCallback(backup=backup)
            model.fit(load_data(), epochs=config["epochs"], callbacks=[report, backup])

        trainer = tfdist.ray.Trainer(
            train_loop, train_loop_config={"epochs": 10},
            scaling_config=ray.train.ScalingConfig(num_workers=4, use_gpu=True),
            run_config=ray.train.RunConfig(
                failure_config=ray.train.FailureConfig(max_failures=3)))
        result = trainer.fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        tfdist_config: TfdistConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: dict[str, Any] | None = None,
        validation_config: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker=train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=tfdist_config or TfdistConfig(),
            scaling_config=scaling_config,
            dataset_config=dataset_config,
            run_config=run_config,
            datasets=datasets,
            validation_config=validation_config,
        )
