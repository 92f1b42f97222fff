"""A worker of a soak: trains by `fit`, and records each step's rows and weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.soaking.records import Ended, Fed, Finished, Recorder

PACE = 2.0  # seconds that a slow step takes, a fraction of what a process takes to come


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        records: the folder for records.
        slow: a file with the step from which steps are to be slow, so that faults come in time and
            others can join; none are where it is not there.
        result: the file for the weights in the end, which every worker writes in turn.
        epochs: how many.
        rows: of an epoch.
        batch: rows of a step, of all workers together.
        least: workers that the group needs; 0 for a training without `Elastic`.
        most: workers that it may have.
    """

    records: str
    slow: str
    result: str
    epochs: int
    rows: int
    batch: int
    least: int
    most: int

    @property
    def steps(self) -> int:
        """Of the training."""
        return self.epochs * -(-self.rows // self.batch)

    def argument(self) -> str:
        """For `main`."""
        return json.dumps(asdict(self))


def main(training: Training) -> None:
    """Trains to the end."""
    recorder = Recorder(training.records)
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    epochs = {"now": 0}

    def generation() -> int:
        return int(getattr(strategy, "generation", 0))

    def note(rows: Any, iterations: Any) -> None:
        fed = tuple(int(row) for row in rows.numpy() if row)  # 0 is what an idle replica gets.
        recorder.write(Fed(epochs["now"], int(iterations) + 1, generation(), fed))

    class Recording(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            (x, rows), y = data
            iterations = tf.convert_to_tensor(self.optimizer.iterations)
            tf.py_function(note, [tf.reshape(rows, [-1]), iterations], [])
            return super().train_step((x, y))

    class Recorded(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs["now"] = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = int(self.model.optimizer.iterations.numpy())
            recorder.write(Ended(step, generation(), digest(self.model)))
            with contextlib.suppress(FileNotFoundError):
                if step >= int(Path(training.slow).read_text()):
                    time.sleep(PACE)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = keras.Input([8])
        hidden = keras.layers.Dense(16, "tanh")(inputs)
        model = Recording(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    random = np.random.default_rng(0)
    x = random.standard_normal((training.rows, 8)).astype("float32")
    numbers = np.arange(1, training.rows + 1)
    dataset = tf.data.Dataset.from_tensor_slices(((x, numbers), x.sum(1, keepdims=True)))
    dataset = dataset.shuffle(training.rows, seed=3).batch(training.batch)
    callbacks = [Recorded()]
    if training.least:
        elastic = tfdist.callbacks.Elastic(min_workers=training.least, max_workers=training.most)
        callbacks.append(elastic)
    model.fit(dataset, epochs=training.epochs, verbose=0, callbacks=callbacks)
    part = f"{training.result}.{generation()}.{tfdist.rank()}.npz"
    np.savez(part, *model.get_weights())
    Path(part).replace(training.result)
    recorder.write(Finished(digest(model)))


def digest(model: Any) -> str:
    """A hash of the weights and the optimizer's state."""
    found = hashlib.sha1()
    for variable in (*model.variables, *model.optimizer.variables):
        found.update(variable.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(Training(**json.loads(sys.argv[1])))
