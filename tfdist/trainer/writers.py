"""Keras's callbacks that write files, given the same path on all workers: the chief's alone do.

`ModelCheckpoint` writes through `Model.save` and needs nothing here.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from tfdist.trainer.files import group_of


def install() -> None:
    """Replaces where these callbacks write."""
    csv, board, backup = (
        keras.callbacks.CSVLogger,
        keras.callbacks.TensorBoard,
        keras.callbacks.BackupAndRestore,
    )
    csv.on_train_begin = _writing_elsewhere(csv.on_train_begin)
    board.set_model = _logging_elsewhere(board.set_model)
    backup._save_model = _saving_at_once(backup._save_model)
    backup.on_train_end = _by_the_chief(backup.on_train_end)


def _may_write(model: Any) -> bool:
    group = group_of(model)
    return group is None or group.topology.is_chief


def _by_the_chief(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def by_the_chief(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if _may_write(self.model) else None

    return by_the_chief


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


def _saving_at_once(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_model(self: Any) -> Any:
        group = group_of(self.model)
        if group is None:
            return save(self)
        if not group.topology.is_chief:
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
