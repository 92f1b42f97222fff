"""What groups of workers do with the examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import keras
from absl import flags

FOLDER = Path(__file__).parents[2] / "examples"


def fit_of(strategy: Any, script: str, changes: dict[str, int], *arguments: str) -> dict[str, Any]:
    """Runs an example, which makes a strategy of its own, with other constants.

    Returns:
        The losses of its `fit`, and the weights after it.
    """
    spec = importlib.util.spec_from_file_location("example", FOLDER / script)
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    known = flags.FLAGS
    before = set(known)
    real = keras.Model.fit
    found = []

    def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        history = real(model, *args, **kwargs)
        found.append({"losses": history.history, "weights": model.get_weights()})
        return history

    try:
        spec.loader.exec_module(example)
        vars(example).update(changes)
        known([script, *arguments])
        with mock.patch.object(keras.Model, "fit", fit):
            example.main([])
    finally:
        known.unparse_flags()
        for name in set(known) - before:
            delattr(known, name)
    (only,) = found
    return only
