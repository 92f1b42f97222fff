"""The script that the workers run under `tfdist run`, for the backends `elastic` and `restart`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.recovery.cases import Order
from benchmarks.recovery.marks import FAILED, STEP, Notes

ENDLESS = 10**9


def main(order: Order, notes: Notes) -> None:
    """Trains until the driver kills the process.

    Args:
        order: the model, the backend, and the folders.
        notes: the notes in which the worker records the end of each step.
    """
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.recovery import models

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        """Records the end of each step, and each failure of a step.

        To record failures, it wraps the train function, because `Elastic` catches the exceptions.
        """

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step = self.model.train_function
            if not getattr(step, "noted", False):
                self.model.train_function = noting(step)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # Waits for the end of the step.
            notes.write(STEP, int(self.model.optimizer.iterations.numpy()))

    def noting(step: Any) -> Any:
        def noted(iterator: Any) -> Any:
            try:
                return step(iterator)
            except Exception as error:
                # These exceptions are no failures: they report the end of the dataset.
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
    # This records the start of the worker. It must precede the imports of the frameworks, because
    # they are part of the time of a restart.
    mine = Notes(told.notes, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    try:
        main(told, mine)
    except BaseException:
        mine.write(FAILED)
        raise
