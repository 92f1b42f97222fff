"""Access to the state that Keras's callbacks keep from batch to batch and from epoch to epoch."""

from typing import Any

import keras
from keras.src.utils import file_utils
from keras.src.utils.python_utils import pythonify_logs

_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_current_epoch",
        "_last_batch_seen",
        "_batches_seen_since_last_saving",
    ),
    "OrbaxCheckpoint": (
        "best",
        "_current_epoch",
        "_last_batch_seen",
        "_total_batches_seen",
        "_batches_seen_since_last_saving",
    ),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}


def plain_logs(logs: Any) -> dict[str, Any]:
    """Converts the tensors in logs to numbers, as Keras does before it calls callbacks."""
    return pythonify_logs(logs)  # type: ignore[no-any-return]


def attributes_of(callback: Any) -> dict[str, Any]:
    """Returns the attributes in which a callback keeps its state, as a dict from names to values.

    The dict is empty unless the callback's class is a known class of Keras or derived from one.
    """
    names: dict[str, Any] = {}
    for kind, attributes in _ATTRIBUTES.items():
        if isinstance(callback, getattr(keras.callbacks, kind, ())):
            names |= {
                name: getattr(callback, name) for name in attributes if name in vars(callback)
            }
    return names


def best_weights_of(callback: Any) -> list[Any] | None:
    """Returns the weights that `EarlyStopping` may restore when training ends.

    Returns None if the callback has no such weights or is not an `EarlyStopping`.
    """
    early = isinstance(callback, keras.callbacks.EarlyStopping)
    return callback.best_weights if early else None


def set_best_weights(callback: Any, weights: list[Any]) -> None:
    """Sets the weights that `EarlyStopping` may restore when training ends."""
    callback.best_weights = weights


class CsvFile:
    """The file that a `CSVLogger` writes. The callback opens the file when training begins.

    Args:
        logger: the callback.
    """

    def __init__(self, logger: keras.callbacks.CSVLogger) -> None:
        self._logger = logger

    @property
    def is_written(self) -> bool:
        """Whether this worker writes the file; all workers but one discard their logs."""
        file = self._logger.csv_file
        return file is not None and not file.closed and file.name == self._logger.filename

    def read(self) -> dict[str, Any]:
        """Returns the current contents of the file, and the names of its columns."""
        self._logger.csv_file.flush()
        # Read bytes, because text mode would change the line ends that the csv module has written.
        with file_utils.File(self._logger.filename, "rb") as file:
            return {"contents": file.read().decode(), "keys": self._logger.keys}

    def restore(self, state: dict[str, Any]) -> None:
        """Replaces the file's contents with those from an earlier run.

        Rows that the callback writes later are appended.

        Args:
            state: the result of `read` in the earlier run.
        """
        logger = self._logger
        logger.csv_file.close()
        with file_utils.File(logger.filename, "wb") as file:
            file.write(state["contents"].encode())
        logger.csv_file = file_utils.File(logger.filename, "a")
        logger.append_header = not state["contents"]
        logger.keys, logger.writer = state["keys"], None
