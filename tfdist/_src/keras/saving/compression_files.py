"""Saves each worker's codec state next to the model's file.

The chief writes the model's file for all workers. However, the compression errors that a codec
carries over to the next step differ between workers. So each worker writes its own errors to a file
next to the model's file. This file also contains a checksum of the weights, to detect errors that
belong to other weights.
"""

import functools
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist._src.compression.compressor import Compressor
from tfdist._src.internals.keras import saving_lib
from tfdist._src.internals.optimizer import inner_optimizer
from tfdist._src.keras.patching import patch
from tfdist._src.keras.saving.files import group_of
from tfdist._src.log import logger
from tfdist._src.strategy.extended import extended_of

_MARK = "mark"


def install() -> None:
    """Extends the functions that write and read `.keras` and `.weights.h5` files."""
    patch("saving_lib.save_model", _saving)
    patch("saving_lib.save_weights_only", _saving)
    patch("saving_lib.load_weights_only", _loading)
    load_model = saving_lib.load_model

    @functools.wraps(load_model)
    def load_model_and_state(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(filepath, *args, **kwargs)
        load_state(model, filepath)
        return model

    patch("saving_lib.load_model", lambda _: load_model_and_state)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_and_state(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(model, filepath, *args, **kwargs)
        if compressor_of(model) is not None:
            state = getattr(_optimizer_of(model), "compression_state", None)
            path = _path(model, filepath)
            if state is not None and path:
                _write(path, {_MARK: _mark(model), **state.values()})
        return result

    return save_and_state


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_state(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(model, filepath, *args, **kwargs)
        load_state(model, filepath)
        return result

    return load_and_state


def load_state(model: Any, filepath: Any) -> None:
    """Restores this worker's codec state from the file next to a model's file, if it exists.

    Args:
        model: the model. Its weights and its optimizer's state must already be loaded.
        filepath: the model's file.
    """
    compressor, optimizer = compressor_of(model), _optimizer_of(model)
    if compressor is None or optimizer is None or not optimizer.built:
        return
    path = _path(model, filepath)
    if not path or not _value(optimizer.iterations):
        return
    values = _read(path)
    if values.pop(_MARK, None) == _mark(model):
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = compressor.new_state()
        optimizer.compression_state.load(values)
    elif compressor.keeps():
        problem = "belongs to other weights" if os.path.exists(path) else "does not exist"
        logger.warning(
            f"{path} {problem}; training continues without the compression errors of the "
            "earlier run."
        )


def compressor_of(model: Any) -> Compressor | None:
    """Returns the compressor of the model's gradients; None if no gradients are compressed."""
    if group_of(model) is None:
        return None
    compressor = extended_of(model.distribute_strategy).compressor
    return compressor if compressor is not None and compressor.active else None


def _optimizer_of(model: Any) -> Any:
    optimizer = getattr(model, "optimizer", None)
    return inner_optimizer(optimizer)


def _path(model: Any, filepath: Any) -> str:
    """Returns the path of this worker's file; "" if the model's file is not a local file."""
    if not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath):
        return ""
    group = group_of(model)
    assert group is not None
    rank, size = group.topology.rank, group.topology.size
    return f"{os.path.abspath(filepath)}.compression-{rank}-of-{size}.npz"


def _mark(model: Any) -> int:
    """Computes a checksum of the weights and the optimizer's iterations."""
    mark = zlib.crc32(_value(_optimizer_of(model).iterations).tobytes())
    for variable in model.trainable_variables:
        mark = zlib.crc32(np.ascontiguousarray(_value(variable)).view(np.uint8).data, mark)
    return mark


def _value(variable: Any) -> np.ndarray[Any, Any]:
    copies = getattr(variable.value, "values", [variable.value])
    return np.asarray(copies[0].numpy())


def _write(path: str, values: dict[str, Any]) -> None:
    unfinished = f"{path}.{uuid.uuid4().hex[:8]}"
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **values)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def _read(path: str) -> dict[str, Any]:
    """Returns the contents of the file; {} if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile):
        return {}
