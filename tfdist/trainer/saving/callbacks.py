"""Keras's callbacks that write files, given the same path on all workers: the chief's alone do.

`ModelCheckpoint` writes through `Model.save`; here it only shares its folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tfdist.errors import UnsupportedError
from tfdist.internals.contract import TARGETS
from tfdist.internals.keras import backup_path, checkpoint_path
from tfdist.trainer.patching import patch
from tfdist.trainer.saving.compression_files import compressor_of
from tfdist.trainer.saving.files import group_of, in_parts


def install() -> None:
    """Replaces where these callbacks write."""
    patch("CSVLogger.on_train_begin", _writing_elsewhere)
    patch("TensorBoard.set_model", _logging_elsewhere)
    patch("BackupAndRestore._save_model", _saving_at_once)
    patch(
        "BackupAndRestore.on_train_end",
        lambda original: _by_the_chief(_again_if_not_empty(original)),
    )
    patch("ModelCheckpoint._save_model", _sharing_a_folder)
    patch("RemoteMonitor.on_epoch_end", _by_the_chief)
    if "OrbaxCheckpoint._save_checkpoint" in TARGETS:
        patch(
            "OrbaxCheckpoint._save_checkpoint",
            lambda original: _of_one_piece(_by_the_chief(original)),
        )


def _may_write(model: Any) -> bool:
    group = group_of(model)
    return group is None or group.topology.is_chief


def _make_folder(path: Any) -> None:
    folder = os.path.dirname(path)
    if folder and "://" not in folder:
        os.makedirs(folder, exist_ok=True)


def _again_if_not_empty(delete: Callable[..., Any]) -> Callable[..., Any]:
    # Another worker may still have added its part while the folder was deleted.
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


def _by_the_chief(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def by_the_chief(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if _may_write(self.model) else None

    return by_the_chief


def _of_one_piece(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_one_piece(self: Any, *args: Any, **kwargs: Any) -> Any:
        if group_of(self.model) is not None and in_parts(self.model):
            raise UnsupportedError(
                f"{type(self).__name__} writes what one worker holds, and each holds a part of "
                f"{self.model.name!r}. Use keras.callbacks.ModelCheckpoint."
            )
        return save(self, *args, **kwargs)

    return save_one_piece


def _writing_elsewhere(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> Any:
        if _may_write(self.model):
            return begin(self, logs)
        path, self.filename = self.filename, os.devnull
        try:
            return begin(self, logs)
        finally:
            self.filename = path

    return on_train_begin


def _logging_elsewhere(set_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_model)
    def set_model_and_folder(self: Any, model: Any) -> Any:
        if _may_write(model):
            return set_model(self, model)
        # Held by the callback, and gone with it.
        self._discarded = tempfile.TemporaryDirectory(prefix="tfdist-")
        path, self.log_dir = self.log_dir, self._discarded.name
        try:
            return set_model(self, model)
        finally:
            self.log_dir = path

    return set_model_and_folder


def _sharing_a_folder(save: Callable[..., Any]) -> Callable[..., Any]:
    # Keras makes the folder where there is none, and fails if another worker was a moment earlier.
    @functools.wraps(save)
    def save_model(self: Any, epoch: int, batch: int | None, logs: Any) -> Any:
        if group_of(self.model) is not None:
            _make_folder(checkpoint_path(self, epoch, batch, logs))
        return save(self, epoch, batch, logs)

    return save_model


def _saving_at_once(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_model(self: Any) -> Any:
        group = group_of(self.model)
        if group is None:
            return save(self)
        all_write = in_parts(self.model) or compressor_of(self.model) is not None
        if all_write:
            # Keras fails if another worker makes it a moment earlier.
            _make_folder(backup_path(self))
        if not group.topology.is_chief:
            if all_write:
                # After the last epoch the chief may have deleted it again.
                with contextlib.suppress(FileNotFoundError):
                    self.model.save_weights(backup_path(self), overwrite=True)
            return None
        # The weights are renamed into place by themselves; what belongs to them follows.
        path = self._training_metadata_path
        self._training_metadata_path = f"{path}.unfinished"
        try:
            save(self)
            os.replace(self._training_metadata_path, path)
        finally:
            self._training_metadata_path = path
        return None

    return save_model
