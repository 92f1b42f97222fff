"""The script of a worker that a fault may hit, under `tfdist run`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.recovery.cases import Order
from benchmarks.recovery.marks import FAILED, STEP, Notes

ENDLESS = 10**9


def main(order: Order, notes: Notes) -> None:
    """Trains until the driver ends the job.

    Args:
        order: the model to train, and the backend.
        notes: records each step.
    """
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.recovery import models

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        """Notes the end of each step, and each failed step, which `Elastic` would hide."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step = self.model.train_function
            if not getattr(step, "noted", False):
                self.model.train_function = noting(step)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # Waits until the step has ended.
            notes.write(STEP, int(self.model.optimizer.iterations.numpy()))

    def noting(step: Any) -> Any:
        def noted(iterator: Any) -> Any:
            try:
                return step(iterator)
            except Exception as error:
                # These exceptions report the end of the data.
                if not isinstance(error, (StopIteration, tf.errors.OutOfRangeError)):
                    notes.write(FAILED)
                raise

        noted.noted = True  # type: ignore[attr-defined]
        return noted

    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        network = models.build(order.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss, metrics=["accuracy"])
    if order.backend == "elastic":
        survival = tfdist.callbacks.Elastic(min_workers=1)
    else:
        survival = tfdist.callbacks.BackupAndRestore(order.saved, save_every=order.save_every)
    data = models.endless(order.model, order.workers)
    network.fit(
        data, shuffle=False, steps_per_epoch=ENDLESS, verbose=0, callbacks=[Noting(), survival]
    )


if __name__ == "__main__":
    told = Order(**json.loads(sys.argv[1]))
    # Created before the imports, because the time of a restart includes them.
    mine = Notes(told.notes, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    try:
        main(told, mine)
    except BaseException:
        mine.write(FAILED)
        raise
