"""Runs one script in this process: by itself, or all of it inside a strategy's scope.

It can also run by itself with initial weights that differ by rounding: how far do its results
depend on that?
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Two to three units in the last place of a float32.
_ROUNDING = 1 + 3e-7


def run(script: str, way: str, results: str) -> None:
    """Runs a script, and writes what its trainings gave, or its error, as JSON.

    Args:
        script: the path of the script.
        way: "alone", "rounded", or "distributed": under a `tfdist.MultiWorkerMirroredStrategy`.
        results: the file to write, with the worker's rank added to its name.
    """
    import keras
    import tensorflow as tf

    from tests.guides import made_up

    strategy: Any = None
    if way == "distributed":
        import tfdist

        strategy = tfdist.MultiWorkerMirroredStrategy()
        # What a script would make for itself.
        tf.distribute.MirroredStrategy = lambda *args, **kwargs: strategy
    found: dict[str, Any] = {"logs": [], "error": None}

    def record(name: str, logs: Any) -> None:
        found["logs"].append([name, json.loads(json.dumps(logs, default=_plain))])

    made_up.install(record)
    if way == "rounded":
        round_weights(keras)
    keras.utils.set_random_seed(1)
    sys.argv = [script]
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            found["error"] = f"SystemExit: {end.code}"
    except BaseException as error:
        traceback.print_exc()
        found["error"] = one_line(error)
    rank = strategy.extended.worker_rank if strategy else 0
    Path(f"{results}.{rank}").write_text(json.dumps(found))
    sys.stdout.flush()
    if found["error"]:
        os._exit(1)


def one_line(error: BaseException) -> str:
    """What an error says, on one line and without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if text.startswith("in user code:"):
        lines = lines[-1:]
    said = [line for line in lines if not line.startswith("Exception encountered when calling")]
    return f"{type(error).__name__}: {' '.join((said or lines)[:2])}"[:300]


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def round_weights(keras: Any) -> None:
    """Has initializers give values that differ by rounding."""

    def rounding(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def rounded(*args: Any, **kwargs: Any) -> Any:
            values = create(*args, **kwargs)
            return values * _ROUNDING if values.dtype.is_floating else values

        return rounded

    for kind in vars(keras.initializers).values():
        if isinstance(kind, type) and "__call__" in vars(kind):
            kind.__call__ = rounding(kind.__call__)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3])
