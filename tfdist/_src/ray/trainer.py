"""A trainer for Ray Train; its workers train together under a tfdist strategy."""

import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.launch.job.worker import forwarded
from tfdist._src.options import Variable

# The ports are held until the worker's process ends, so that no other program gets them.
_held: list[Reservation] = []


@dataclass
class TfdistConfig(BackendConfig):  # type: ignore[misc]
    """Configures workers of Ray Train as workers of tfdist.

    Attributes:
        settings: environment variables for all workers; by default, the `TFDIST_*` variables of the
            driver. They are set before TensorFlow is imported.
    """

    settings: dict[str, str] | None = field(default=None, repr=False)  # Values may be secret.

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend class that Ray calls to set up the workers."""
        return TfdistBackend

    def to_dict(self) -> dict[str, Any]:
        """Returns the form in which Ray shows the settings: their names, without the values."""
        return {"settings": sorted(self.settings or {})}

    def _repr_html_(self) -> str:
        return html.escape(f"TfdistConfig({self.to_dict()})")

    def __post_init__(self) -> None:
        if self.settings is None:
            self.settings = forwarded(os.environ, [])


class TfdistBackend(Backend):  # type: ignore[misc]
    """Gives each worker its `TF_CONFIG`, and gives all workers a common secret."""

    def on_start(self, worker_group: Any, backend_config: TfdistConfig) -> None:
        """Configures the workers. Ray calls this when all workers run, and after each restart."""
        addresses = worker_group.execute(_address)
        settings = {Variable.SECRET: new_secret(), **(backend_config.settings or {})}
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _set_place, addresses=addresses, index=rank, settings=settings
                )
                for rank in range(len(addresses))
            ]
        )


def _address() -> str:
    """This worker's address, with a free port."""
    host = ray.util.get_node_ip_address()
    _held.append(Reservation(1))
    (port,) = _held[-1].ports
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_place(addresses: list[str], index: int, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(place)


class Trainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on several workers of a Ray cluster, as Ray's `TensorflowTrainer` does.

    In the function, `tfdist.MultiWorkerMirroredStrategy()` finds the workers automatically,
    `ray.train` describes the run, and `ray.train.get_dataset_shard` returns the worker's part of a
    Ray dataset. If a worker is lost, Ray restarts all workers. `FailureConfig(max_failures=…)` sets
    the maximum number of restarts. With `ScalingConfig(num_workers=(2, 4))`, the number of workers
    may be different after a restart. `tfdist.callbacks.BackupAndRestore` then resumes from a folder
    that all nodes can access.

    Args:
        train_loop_per_worker: the function that each worker runs; it takes no argument, or the
            argument `train_loop_config`.
        train_loop_config: the argument of this function.
        tfdist_config: settings of the workers.
        scaling_config: the number of workers, and their resources.
        dataset_config: how `datasets` are divided; evenly by default.
        run_config: the run's name, its storage, and its policy after failures.
        datasets: Ray datasets by name.
        validation_config: how Ray validates the reported checkpoints.

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
