"""The program of a worker: one call of `fit` that takes steps with the requested feature."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve

ENDLESS = 10**9


def work(
    pipe: Connection, model: str, rank: int, addresses: list[str], folder: str, alone: str
) -> None:
    """Trains until the driver closes the pipe.

    A request of the driver consists of a feature and a number of steps. The answer consists of the
    time of each step in seconds, and the total CPU seconds of this process.

    Args:
        pipe: the pipe to the driver.
        model: a key of `sizes.SHAPES`.
        rank: the rank of this worker. It also selects the worker's core.
        addresses: the addresses of all workers.
        folder: the folder for snapshots.
        alone: a feature of `features.ALONE`, which applies to all steps of this process; "" if the
            requests select the feature.
    """
    take_place(rank, addresses)
    import keras

    import tfdist
    from benchmarks.recovery import models
    from benchmarks.recovery.features import make_backup, tracing

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Takes the steps that the driver requests.

        The training step is traced once for each feature. All versions use the same weights.
        """

        def on_train_begin(self, logs: Any = None) -> None:
            self._steps: dict[str, Any] = {}
            self._turn = contextlib.ExitStack()
            self._await_order()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            backup.asked = self._saves and not self._times

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            if len(self._times) + 1 == self._ordered:
                backup.wait()  # So that the time of the round includes writing the snapshot.
            now = time.perf_counter()
            self._times.append(now - self._last)
            self._last = now
            if len(self._times) == self._ordered:
                pipe.send([self._times, time.process_time() - self._used])
                self._await_order()

        def _await_order(self) -> None:
            feature, self._ordered = pipe.recv()
            self._saves = feature == "snapshots"
            # The previous context must remain active until now, because a step is traced when it
            # runs for the first time.
            self._turn.close()
            self._turn.enter_context(tracing(feature))
            if feature not in self._steps:
                self._steps[feature] = self.model.make_train_function(force=True)
            self.model.train_function = self._steps[feature]
            self._times: list[float] = []
            self._used = time.process_time()
            self._last = time.perf_counter()

    strategy = models.strategy_of(model, alone in ("sharded", "copies"))
    with strategy.scope():
        network = models.build(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss, metrics=["accuracy"])
    data = models.endless(model, len(addresses))
    backup = make_backup(folder)
    callbacks = [Turns(), backup]
    if alone:
        callbacks.append(tfdist.callbacks.Elastic(copies=int(alone == "copies")))
    network.fit(data, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    serve(work)
