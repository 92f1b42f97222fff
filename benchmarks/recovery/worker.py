"""A worker's process: one `fit`, whose step is switched between the features."""

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
        pipe: to the driver, which sends a feature and a number of steps, again and again, and is
            sent the seconds that each step took, and those of the processor in all of them.
        model: one of `models.SHAPES`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers.
        folder: for snapshots.
        alone: one of `features.ALONE`, if `fit` is of that one alone.
    """
    take_place(rank, addresses)
    import keras

    import tfdist
    from benchmarks.recovery import models
    from benchmarks.recovery.features import make_backup, tracing

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Each feature's step is traced once; all of them use the same weights."""

        def on_train_begin(self, logs: Any = None) -> None:
            self._steps: dict[str, Any] = {}
            self._turn = contextlib.ExitStack()
            self._await_order()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            backup.asked = self._saves and not self._times

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            if len(self._times) + 1 == self._ordered:
                backup.wait()  # The writing is of this round.
            now = time.perf_counter()
            self._times.append(now - self._last)
            self._last = now
            if len(self._times) == self._ordered:
                pipe.send([self._times, time.process_time() - self._used])
                self._await_order()

        def _await_order(self) -> None:
            feature, self._ordered = pipe.recv()
            self._saves = feature == "snapshots"
            self._turn.close()  # A step may be traced when it is run.
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
