"""A worker's process: one `fit`, whose step is switched between the features."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from stepping.place import take_place
from stepping.serving import serve

ENDLESS = 10**9


def work(pipe: Connection, model: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver is gone.

    Args:
        pipe: to the driver, which sends a feature and a number of steps, again and again, and is
            sent the seconds that each step took, and those of the processor in all of them.
        model: one of `models.SHAPES`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers.
    """
    take_place(rank, addresses)
    import keras

    import tfdist
    from recovering import models
    from recovering.features import tracing

    class Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Each feature's step is traced once; all of them use the same weights."""

        def on_train_begin(self, logs: Any = None) -> None:
            self._steps: dict[str, Any] = {}
            self._await_order()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            now = time.perf_counter()
            self._times.append(now - self._last)
            self._last = now
            if len(self._times) == self._ordered:
                pipe.send([self._times, time.process_time() - self._used])
                self._await_order()

        def _await_order(self) -> None:
            feature, self._ordered = pipe.recv()
            if feature not in self._steps:
                with tracing(feature):
                    self._steps[feature] = self.model.make_train_function(force=True)
            self.model.train_function = self._steps[feature]
            self._times: list[float] = []
            self._used = time.process_time()
            self._last = time.perf_counter()

    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        network = models.build(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss, metrics=["accuracy"])
    data = models.endless(model, len(addresses))
    network.fit(data, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=[Turns()])


if __name__ == "__main__":
    serve(work)
