"""One process that trains the batches which workers draw anew when their number changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.recovery.behaviours.data_kinds import DATA
from tests.recovery.behaviours.surviving import Journal, make_model
from tests.strategy.behaviours.common import rows

EPOCHS = 3
ROWS, BATCH = 50, 8
_RATE, _WARMUP_STEPS = 0.01, 10


class Scaled(keras.callbacks.Callback):
    """The learning rate of a warmup whose target is the number of workers.

    Args:
        workers: after how many steps there are how many.
    """

    def __init__(self, workers: list[tuple[int, int]]) -> None:
        super().__init__()
        self._workers, self._steps = workers, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        target = next(number for after, number in reversed(self._workers) if self._steps >= after)
        left = max(1 - self._steps / _WARMUP_STEPS, 0)
        self.model.optimizer.learning_rate = _RATE * (target - (target - 1) * left)
        self._steps += 1


def redrawn(_: Any, settings: dict[str, Any], workers: list[tuple[int, int]]) -> dict[str, Any]:
    """Trains on batches of other sizes.

    Args:
        settings: as for `surviving.trained`.
        workers: after how many steps there are how many workers; first, after none.
    """
    model = make_model(None, settings)
    journal = Journal()
    callbacks = [journal, *([Scaled(workers)] if settings.get("scaled") else [])]
    history: dict[str, list[float]] = {}
    epochs = []
    for epoch, batches in enumerate(_epochs(settings, workers)):
        result = model.fit(
            _dataset(batches),
            initial_epoch=epoch,
            epochs=epoch + 1,
            verbose=0,
            validation_data=rows(20, seed=1),
            validation_batch_size=8,
            callbacks=callbacks,
        )
        for name, values in result.history.items():
            history.setdefault(name, []).extend(values)
        epochs += result.epoch
    return {
        "weights": model.get_weights(),
        "slots": [np.asarray(variable) for variable in model.optimizer.variables],
        "history": history,
        "epochs": epochs,
        "events": ["train", *(event for event in journal.events if event != "train")],
    }


def _epochs(settings: dict[str, Any], workers: list[tuple[int, int]]) -> Iterator[list[Any]]:
    """The batches of each epoch."""
    steps = 0

    def draw(own: Iterator[list[Any]], left: list[Any], count: int | None) -> list[Any]:
        nonlocal steps
        batches: list[Any] = []
        while count is None or len(batches) < count:
            now = next(number for after, number in reversed(workers) if steps >= after)
            if now == workers[0][1] and not left:
                drawn = next(own, [])
            else:
                size = round(BATCH * now / workers[0][1])
                while len(left) < size and (more := next(own, [])):
                    left += more
                drawn, left[:] = left[:size], left[size:]
            if not drawn:
                break
            batches.append([np.stack(component) for component in zip(*drawn, strict=True)])
            steps += 1
        return batches

    given = DATA[settings.get("data", "dataset")](*rows(ROWS))
    count = settings.get("steps_per_epoch", given.get("steps_per_epoch"))
    if count:  # Keras does not cut the last execution short.
        count += -count % settings.get("steps_per_execution", 1)
    data = given["x"]
    if not isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensor_slices(rows(ROWS)).batch(BATCH)
    endless, rest = _rows(data.repeat()), []
    for _ in range(EPOCHS):
        if count:
            yield draw(endless, rest, count)
        else:
            yield draw(_rows(data), [], None)
            iter(data)  # Keras makes one, too, that it does not read: the next one shuffles anew.


def _rows(data: tf.data.Dataset) -> Iterator[list[Any]]:
    """The rows of each batch."""
    for batch in data.as_numpy_iterator():
        yield list(zip(*batch, strict=True))


def _dataset(batches: list[Any]) -> tf.data.Dataset:
    signature = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batches[0])
    dataset = tf.data.Dataset.from_generator(
        lambda: map(tuple, batches), output_signature=signature
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
