"""Makes Keras's callbacks write their files only on the chief.

All workers run the same script, so their callbacks would write files to the same path.
`ModelCheckpoint` uses `Model.save`, which `files.py` handles. This module only creates the folder
for it.
"""

import contextlib
import errno
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras

from tfdist._src.internals.contract import TARGETS
from tfdist._src.internals.keras import backup_path, checkpoint_path
from tfdist._src.keras.patching import patch
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.keras.saving.files import awaits_admission, group_of, needs_gathering
from tfdist.errors import UnsupportedError


def install() -> None:
    """Wraps the methods with which Keras's callbacks write files."""
    patch("CSVLogger.on_train_begin", _discarding_unless_chief)
    patch("TensorBoard.set_model", _logging_unless_chief)
    patch("BackupAndRestore._save_model", _saving_atomically)
    patch(
        "BackupAndRestore.on_train_end",
        lambda original: _chief_only(_retried_if_not_empty(original)),
    )
    patch("ModelCheckpoint._save_model", _making_the_folder)
    patch("RemoteMonitor.on_epoch_end", _chief_only)
    if "OrbaxCheckpoint._save_checkpoint" in TARGETS:
        patch(
            "OrbaxCheckpoint._save_checkpoint",
            lambda original: _refusing_sharded(_chief_only(original)),
        )


def become_writer(callback: Any) -> None:
    """Makes a callback continue with the former chief's files when its worker becomes the chief.

    Args:
        callback: any callback that was passed to `fit`.
    """
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.csv_file.close()
        append, callback.append, keys = callback.append, True, callback.keys
        try:
            callback.on_train_begin()
        finally:
            callback.append, callback.keys = append, keys
    elif isinstance(callback, keras.callbacks.TensorBoard):
        callback.set_model(callback.model)


def _writes(model: Any) -> bool:
    group = group_of(model)
    return not awaits_admission(model) and (group is None or group.topology.is_chief)


def _make_folder(path: Any) -> None:
    folder = os.path.dirname(path)
    if folder and "://" not in folder:
        os.makedirs(folder, exist_ok=True)


def _retried_if_not_empty(delete: Callable[..., Any]) -> Callable[..., Any]:
    # Another worker may write its part into the folder while the folder is being deleted.
    @functools.wraps(delete)
    def delete_again(self: Any, logs: Any = None) -> Any:
        try:
            return delete(self, logs)
        except OSError as error:
            if group_of(self.model) is None or error.errno != errno.ENOTEMPTY:
                raise
            time.sleep(1)
            return delete(self, logs)

    return delete_again


def _chief_only(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_on_chief(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if _writes(self.model) else None

    return call_on_chief


def _refusing_sharded(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_unless_sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if group_of(self.model) is not None and needs_gathering(self.model):
            raise UnsupportedError(
                f"{type(self).__name__} saves only the state of one worker. Received: "
                f"{self.model.name!r}, whose state is sharded over the workers. Use "
                "keras.callbacks.ModelCheckpoint."
            )
        return save(self, *args, **kwargs)

    return save_unless_sharded


def _discarding_unless_chief(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> Any:
        if _writes(self.model):
            return begin(self, logs)
        path, self.filename = self.filename, os.devnull
        try:
            return begin(self, logs)
        finally:
            self.filename = path

    return on_train_begin


def _logging_unless_chief(set_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_model)
    def set_model_and_folder(self: Any, model: Any) -> Any:
        if _writes(model):
            return set_model(self, model)
        # This directory is deleted together with the callback.
        self._discarded = tempfile.TemporaryDirectory(prefix="tfdist-")
        path, self.log_dir = self.log_dir, self._discarded.name
        try:
            return set_model(self, model)
        finally:
            self.log_dir = path

    return set_model_and_folder


def _making_the_folder(save: Callable[..., Any]) -> Callable[..., Any]:
    # Keras creates the folder if it is missing, but fails if another worker creates it first.
    @functools.wraps(save)
    def save_model(self: Any, epoch: int, batch: int | None, logs: Any) -> Any:
        if group_of(self.model) is not None:
            _make_folder(checkpoint_path(self, epoch, batch, logs))
        return save(self, epoch, batch, logs)

    return save_model


def _saving_atomically(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_model(self: Any) -> Any:
        group = group_of(self.model)
        if group is None:
            return save(self)
        all_write = needs_gathering(self.model) or compressor_of(self.model) is not None
        if all_write:
            # Keras fails if another worker creates the folder first.
            _make_folder(backup_path(self))
        if not group.topology.is_chief:
            if all_write:
                # After the last epoch, the chief may already have deleted the folder.
                with contextlib.suppress(FileNotFoundError):
                    self.model.save_weights(backup_path(self), overwrite=True)
            return None
        # The file of the weights is replaced atomically, so the file of the metadata must be
        # replaced atomically as well.
        path = self._training_metadata_path
        self._training_metadata_path = f"{path}.unfinished"
        try:
            save(self)
            os.replace(self._training_metadata_path, path)
        finally:
            self._training_metadata_path = path
        return None

    return save_model
