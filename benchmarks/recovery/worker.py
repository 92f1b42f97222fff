"""A worker's process: one `fit` that switches its step between the features."""

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
    """Trains until the driver is gone.

    Args:
        pipe: the pipe to the driver. Each order is a feature and a number of steps; the answer is
            the seconds of each step, and the total CPU seconds.
        model: a key of `sizes.SHAPES`.
        rank: the rank of this worker, which is also the number of its core.
        addresses: the addresses of all workers.
        folder: the folder for snapshots.
        alone: the feature of `features.ALONE` that applies to the whole `fit`; else "".
    """
    take_place(rank, addresses)
    import keras

    import tfdist
    from benchmarks.recovery import models
    from benchmarks.recovery.features import make_backup, tracing

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Traces the step of each feature once; all steps use the same weights."""

        def on_train_begin(self, logs: Any = None) -> None:
            self._steps: dict[str, Any] = {}
            self._turn = contextlib.ExitStack()
            self._await_order()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            backup.asked = self._saves and not self._times

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            if len(self._times) + 1 == self._ordered:
                backup.wait()  # The round's time includes the writing.
            now = time.perf_counter()
            self._times.append(now - self._last)
            self._last = now
            if len(self._times) == self._ordered:
                pipe.send([self._times, time.process_time() - self._used])
                self._await_order()

        def _await_order(self) -> None:
            feature, self._ordered = pipe.recv()
            self._saves = feature == "snapshots"
            self._turn.close()  # Not earlier, because a step is traced when it first runs.
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
