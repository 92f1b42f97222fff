"""Runs workers as the tasks of a barrier stage, or on the driver's machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote

from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.launch.job.resources import VISIBLE
from tfdist._src.launch.job.worker import forwarded
from tfdist._src.spark.barrier_task import SCHEMA, BarrierTask, failure_in
from tfdist._src.spark.dataset_shard import check_columns
from tfdist._src.spark.driver_log import DriverLog
from tfdist._src.spark.program import WorkerProgram

_TAIL_LINES = 30


def run_locally(program: WorkerProgram, count: int, *, use_gpu: bool, max_restarts: int) -> Any:
    """Runs the workers, shows their output, and returns the function's return value on rank 0.

    Raises:
        RuntimeError: a worker has failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as name:
        folder = Path(name)
        launcher = [sys.executable, "-m", "tfdist", "run", "-n", str(count), "--output", "all"]
        launcher += ["--max-restarts", str(max_restarts)]
        gpus = {} if use_gpu else {VISIBLE: ""}
        path = os.pathsep.join(filter(None, sys.path))
        with subprocess.Popen(
            [*launcher, *program.command(folder)],
            env={**os.environ, "PYTHONPATH": path, **gpus},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            lines: list[str] = []
            try:
                for line in process.stdout:  # A notebook shows only this process's output.
                    print(line, end="", flush=True)
                    lines = [*lines[1 - _TAIL_LINES :], line]
            except BaseException:
                process.terminate()  # The launcher ends its workers.
                raise
        if process.returncode:
            raise RuntimeError(
                f"the training failed with exit code {process.returncode}. Its last output:\n"
                + "".join(lines)
            )
        return program.result(program.saved_result(folder))


_EXECUTOR_LOST = "ExecutorLostFailure"
_GPUS_PER_TASK = "spark.task.resource.gpu.amount"


class Distributor:
    """Runs a function or a script on several workers, like PySpark's `TorchDistributor`.

    Each worker is one task of a barrier stage: Spark starts all of them together, or none. In the
    function, `tfdist.MultiWorkerMirroredStrategy()` finds the other workers automatically. The
    workers' output appears on the driver, each line with the worker's rank. If a worker fails,
    Spark ends the others. With `max_restarts`, all workers start again, and
    `tfdist.callbacks.BackupAndRestore` resumes from a folder that all hosts can access. Spark
    itself never restarts such a stage.

    Args:
        num_processes: the number of workers.
        local_mode: whether the workers run on the driver's machine instead of in Spark tasks.
        use_gpu: whether workers use the GPUs that Spark has assigned to their tasks; otherwise,
            they use none.
        max_restarts: the number of times that all workers may be restarted after a failure.

    Raises:
        ValueError: there is no active session, `num_processes` is not positive, `max_restarts` is
            negative, or Spark assigns no GPUs.

    Example:
        ```python
        def train(epochs):
            strategy = tfdist.MultiWorkerMirroredStrategy()
            with strategy.scope():
                model = build_model()
                model.compile("adam", "mse")
            return model.fit(load_data(), epochs=epochs).history["loss"]

        losses = tfdist.spark.Distributor(num_processes=4, use_gpu=True).run(train, 10)
        ```
    """

    def __init__(
        self,
        num_processes: int = 1,
        local_mode: bool = False,
        use_gpu: bool = False,
        *,
        max_restarts: int = 0,
    ) -> None:
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ValueError(
                f"`num_processes` must be a positive integer. Received: {num_processes!r}"
            )
        if max_restarts < 0:
            raise ValueError(f"`max_restarts` must not be negative. Received: {max_restarts}")
        self._session = None if local_mode else _active_session()
        gpus = self._session.conf.get(_GPUS_PER_TASK, "0") if self._session is not None else "1"
        if use_gpu and float(gpus) < 1:
            raise ValueError(
                f"`use_gpu=True` needs {_GPUS_PER_TASK} to be at least 1 in the session"
            )
        self._count = num_processes
        self._use_gpu = use_gpu
        self._max_restarts = max_restarts

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Runs the function or script on all workers, and returns when all workers have ended.

        Args:
            train_object: the function or script that each worker runs. A script is given by its
                path, which must exist on all hosts.
            args: the function's arguments, or the script's command line.
            kwargs: the function's keyword arguments.

        Returns:
            The function's return value on rank 0; None for a script.

        Raises:
            ValueError: the function cannot be pickled, or keyword arguments are given for a script.
            RuntimeError: a worker has failed; the message contains its last lines of output.
        """
        program = WorkerProgram.made(train_object, args, kwargs)
        if self._session is None:
            return run_locally(
                program, self._count, use_gpu=self._use_gpu, max_restarts=self._max_restarts
            )
        numbers = self._session.range(0, self._count, 1, numPartitions=self._count)
        return self._run(program, numbers, with_rows=False)

    def run_on_dataframe(
        self,
        train_object: Callable[..., Any] | str,
        dataframe: DataFrame | str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trains on rows from Spark, which reach the workers without passing through the driver.

        All workers get about the same number of rows, in no particular order, and read them with
        `tfdist.spark.get_dataset_shard()`. While a worker runs, its rows are stored on the disk of
        its host.

        Args:
            train_object: as for `run`.
            dataframe: the rows, or the path of a Parquet file or folder, as Spark reads it.
            args: as for `run`.
            kwargs: as for `run`.

        Returns:
            As for `run`.

        Raises:
            ValueError: `local_mode` is True, so there are no tasks to receive the rows; or a column
                cannot be converted to tensors; or there are no rows.

        Example:
            ```python
            def train():
                strategy = tfdist.MultiWorkerMirroredStrategy()
                with strategy.scope():
                    model = build_model()
                rows = tfdist.spark.get_dataset_shard()
                batches = rows.map(lambda row: (row["features"], row["label"])).batch(64)
                model.fit(strategy.distribute_datasets_from_function(lambda context: batches))

            tfdist.spark.Distributor(num_processes=4).run_on_dataframe(train, "/data/train.parquet")
            ```
        """
        if self._session is None:
            raise ValueError(
                "run_on_dataframe needs `local_mode=False`: the rows go to Spark's tasks"
            )
        if isinstance(dataframe, str):
            dataframe = self._session.read.parquet(dataframe)
        if not hasattr(dataframe, "mapInArrow"):  # Spark Connect has its own DataFrame class.
            raise ValueError(
                "`dataframe` must be a DataFrame of Spark, or the path of Parquet files. Received: "
                f"a {type(dataframe).__name__}"
            )
        check_columns(dataframe.schema)
        program = WorkerProgram.made(train_object, args, kwargs)
        return self._run(program, dataframe.repartition(self._count), with_rows=True)

    def _run(self, program: WorkerProgram, rows: DataFrame, *, with_rows: bool) -> Any:
        restarts = 0
        while True:
            try:
                return self._run_stage(program, rows, with_rows=with_rows)
            except Exception as error:
                failure = failure_in(str(error))
                worker = failure.startswith("worker ")
                if restarts < self._max_restarts and (worker or _EXECUTOR_LOST in str(error)):
                    restarts += 1
                    what = failure.partition(".")[0] or "an executor is lost"
                    print(f"tfdist: {what}; restart {restarts} of {self._max_restarts}", flush=True)
                elif failure:
                    raise (RuntimeError if worker else ValueError)(failure) from error
                else:
                    raise

    def _run_stage(self, program: WorkerProgram, rows: DataFrame, *, with_rows: bool) -> Any:
        assert self._session is not None
        secret = new_secret()
        # With Spark Connect, this process is not on the driver's machine, so the executors do not
        # know its address.
        host = "" if is_remote() else self._session.conf.get("spark.driver.host", "")
        with DriverLog(secret, self._count) as log:
            task = BarrierTask(
                program=program,
                secret=secret,
                settings=forwarded(os.environ, []),
                use_gpu=self._use_gpu,
                log=(host, log.port),
                with_rows=with_rows,
            )
            chunks = rows.mapInArrow(task, SCHEMA, barrier=True).collect()
        if not chunks:  # Spark has not started any task.
            raise ValueError("the DataFrame has no rows")
        return program.result(b"".join(row.chunk for row in chunks))


def _active_session() -> SparkSession:
    try:
        return SparkSession.active()
    except PySparkException as error:
        raise ValueError(
            "Distributor needs a session of Spark: SparkSession.builder.getOrCreate()"
        ) from error
