"""The program of a worker: trains with each way to divide the input, on request."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve


def work(pipe: Connection, pipeline: str, folder: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver closes the pipe.

    Each request is a way to divide the input, and the number of steps to measure. The answer is the
    time and the CPU time of these steps in seconds, the number of elements that the worker has
    processed, and the fraction of the time that it waited for its input. The last number is missing
    if there is a single worker.

    Args:
        pipe: the pipe to the driver.
        pipeline: the name of a pipeline; see `pipelines.make`.
        folder: the folder with the files.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers; empty for a single worker.
    """
    take_place(rank, addresses)
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.input import pipelines

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        """Measures the steps after the first two, which include the start of the pipeline."""

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == 1:
                self.begin = self._now()

        def on_train_end(self, logs: object = None) -> None:
            self.spent = [now - then for now, then in zip(self._now(), self.begin, strict=True)]

        def _now(self) -> list[float]:
            division = strategy.extended.division
            processed = 0 if division is None else division.report().processed
            return [time.perf_counter(), time.process_time(), processed]

    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = pipelines.model_for(pipeline)
    policies = tf.data.experimental.AutoShardPolicy
    while True:
        division, steps = pipe.recv()
        options = tf.data.Options()
        is_files = division == "files"
        options.experimental_distribute.auto_shard_policy = (
            policies.FILE if is_files else policies.DATA
        )
        data = pipelines.make(pipeline, folder).with_options(options)
        strategy.extended.input_division = "never" if is_files else division
        watch = Watch()
        logger = tfdist.callbacks.ThroughputLogger()
        history = model.fit(data, steps_per_epoch=steps + 2, verbose=0, callbacks=[logger, watch])
        pipe.send([*watch.spent, *history.history.get("input_wait", [])[-1:]])


if __name__ == "__main__":
    serve(work)
