"""The state of callbacks and codecs in a snapshot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist._src.internals.callbacks import (
    CsvFile,
    attributes_of,
    best_weights_of,
    set_best_weights,
)
from tfdist._src.internals.optimizer import updating_optimizers
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.snapshots.part_file import Array


def states_of(callbacks: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The states of callbacks.

    Args:
        callbacks: in the order in which they are called.

    Returns:
        For each callback that remembers anything, by its class and number, what JSON can represent
        of it; and arrays by name.
    """
    states: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, callback in _named(callbacks):
        state: dict[str, Any] = {"attributes": attributes_of(callback)}
        if isinstance(callback, keras.callbacks.CSVLogger) and CsvFile(callback).is_written:
            state["csv"] = CsvFile(callback).read()
        if isinstance(callback, keras.callbacks.History):
            state["history"] = {"epoch": callback.epoch, "logs": callback.history}
        if callable(getattr(callback, "state_dict", None)):
            state["own"] = _checked(callback, callback.state_dict())
        weights = best_weights_of(callback)
        if weights is not None:
            state["best_weights"] = len(weights)
            arrays |= {_weight(name, i): np.asarray(w) for i, w in enumerate(weights)}
        states[name] = _plain(state)
    return states, arrays


def load_states(callbacks: Sequence[Any], states: Mapping[str, Any], array_of: Any) -> None:
    """Restores what callbacks remembered; those that were not there before keep what they have.

    Args:
        callbacks: in the order in which they are called, after their `on_train_begin`.
        states: as returned by `states_of`.
        array_of: returns the array of a name.
    """
    for name, callback in _named(callbacks):
        state = states.get(name)
        if state is None:
            continue
        for attribute, value in state["attributes"].items():
            setattr(callback, attribute, value)
        if "csv" in state and CsvFile(callback).is_written:
            CsvFile(callback).restore(state["csv"])
        if "history" in state:
            callback.epoch[:] = state["history"]["epoch"]
            callback.history.clear()
            callback.history.update(state["history"]["logs"])
        if "own" in state and callable(getattr(callback, "load_state_dict", None)):
            callback.load_state_dict(state["own"])
        if "best_weights" in state:
            count = state["best_weights"]
            set_best_weights(callback, [array_of(_weight(name, i)) for i in range(count)])


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        yield f"{kind} {seen[kind]}", callback


def _weight(name: str, number: int) -> str:
    return f"callback {name}/best weights/{number}"


def _checked(callback: Any, state: Any) -> Any:
    try:
        json.dumps(_plain(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`state_dict()` of a callback must return what JSON can represent. Received: {error}, "
            f"from {type(callback).__name__}. Return numbers, strings, lists and dicts."
        ) from error
    return state


def _plain(value: Any) -> Any:
    """A value without arrays and tensors, for JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return np.asarray(value).tolist()


def codec_arrays(model: Any, rank: int) -> dict[str, Array]:
    """This worker's state, by name."""
    return {
        f"{_prefix(number, rank)}{name}": value
        for number, optimizer in enumerate(_optimizers(model))
        if (state := getattr(optimizer, "compression_state", None)) is not None
        for name, value in state.values().items()
    }


def load_codec_arrays(model: Any, rank: int, arrays: dict[str, Array]) -> None:
    """Restores this worker's state; variables that are created later get their values then.

    Args:
        model: the model in training.
        rank: this worker's rank.
        arrays: by name, as returned by `codec_arrays`.
    """
    compressor = compressor_of(model)
    for number, optimizer in enumerate(_optimizers(model)):
        prefix = _prefix(number, rank)
        own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        if not own or compressor is None:
            continue
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = compressor.new_state()
        optimizer.compression_state.load(own)


def _optimizers(model: Any) -> list[Any]:
    if compressor_of(model) is None or model.optimizer is None:
        return []
    return updating_optimizers(model.optimizer)


def _prefix(number: int, rank: int) -> str:
    return f"compression/worker {rank}/optimizer {number}/"
